"""A copy of a stage that this worker fetches from peers, and brings up to date by what committed steps applied.

Rules of this file
- All of it is beside training: bytes come on a lane of their own, and updates run on a thread that is not torch's.
- A copy that follows changes in such an update alone; whoever needs it ends the work on it first.
- A failure loses nothing: what came is kept for another try.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from skein.config.job import read_spec
from skein.errors import LocalError, RemoteError
from skein.numeric.aggregate.rules import rule_of
from skein.numeric.gradients import digest
from skein.protocol.messages.directives import Member, Prefetch, StepRecord
from skein.protocol.worker.keeping.shelf import ShelvedCopy, failure_of, kind_of
from skein.protocol.worker.keeping.snapshots import changes
from skein.protocol.worker.worker_io import WorkerEvent
from skein.types import GroupId, JobId, StageIndex, Step, parse_group
from skein.units import format_bytes
from worker.bundle import WireTensor, to_torch
from worker.compute.snapshots import bring_forward
from worker.compute.state import state_sizes
from worker.executor import one_line
from worker.transport.fetching.fetch import AbsentError
from worker.transport.fetching.gather import StateGathering

_log = logging.getLogger(__name__)

_PAUSE_S = 0.25
"""Before peers that have not got there yet are asked again."""


class Givers(Protocol):
    """Peers that give copies and results; `worker.transport.peers.Peers` is one."""

    async def fetch_state(
        self,
        member: Member,
        job: JobId,
        stage: StageIndex,
        version: Step,
        names: frozenset[str] | None = None,
    ) -> Mapping[str, WireTensor]: ...

    async def fetch_result(
        self, member: Member, job: JobId, stage: StageIndex, step: Step
    ) -> Mapping[str, WireTensor]: ...


class FetchedCopy(ShelvedCopy):
    """Copy fetched whole, then brought up to date by the records that it is given. Work on it goes on in `group`.

    Args:
        post: told of each version that is reached, and of a fetch that failed.
        patience_s: how long peers that have not got there yet are waited for.

    Raises:
        LocalError: the job's specification is of another release.
    """

    def __init__(
        self,
        prefetch: Prefetch,
        *,
        group: asyncio.TaskGroup,
        givers: Givers,
        post: Callable[[WorkerEvent], None],
        patience_s: float,
    ) -> None:
        super().__init__(prefetch)
        self._job = read_spec(prefetch.job_spec)
        self._state: dict[str, Tensor] = {}
        sizes = state_sizes(self._job, prefetch.stage)
        self.num_bytes = sum(sizes.values())
        self._group = group
        self._givers = givers
        self._post = post
        self._patience_s = patience_s
        self._gathering = StateGathering(self._fetch_some, sizes, patience_s=patience_s)
        self._working: asyncio.Task[None] | None = None
        self._applying: asyncio.Future[None] | None = None
        self._is_catching_up = False

    @property
    def tensors(self) -> Mapping[str, WireTensor]:
        """Tensors as they were fetched, for peers; only in a copy that never follows do they stay so."""
        return self._gathering.tensors

    # --- from the machine ---

    def go_on(self, prefetch: Prefetch) -> None:
        """Begin, or begin again with the donors of `prefetch`."""
        if prefetch.donors != self.prefetch.donors:
            self.halt()
        self.prefetch, self.has_failed = prefetch, False
        self._work_on()

    def follow(self, record: StepRecord) -> None:
        """The next step is committed: apply it when its turn has come."""
        self.records.append(record)
        self._work_on()

    def halt(self) -> None:
        """Do no more, but for an update that has begun."""
        if self._working is not None:
            self._working.cancel()

    async def caught_up(self, version: Step, members: Sequence[Member]) -> Mapping[str, Tensor] | None:
        """The state at `version`, by results that `members` have now; None: it cannot get there.

        The caller lets no further step be followed before it has copied what it is given.
        """
        if not self.is_whole:
            return None
        working, self._working = self._working, None
        if working is not None:
            working.cancel()
        self._is_catching_up = True
        try:
            await _over(working, self._applying)
            while self.lacking(version) and (record := self.due) is not None:
                await self._take_step(record, members, patience_s=0.0)
        except (RemoteError, LocalError) as error:
            self._warn(error)
        finally:
            self._is_catching_up = False
        if self.version == version:
            return self._state
        self._work_on()
        return None

    # --- the work ---

    def _work_on(self) -> None:
        before = self._working
        if self._is_catching_up:
            return  # Nobody else takes a step meanwhile.
        if before is None or before.done() or before.cancelling():
            self._working = self._group.create_task(self._work(before))

    async def _work(self, before: asyncio.Task[None] | None) -> None:
        """Fetch, then follow the commits as far as they are known; once earlier work has ended."""
        await _over(before, self._applying)
        try:
            if not self.is_whole:
                await self._fetch()
            while (record := self.due) is not None:
                await self._take_step(record, self.prefetch.donors, patience_s=self._patience_s)
                self._post(self.ended())
        except (RemoteError, LocalError, MemoryError) as error:
            self._warn(error)
            if not self.is_whole:
                self.has_failed = True
                self._post(failure_of(self.prefetch, one_line(error)))

    async def _fetch(self) -> None:
        loop, prefetch = asyncio.get_running_loop(), self.prefetch
        began_s = loop.time()
        await self._gathering.run(prefetch.donors)
        self._state = {name: to_torch(tensor) for name, tensor in self.tensors.items()}
        self.is_whole = True
        _log.info(
            "stage=%d version=%d copy=%s here: %s from %s in %.1f s",
            prefetch.stage.index,
            self.version,
            kind_of(prefetch),
            format_bytes(self.num_bytes),
            ",".join(donor.worker for donor in prefetch.donors),
            loop.time() - began_s,
        )
        self._post(self.ended())

    async def _fetch_some(self, donor: Member, names: frozenset[str]) -> Mapping[str, WireTensor]:
        prefetch = self.prefetch
        # Asked again, a donor may want to be shown something else by now.
        donor = next((now for now in prefetch.donors if now == donor), donor)
        return await self._givers.fetch_state(
            donor, prefetch.job, prefetch.stage.index, prefetch.version, names
        )

    async def _take_step(self, record: StepRecord, members: Sequence[Member], *, patience_s: float) -> None:
        """Apply the step that is due."""
        results: Mapping[GroupId, Tensor] = {}
        if changes(record, self.prefetch.stage.index):
            results = await self._results(record, members, patience_s=patience_s)
        # Cancelled or not, an update that has begun runs to its end.
        self._applying = asyncio.ensure_future(asyncio.to_thread(self._apply, record, results))
        await asyncio.shield(self._applying)

    def _apply(self, record: StepRecord, results: Mapping[GroupId, Tensor]) -> None:
        """On a thread of its own: the update, and what it makes true, together."""
        bring_forward(
            self._state,
            record,
            results,
            stage=self.prefetch.stage.index,
            model=self._job.model,
            rule=rule_of(self._job.aggregation, self._job.optimizer),
        )
        self.stepped()

    async def _results(
        self, record: StepRecord, members: Sequence[Member], *, patience_s: float
    ) -> Mapping[GroupId, Tensor]:
        """Results that a step applied to the stage, from the first of `members` that has them as they were voted.

        Raises:
            RemoteError: no member has them in time.
        """
        loop = asyncio.get_running_loop()
        gives_up_at = loop.time() + patience_s
        while True:
            is_coming, reason = False, "nobody was named"
            for member in members:
                try:
                    return await self._result_of(member, record)
                except AbsentError as error:
                    is_coming, reason = True, str(error)
                except RemoteError as error:
                    reason = str(error)
            if not is_coming or loop.time() >= gives_up_at:
                raise RemoteError(reason)
            await asyncio.sleep(_PAUSE_S)

    async def _result_of(self, member: Member, record: StepRecord) -> Mapping[GroupId, Tensor]:
        prefetch = self.prefetch
        found = await self._givers.fetch_result(member, prefetch.job, prefetch.stage.index, record.step)
        try:
            results = {parse_group(name): to_torch(tensor) for name, tensor in found.items()}
        except ValueError as error:
            raise RemoteError(f"{member.worker}: {error}") from error
        digests = {result.group: result.digest for result in record.results}
        for group, flat in results.items():
            if await asyncio.to_thread(digest, flat) != digests.get(group):
                raise RemoteError(
                    f"{member.worker}: not the result of {group} that step {record.step} applied"
                )
        return results

    def _warn(self, error: BaseException) -> None:
        where = (self.prefetch.stage.index, self.version)
        _log.warning("stage=%d copy stays at version=%d: %s", *where, one_line(error))


async def _over(*works: asyncio.Future[None] | None) -> None:
    """Wait until these have ended, in whatever way."""
    waited = [work for work in works if work is not None]
    if waited:
        await asyncio.wait(waited)
