"""What strikes: planned blows, the choice of whom to strike, and wires that are cut and healed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from bench.chaosing.blows import (
    COORDINATOR,
    JITTER,
    OF_COORDINATOR,
    Blow,
    Fault,
    Rhythm,
    Strike,
    draw_blows,
    load_strikes,
    save_strikes,
)
from bench.chaosing.nemesis import choose_targets, second_choice
from bench.chaosing.wires import Wires
from skein.wire.channel import split_address

NAMES = ("w0", "w1", "w2", "w3", "w4", "w5")
RHYTHM = Rhythm(kill_s=15.0, freeze_s=60.0, cut_s=60.0, coordinator_s=60.0)
HOLDINGS = {name: frozenset({index % 3}) for index, name in enumerate(NAMES)}
"""Three stages, two replicas: w0 and w3 hold the first."""


# --- blows ---


def test_equal_seeds_draw_equal_blows_and_others_do_not() -> None:
    blows = draw_blows(NAMES, RHYTHM, lasts_s=600.0, seed=3)
    assert draw_blows(NAMES, RHYTHM, lasts_s=600.0, seed=3) == blows
    assert draw_blows(NAMES, RHYTHM, lasts_s=600.0, seed=4) != blows


def test_each_kind_comes_once_in_its_period() -> None:
    blows = draw_blows(NAMES, RHYTHM, lasts_s=600.0, seed=1)
    kills = [blow.at_s for blow in blows if blow.fault is Fault.KILL]
    assert len(kills) == 39  # the first after 15 s
    assert all((1 - 2 * JITTER) * 15 <= b - a <= (1 + 2 * JITTER) * 15 for a, b in pairwise(kills))
    assert [blow.fault for blow in blows].count(Fault.FREEZE) == 10
    assert sum(blow.fault in OF_COORDINATOR for blow in blows) == 10


def test_leaving_one_kind_out_moves_no_other() -> None:
    all_kinds = draw_blows(NAMES, RHYTHM, lasts_s=300.0, seed=1)
    without = draw_blows(NAMES, replace(RHYTHM, freeze_s=0.0, cut_s=0.0), lasts_s=300.0, seed=1)
    assert without == tuple(b for b in all_kinds if b.fault not in (Fault.FREEZE, Fault.CUT))


def test_strikes_are_read_as_they_were_written(tmp_path: Path) -> None:
    strikes = (
        Strike(fault=Fault.CUT, targets=("w0", "w1"), struck_s=12.5, healed_s=14.0, waited_s=0.25),
        Strike(fault=Fault.KILL, targets=("w2",), struck_s=20.0, healed_s=23.0, is_last_holder=True),
    )
    save_strikes(strikes, tmp_path / "strikes.json")
    assert load_strikes(tmp_path / "strikes.json") == strikes


# --- whom to strike ---


def blow(fault: Fault, *targets: str) -> Blow:
    return Blow(at_s=0.0, fault=fault, lasts_s=1.0, targets=targets)


def test_the_first_target_is_struck_if_another_holds_what_it_holds() -> None:
    assert choose_targets(blow(Fault.KILL, "w4", "w0"), HOLDINGS, ()) == ("w4",)


def test_the_other_holder_of_what_a_struck_worker_holds_is_spared() -> None:
    assert choose_targets(blow(Fault.KILL, "w3", "w0", "w1"), HOLDINGS, {"w0"}) == ("w1",)


def test_the_last_holder_of_a_dead_workers_stage_is_spared_until_somebody_holds_it_again() -> None:
    dead = {name: stages for name, stages in HOLDINGS.items() if name != "w0"}
    assert choose_targets(blow(Fault.FREEZE, "w3"), dead, ()) == ()
    assert choose_targets(blow(Fault.FREEZE, "w3"), {**dead, "w1": frozenset({0, 1})}, ()) == ("w3",)


def test_who_holds_nothing_is_struck_only_if_nobody_else_may_be() -> None:
    assert choose_targets(blow(Fault.KILL, "w6", "w0"), HOLDINGS, ()) == ("w0",)
    assert choose_targets(blow(Fault.KILL, "w6"), HOLDINGS, ()) == ()
    alone = {"w0": frozenset({0}), "w1": frozenset({1})}
    assert second_choice(blow(Fault.KILL, "w0", "w1", "w6"), alone, ()) == ("w6",)
    assert second_choice(blow(Fault.KILL, "w0", "w1", "w6"), alone, {"w6"}) == ("w0",)
    assert second_choice(blow(Fault.KILL, "w0"), alone, {"w0"}) == ()


def test_a_cut_never_has_both_holders_of_a_stage_for_its_ends() -> None:
    assert choose_targets(blow(Fault.CUT, "w0", "w3", "w1"), HOLDINGS, ()) == ("w0", "w1")


def test_a_cut_may_have_the_coordinator_for_an_end() -> None:
    assert choose_targets(blow(Fault.CUT, COORDINATOR, "w3"), HOLDINGS, ()) == (COORDINATOR, "w3")


def test_a_blow_to_the_coordinator_spares_nobody() -> None:
    assert choose_targets(blow(Fault.HOST, COORDINATOR), {}, {COORDINATOR}) == (COORDINATOR,)


# --- wires ---


@asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    """The address of a server that sends everything back in capitals."""

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1024):
            writer.write(data.upper())
        writer.close()

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    async with server:
        yield "{}:{}".format(*server.sockets[0].getsockname())


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = split_address("address", address)
    return await asyncio.open_connection(host, port)


async def said(address: str, text: bytes) -> bytes:
    """What comes back through a way that is open; then everything asked of the wires before has been done."""
    reader, writer = await dial(address)
    writer.write(text)
    answer = await reader.readexactly(len(text))
    writer.close()
    return answer


async def test_wires_carry_bytes_both_ways_until_they_are_cut_and_again_when_healed() -> None:
    async with echoing() as address:
        with Wires({"a": "127.0.0.1:1", "b": address, "c": "127.0.0.1:1"}) as wires:
            reader, writer = await dial(wires.way("a", "b"))
            writer.write(b"before ")
            assert await reader.readexactly(7) == b"BEFORE "
            wires.cut("b", "a")
            wires.cut("a", "b")
            wires.heal("a", "b")
            assert await said(wires.way("c", "b"), b"past the cut") == b"PAST THE CUT"
            writer.write(b"during ")
            held = asyncio.ensure_future(reader.readexactly(7))
            assert await said(wires.way("c", "b"), b"past the bytes") == b"PAST THE BYTES"
            assert not held.done()
            wires.heal("a", "b")
            assert await held == b"DURING "
            writer.close()


async def test_a_connection_begun_through_a_cut_is_taken_and_leads_nowhere_until_it_is_healed() -> None:
    async with echoing() as address:
        with Wires({"a": "127.0.0.1:1", "b": address, "c": "127.0.0.1:1"}) as wires:
            wires.cut("a", "b")
            assert await said(wires.way("c", "b"), b"past the cut") == b"PAST THE CUT"
            reader, writer = await dial(wires.way("a", "b"))
            writer.write(b"hello")
            held = asyncio.ensure_future(reader.readexactly(5))
            assert await said(wires.way("c", "b"), b"past the dial") == b"PAST THE DIAL"
            assert not held.done()
            wires.heal("a", "b")
            assert await held == b"HELLO"
            writer.close()


async def test_an_end_that_closes_closes_the_other() -> None:
    async with echoing() as address:
        with Wires({"a": "127.0.0.1:1", "b": address}) as wires:
            reader, writer = await dial(wires.way("a", "b"))
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()


def test_peers_are_dialled_by_the_addresses_that_they_advertise() -> None:
    with Wires({"a": "127.0.0.3:1", "b": "127.0.0.3:2", COORDINATOR: "127.0.0.1:3"}) as wires:
        assert wires.ways_of("a", but=COORDINATOR) == {"127.0.0.3:2": wires.way("a", "b")}
        assert wires.way("a", COORDINATOR) != wires.way("b", COORDINATOR)
