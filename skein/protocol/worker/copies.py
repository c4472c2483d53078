"""Copies of stages that a worker keeps beside its chunks: what is wanted, what is here, what is of no more use.

Three kinds: a snapshot of a chunk that this worker holds; a backup, kept for others as it is; and a copy that follows
the commits because this worker will hold its stage. Nothing computes with any of them.

Rules of this file
- Copies are of one job. A directive for another than the one that is worked on is ignored, and so is an older epoch's.
- Moving bytes is the driver's. It may fail at any time: then the copy is not here, and may be asked for again.
- Going back to version t makes every copy above t worthless: its steps may be decided otherwise. A worker that is no
  member sees it by what it is asked for, or by a decision that differs from the one it knows.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from skein.protocol.messages.directives import ChunkVersion, Follow, OpenData, Prefetch, Snapshot, StepRecord
from skein.protocol.messages.reports import DataOpened, Prefetched
from skein.protocol.worker.ops import SnapshotOp
from skein.protocol.worker.standing import Standing
from skein.protocol.worker.worker_io import (
    CopyKind,
    DropCopies,
    FollowCommit,
    ForgetJob,
    OpeningEnded,
    PrefetchEnded,
    PrefetchFailed,
    SnapshotsHeld,
    StartOpening,
    StartPrefetch,
)
from skein.types import JobId, StageSpec, Step

CopyDirective = Prefetch | OpenData | Follow
CopyEvent = PrefetchEnded | PrefetchFailed | OpeningEnded | SnapshotsHeld

_NEVER = Step(0)


@dataclass(slots=True)
class _Followed:
    """A copy on its way to this worker; `version` is None until it is whole."""

    wanted: Step
    version: Step | None = None
    records: list[StepRecord] = field(default_factory=list)
    """All decisions from `wanted` on."""

    @property
    def next_step(self) -> Step:
        """Step whose decision the copy waits to hear of."""
        return Step(self.wanted + len(self.records))

    def may_reach(self, version: Step) -> bool:
        """Whether it will be at `version` by itself, given that it has not gone beyond."""
        return self.wanted <= version <= self.next_step and (self.version or version) <= version

    def contradicts(self, record: StepRecord) -> bool:
        """Whether the job has gone back since: what was decided here is decided otherwise, or lies before the copy."""
        known = record.step - self.wanted
        # What makes the version that is wanted may be told after the wish.
        return known < -1 or (0 <= known < len(self.records) and self.records[known] != record)


class Copies:
    """The copies of one worker. The Worker machine says when; commands go to `standing`."""

    def __init__(self, standing: Standing) -> None:
        self.job: JobId | None = None
        self._standing = standing
        self._asked: list[SnapshotOp] = []
        self._snapshots: tuple[ChunkVersion, ...] = ()
        self._backups: dict[tuple[StageSpec, Step], bool] = {}
        """Whether it is whole."""
        self._followed: dict[StageSpec, _Followed] = {}
        self._failed: set[tuple[StageSpec, Step]] = set()
        """Copies that could not be had, and of which the driver keeps what came."""

    @property
    def held(self) -> tuple[ChunkVersion, ...]:
        """Copies that are whole and stay as they are, for an acknowledgement."""
        backups = {
            ChunkVersion(stage=stage, version=version)
            for (stage, version), is_whole in self._backups.items()
            if is_whole
        }
        return tuple(
            sorted(backups | set(self._snapshots), key=lambda x: (x.stage.index, x.stage.first, x.version))
        )

    # --- directives ---

    def take(self, directive: CopyDirective) -> None:
        """A directive about copies, of any generation: a worker may prepare itself before it is a member."""
        standing = self._standing
        if directive.epoch < standing.epoch or standing.job not in (None, directive.job):
            return
        if self.job not in (None, directive.job):
            self.forget()
            standing.commands.append(ForgetJob())
        self.job = directive.job
        match directive:
            case Prefetch(is_backup=True):
                self._back_up(directive)
            case Prefetch():
                self._prefetch(directive)
            case OpenData():
                standing.commands.append(StartOpening(opens=directive))
            case Follow():
                self.hear(directive.record)

    def snapshot(self, directive: Snapshot) -> None:
        """Copies of chunks are wanted; `next_op` gives each when it is due."""
        self.job = self._standing.job
        self._asked += [
            SnapshotOp(
                generation=directive.generation,
                version=directive.version,
                stage=stage,
                keeps_results=directive.keeps_results,
            )
            for stage in directive.stages
        ]

    def next_op(self, version: Step, chunks: Iterable[StageSpec]) -> SnapshotOp | None:
        """A snapshot to take now that `chunks` are here at `version`, before anything changes them."""
        if not self._asked:
            return None
        self._asked = [op for op in self._asked if op.version >= version]
        here = {stage.index for stage in chunks}
        op = next((op for op in self._asked if op.version == version and op.stage in here), None)
        if op is not None:
            self._asked.remove(op)
        return op

    def _back_up(self, directive: Prefetch) -> None:
        key = (directive.stage, directive.version)
        old = [x for x in self._backups if x[1] < directive.drops_before]
        for stale in old:
            del self._backups[stale]
        if old:
            self._drop(backups_before=directive.drops_before)
        if directive.version < directive.drops_before:
            return
        if self._backups.get(key):
            self._tell(directive.stage, directive.version)
            return
        self._backups[key] = False
        self._standing.commands.append(StartPrefetch(prefetch=directive))

    def _prefetch(self, directive: Prefetch) -> None:
        stage, version, known = directive.stage, directive.version, self._followed.get(directive.stage)
        is_repeated = known is not None and known.wanted == version
        if known is not None and known.version is not None and (is_repeated or known.may_reach(version)):
            self._tell(stage, known.version)
            # It goes on to ask for results, and donors give them to whoever shows what is new of late.
            again = replace(directive, version=known.wanted)
            self._standing.commands.append(StartPrefetch(prefetch=again))
            return
        if not is_repeated:
            records = known.records[version - known.wanted :] if known and known.may_reach(version) else []
            if known is not None:
                self._drop(followed=(stage,))
            self._followed[stage] = _Followed(version, records=list(records))
        # Asked again, perhaps with other donors, the driver keeps what it has.
        self._standing.commands.append(StartPrefetch(prefetch=directive))
        if not is_repeated:
            self._pass_on(stage, self._followed[stage].records)

    def hear(self, record: StepRecord) -> None:
        """A step of the job is committed: bring up to date what follows, and drop what went another way."""
        self._drop_above(Step(record.step + 1))
        astray = tuple(
            stage
            for stage, copy in self._followed.items()
            if copy.contradicts(record) or record.step > copy.next_step
        )
        for stage in astray:
            wanted = self._followed.pop(stage).wanted
            self._tell(stage, wanted, error="a commit was missed, or decided otherwise")
        if astray:
            self._drop(followed=astray)
        for stage, copy in self._followed.items():
            if record.step == copy.next_step:
                copy.records.append(record)
                self._pass_on(stage, [record])

    def _pass_on(self, stage: StageSpec, records: Iterable[StepRecord]) -> None:
        assert self.job is not None
        self._standing.commands += [
            FollowCommit(job=self.job, stage=stage, record=record) for record in records
        ]

    # --- what becomes of it ---

    def ended(self, event: CopyEvent) -> None:
        """The driver has something, or has it no more."""
        if event.job != self.job:
            return
        match event:
            case SnapshotsHeld():
                self._snapshots = event.copies
            case OpeningEnded():
                opened = DataOpened(job=event.job, error=event.error, is_unfit=event.is_unfit)
                self._standing.tell(opened)
            case PrefetchEnded(kind=CopyKind.BACKUP):
                if (event.stage, event.version) in self._backups:
                    self._backups[event.stage, event.version] = True
                    self._tell(event.stage, event.version)
            case PrefetchEnded():
                copy = self._followed.get(event.stage)
                if copy is not None and copy.wanted <= event.version <= copy.next_step:
                    copy.version = event.version
                    self._tell(event.stage, event.version)
            case PrefetchFailed(kind=CopyKind.BACKUP):
                if self._backups.pop((event.stage, event.version), None) is not None:
                    self._failed.add((event.stage, event.version))
                    self._tell(event.stage, event.version, error=event.reason)
            case PrefetchFailed():
                copy = self._followed.get(event.stage)
                if copy is not None and copy.version is None and copy.wanted == event.version:
                    del self._followed[event.stage]
                    self._failed.add((event.stage, event.version))
                    self._tell(event.stage, event.version, error=event.reason)

    def built(self, stages: Iterable[StageSpec], version: Step) -> None:
        """Chunks of these stages are here at `version`: what followed them has served, what nobody tells lags for ever.

        Above `version` nothing counts any more.
        """
        used = frozenset(stages)
        served = tuple(
            stage
            for stage, copy in self._followed.items()
            if stage in used or copy.next_step < version or (copy.version or copy.wanted) > version
        )
        for stage in served:
            del self._followed[stage]
        if served:
            self._drop(followed=served)
        self._drop_above(version)

    def stop(self) -> None:
        """A new generation: what was asked for under the older one, and is not here yet, is asked for again."""
        self._asked.clear()

    def forget(self) -> None:
        """The job is over."""
        self.job = None
        self._asked.clear()
        self._snapshots = ()
        self._backups.clear()
        self._followed.clear()
        self._failed.clear()

    # --- small things ---

    def _drop_above(self, version: Step) -> None:
        """The job is at `version`: a copy that is further on, or a part of one, is of steps that do not count any more.

        A copy of a step that is still to come goes too: of that there is nothing here yet, and it is asked for again.
        """
        failed = {(stage, at) for stage, at in self._failed if at > version}
        here = (*(at for _, at in (*self._backups, *failed)), *(copy.version for copy in self._snapshots))
        if all(at <= version for at in here):
            return
        self._backups = {key: is_whole for key, is_whole in self._backups.items() if key[1] <= version}
        self._snapshots = tuple(copy for copy in self._snapshots if copy.version <= version)
        self._failed -= failed
        lost = sorted(
            {stage for stage, _ in failed} - self._followed.keys(), key=lambda x: (x.index, x.first)
        )
        self._drop(followed=tuple(lost), above=version)

    def _tell(self, stage: StageSpec, version: Step, *, error: str = "") -> None:
        assert self.job is not None
        self._standing.tell(Prefetched(job=self.job, stage=stage, version=version, error=error))

    def _drop(
        self,
        *,
        followed: tuple[StageSpec, ...] = (),
        backups_before: Step = _NEVER,
        above: Step | None = None,
    ) -> None:
        dropped = DropCopies(followed=followed, backups_before=backups_before, above=above)
        self._standing.commands.append(dropped)
