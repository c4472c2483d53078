"""Gathering of one state from several donors at once, each giving as much of it as its speed allows."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

from skein.errors import RemoteError
from skein.protocol.messages.directives import Member
from worker.bundle import WireTensor
from worker.transport.fetching.fetch import AbsentError

Fetch = Callable[[Member, frozenset[str]], Awaitable[Mapping[str, WireTensor]]]
"""Some tensors from one donor, checked; raises RemoteError as `Peers.fetch_state` does."""

LEAST_BATCH_BYTES = 1 << 20
"""Smaller ones cost more in round trips than they gain."""
BATCHES_PER_DONOR = 8
"""Raise it if donors of unequal speed end far apart."""
STREAMS_PER_DONOR = 2
"""So that one is full while the next batch is asked for, far away."""
_MOST_AT_A_BATCH = 2
_PAUSE_S = 0.25

Batch = frozenset[str]


class StateGathering:
    """The tensors of one state, as far as they are here: `run` may be called again with other donors.

    Args:
        num_bytes_by_name: all tensors that are wanted.
        patience_s: how long a donor that does not have the state, or not yet, is asked again.
    """

    def __init__(self, fetch: Fetch, num_bytes_by_name: Mapping[str, int], *, patience_s: float) -> None:
        self.tensors: dict[str, WireTensor] = {}
        self._fetch = fetch
        self._num_bytes = dict(num_bytes_by_name)
        self._patience_s = patience_s
        self._todo: list[Batch] = []
        self._running: list[tuple[Batch, Member]] = []
        self._changed = asyncio.Event()

    @property
    def missing(self) -> frozenset[str]:
        """Names of what is not here yet."""
        return frozenset(self._num_bytes.keys() - self.tensors.keys())

    async def run(self, donors: Sequence[Member]) -> None:
        """Fetch what is missing.

        Donors take batches of names off one list, largest first; when it is empty they help each other with the last
        ones. A donor that fails is left out, and the others do its share.

        Raises:
            RemoteError: nobody is left that could give the rest; what came stays here.
        """
        self._todo = self._batches(len(donors))
        streams = [donor for _ in range(STREAMS_PER_DONOR) for donor in donors]
        serving = [asyncio.create_task(self._take_from(donor)) for donor in streams]
        reasons: list[str] = []
        try:
            for ended in asyncio.as_completed(serving):
                reason = await ended
                if not self.missing:
                    return
                reasons.append(reason)
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
        if self.missing:
            raise RemoteError("; ".join(reasons) or "no donor was named")

    def _batches(self, num_donors: int) -> list[Batch]:
        """Batches of missing tensors, of about equal size, in the order in which they are taken: from the end."""
        missing = sorted(self.missing, key=lambda name: (-self._num_bytes[name], name))
        total_bytes = sum(self._num_bytes[name] for name in missing)
        aim_bytes = max(LEAST_BATCH_BYTES, total_bytes // max(1, BATCHES_PER_DONOR * num_donors))
        batches: list[list[str]] = []
        filled_bytes: float = math.inf
        for name in missing:
            if filled_bytes >= aim_bytes:
                batches.append([])
                filled_bytes = 0
            batches[-1].append(name)
            filled_bytes += self._num_bytes[name]
        return [frozenset(batch) for batch in reversed(batches)]

    async def _take_from(self, donor: Member) -> str:
        """Have `donor` give until all is here; why it does not."""
        loop = asyncio.get_running_loop()
        gives_up_at = loop.time() + self._patience_s
        while self.missing:
            batch = self._next(donor)
            if batch is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                self.tensors |= await self._fetch(donor, batch & self.missing)
                gives_up_at = loop.time() + self._patience_s
            except AbsentError as error:
                self._todo.append(batch)
                if loop.time() >= gives_up_at:
                    return str(error)
            except RemoteError as error:
                self._todo.append(batch)
                return str(error)
            finally:
                self._running.remove((batch, donor))
                self._changed.set()
            if batch & self.missing:
                await asyncio.sleep(_PAUSE_S)
        return ""

    def _next(self, donor: Member) -> Batch | None:
        """The next batch to ask `donor` for: one that nobody is at, else one that another, who is slow, may be at."""
        batch = self._pop(self._todo)
        if batch is None:
            batch = self._pop(
                [x for x, by in self._running if by != donor and self._at(x) < _MOST_AT_A_BATCH]
            )
        if batch is not None:
            self._running.append((batch, donor))
        return batch

    def _at(self, batch: Batch) -> int:
        return sum(x == batch for x, _ in self._running)

    def _pop(self, batches: list[Batch]) -> Batch | None:
        """The last of `batches` of which anything is missing."""
        while batches:
            batch = batches.pop()
            if batch & self.missing:
                return batch
        return None
