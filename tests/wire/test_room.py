"""Room for strangers: whoever comes gets in, whoever has been in for longest goes."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skein.wire.serving.room import Room
from tests.support.extent import examples


class Guests:
    """Callers that stay until they are put out."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, address: str, seconds: float | None = None) -> None:
        """Be in, and whoever had to go for it out."""
        is_in = asyncio.Event()
        self.tasks.append(asyncio.create_task(self._stay(address, seconds, is_in)))
        await is_in.wait()
        while len(inside := [task for task in self.tasks if not task.done()]) > len(self.room):
            await asyncio.wait(inside, return_when=asyncio.FIRST_COMPLETED)

    async def _stay(self, address: str, seconds: float | None, is_in: asyncio.Event) -> None:
        async with self.room.enter(address, seconds):
            is_in.set()
            await asyncio.Event().wait()

    async def go(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def put_out(guests: Guests) -> list[int]:
    """Numbers of those who were, in their order of coming."""
    return [
        number
        for number, task in enumerate(guests.tasks)
        if task.done() and isinstance(task.exception(), TimeoutError)
    ]


async def test_the_oldest_of_an_address_goes_for_the_next_of_it() -> None:
    guests = Guests(Room(most=8, per_address=2))
    for _ in range(4):
        await guests.come("a")
    await guests.come("b")
    assert put_out(guests) == [0, 1]
    assert len(guests.room) == 3
    await guests.go()
    assert len(guests.room) == 0


async def test_where_all_is_full_the_oldest_of_the_address_with_most_goes() -> None:
    guests = Guests(Room(most=4, per_address=3))
    for address in ("b", "a", "a", "a"):
        await guests.come(address)
    await guests.come("c")
    assert put_out(guests) == [1]
    await guests.go()


async def test_who_is_done_in_time_is_never_put_out() -> None:
    room = Room(most=2, per_address=2)
    guests = Guests(room)
    for _ in range(100):
        await guests.come("flood")
        async with room.enter("flood", 10.0):
            assert len(room) <= 2
    await guests.go()


async def test_a_stay_ends_when_its_time_is_over() -> None:
    with pytest.raises(TimeoutError):
        async with Room(most=2, per_address=2).enter("a", 0.0):
            await asyncio.Event().wait()


@settings(max_examples=examples(50))
@given(addresses=st.lists(st.sampled_from("abcd"), max_size=30))
def test_there_are_never_more_than_fit(addresses: list[str]) -> None:
    async def run() -> None:
        room = Room(most=5, per_address=2)
        guests = Guests(room)
        for address in addresses:
            await guests.come(address)
            assert not guests.tasks[-1].done()
            assert len(room) <= 5
            inside = [a for a, t in zip(addresses, guests.tasks, strict=False) if not t.done()]
            assert len(inside) == len(room)
            assert all(inside.count(x) <= 2 for x in "abcd")
        await guests.go()
        assert len(room) == 0

    asyncio.run(run())
