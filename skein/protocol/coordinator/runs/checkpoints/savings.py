"""Checkpoints: when one is due, who saves which stage, and which stages of which version are durable yet.

Rules of this file
- Of many walkers every one is saved, each chunk by its own holder. The main walker has number 0, the others follow in
  the plan's order; the only walker there is, is number 0 too. Rows of an array are named like walkers,
  in files of all of them.
- What cannot be written for want of room, or of an answer, is no fault of who holds it. What a run waits for is asked
  for again and again, and only what is missing of it; of what goes on beside steps, another version is saved later.
- What would be above the quota of the job's namespace is not asked for, as far as the last one tells of its size, and
  not completed; steps go on. What a run waits for is, or steps would be lost.
- All stages of a checkpoint were asked for under one generation. So none has stages of two histories, though a version
  that was rolled back is reached again, nor of another job.
"""

from collections.abc import Mapping
from dataclasses import replace

from skein.config.quota import UNBOUNDED, QuotaSpec
from skein.plan.agreeing.walkers import walkers_of
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import ManifestWritten, PruneCheckpoints, WriteManifest
from skein.protocol.coordinator.quotas import stored_with
from skein.protocol.coordinator.runs.checkpoints.keeping import kept_with
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.placing.planning import fingerprint_of
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.records import CheckpointCommitted, StageFiles
from skein.protocol.messages.directives import CheckpointFile, Save
from skein.protocol.messages.reports import CheckpointUnwritten, CheckpointWritten
from skein.types import Generation, StageIndex, Step, WorkerId
from skein.units import format_bytes

AGAIN_S = 10.0
"""Until what a run waits for is asked for again."""
LATER_S = 30.0
"""Until a checkpoint that steps do not wait for is tried again."""

_Asking = tuple[Generation, Step]
_Part = tuple[StageIndex, int]
"""A stage of a walker, by the walker's number."""


class Savings(RunPart):
    """Collects a checkpoint's stages. What is never completed is simply never committed."""

    def __init__(self, members: Members, quota: QuotaSpec = UNBOUNDED.default) -> None:
        super().__init__(members)
        self._quota = quota
        self._over = ""
        """Reason why the last checkpoint that was due was not stored: the quota is full; "" if it was."""
        self._last_bytes = max((x.num_bytes for x in self._job.checkpoints[-1:]), default=0)
        self.waits_for = ""
        """Reason why the checkpoint that the run waits for could not be written, the last time."""
        self.again_at: float | None = None
        self._asked = Step(0)
        self._awaited: tuple[Plan, int] | None = None
        """Plan and main walker by which the state is saved that the run waits for; None: it waits for none."""
        self._failed: dict[_Part, WorkerId] = {}
        """Parts that failed of the checkpoint that the run waits for, each with its worker."""
        self._finishing: list[CheckpointCommitted] = []
        """Their manifests are being written."""
        self._not_before = 0.0
        self._missing: dict[_Asking, set[_Part]] = {}
        self._files: dict[_Asking, dict[_Part, tuple[CheckpointFile, ...]]] = {}
        self._savers: dict[_Asking, set[WorkerId]] = {}
        """Workers that were asked to save, by what they were asked for."""

    @property
    def newest(self) -> Step:
        """Version of the newest checkpoint; older ones that are completed after it are of no use."""
        checkpoint = self._job.newest_checkpoint
        return Step(0) if checkpoint is None else checkpoint.version

    @property
    def savers(self) -> frozenset[tuple[WorkerId, Step]]:
        """Workers, each with a version of which it is to write files now: no other worker may."""
        return frozenset(
            (worker, version)
            for (generation, version), workers in self._savers.items()
            if (generation, version) in self._missing
            for worker in workers
        )

    def is_behind(self) -> bool:
        """Whether workers hold what no checkpoint has."""
        return self._job.version > self.newest

    def is_due(self, *, now: float) -> bool:
        """Whether the newest checkpoint is older than it should be, and none was asked for under this generation."""
        every, version = self._job.spec.checkpoint.every_steps, self._job.version
        if not every or version >= self._job.total_steps or now < self._not_before:
            return False
        return version // every * every > max(self.newest, self._asked)

    def has_room(self, *, now: float) -> bool:
        """Whether one more checkpoint of the size of the last one is within the quota; if not, that is told, once."""
        over = self._above_quota(self._job.version, self._last_bytes)
        if over:
            self._not_before = now + LATER_S
            self._tell_over(over)
        return not over

    def _above_quota(self, version: Step, num_bytes: int) -> str:
        """Excess of the namespace if it had a checkpoint of that size, too, in words; "" if it is within its quota."""
        most = self._quota.stored_bytes
        if most is None:
            return ""
        num = stored_with(self._out.history, self._job, version, num_bytes)
        namespace = self._job.namespace
        return (
            f"{namespace} would have {format_bytes(num)} stored, {format_bytes(most)} at most"
            if num > most
            else ""
        )

    def _tell_over(self, over: str) -> None:
        if not self._over:
            self._log(f"no checkpoint is stored, steps go on: {over}")
        self._over = over

    @property
    def is_resting(self) -> bool:
        """Whether nothing is expected of workers: they are asked again later, or the coordinator is at work."""
        return self.again_at is not None or bool(self._finishing)

    def fenced(self, *, now: float) -> None:
        """Forget the request under an older generation, which may never be fulfilled."""
        self._asked = Step(0)
        self._awaited = self.again_at = None

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """Drop what is being written if the plan gives up committed state: it is of a history that does not count."""
        if adoption.gives_up:
            self._missing.clear()
            self._files.clear()
            self._finishing.clear()

    def ask(self, plan: Plan, *, main: int, is_awaited: bool = False) -> None:
        """Have the job's version saved: each stage by the holder that stays and has the least to save.

        Args:
            plan: by which it is held.
            main: which of its walkers is the main one, where there are many; each then saves itself.
            is_awaited: the run waits until it is.
        """
        parts_by_worker = self._parts(plan, main)
        asked = [part for parts in parts_by_worker.values() for part in parts]
        stages = tuple(stage.index for stage in plan.stages)
        generation, version = self._job.generation, self._job.version
        self.expect(generation, version, stages, num_walkers=len(asked) // len(stages))
        self._awaited = (plan, main) if is_awaited else None
        self._failed.clear()
        self.again_at, self.waits_for = None, ""
        self._send(parts_by_worker)

    def _parts(self, plan: Plan, main: int) -> dict[WorkerId, list[_Part]]:
        """Parts that each worker is to save."""
        are_lines = self._job.spec.aggregation.walkers.are_lines
        return _own_parts(plan, main) if are_lines else self._shared_out(plan)

    def tick(self, *, now: float) -> None:
        """Ask again for what failed, if it is time; of other holders, where there are."""
        if self.again_at is None or now < self.again_at or self._awaited is None:
            return
        self.again_at = None
        parts_by_worker = self._parts(*self._awaited)
        failed, self._failed = self._failed, {}
        for worker, parts in parts_by_worker.items():
            parts_by_worker[worker] = [part for part in parts if part in failed]
        self._send({worker: parts for worker, parts in parts_by_worker.items() if parts})

    def _send(self, parts_by_worker: Mapping[WorkerId, list[_Part]]) -> None:
        asking = (self._job.generation, self._job.version)
        self._savers = {asked: workers for asked, workers in self._savers.items() if asked in self._missing}
        self._savers.setdefault(asking, set()).update(parts_by_worker)
        for worker, parts in sorted(parts_by_worker.items()):
            save = Save(
                version=self._job.version,
                stages=tuple(stage for stage, _ in parts),
                url=self._job.spec.checkpoint.url,
                walkers=tuple(walker for _, walker in parts),
            )
            self._members.send(save, worker)

    def _shared_out(self, plan: Plan) -> dict[WorkerId, list[_Part]]:
        """The parts of the only walker, among the holders of its stages."""
        is_going = self._members.is_going
        parts_by_worker: dict[WorkerId, list[_Part]] = {}
        for stage in plan.stages:
            holder = min(
                plan.holders(stage.index),
                key=lambda w: (
                    is_going(w),
                    self._failed.get((stage.index, 0)) == w,
                    len(parts_by_worker.get(w, ())),
                ),
            )
            parts_by_worker.setdefault(holder, []).append((stage.index, 0))
        return parts_by_worker

    def expect(
        self,
        generation: Generation,
        version: Step,
        stages: tuple[StageIndex, ...],
        *,
        num_walkers: int = 1,
    ) -> None:
        """Await these stages at `version`; an earlier request for it under this generation is forgotten."""
        self._asked = version
        self._missing[generation, version] = {(stage, i) for stage in stages for i in range(num_walkers)}
        self._files[generation, version] = {}

    def written(self, report: CheckpointWritten, *, wall_s: float) -> CheckpointCommitted | None:
        """A stage is durable; gives the checkpoint when it was the last, and no newer one exists."""
        asking, part = (report.generation, report.version), (report.stage, report.walker)
        missing = self._missing.get(asking)
        if missing is None or part not in missing:
            return None
        missing.discard(part)
        self._files[asking][part] = report.files
        if missing:
            return None
        files = self._files.pop(asking)
        del self._missing[asking]
        if report.version <= self.newest:
            return None
        return CheckpointCommitted(
            job=self._job.job,
            version=report.version,
            url=self._job.spec.checkpoint.url,
            stages=_by_stage(files),
            wall_s=wall_s,
            data_fingerprint=fingerprint_of(self._members.ready),
        )

    # --- what comes of it ---

    def heard(self, worker: WorkerId, report: CheckpointWritten | CheckpointUnwritten, *, now: float) -> None:
        """A stage is durable, or could not be written; after the last one the coordinator completes the checkpoint."""
        if isinstance(report, CheckpointUnwritten):
            self._not_written(worker, report, now=now)
            return
        checkpoint = self.written(report, wall_s=now)
        if checkpoint is not None:
            self._last_bytes = checkpoint.num_bytes
            self._complete(checkpoint, report.generation, now=now)

    def _complete(self, checkpoint: CheckpointCommitted, generation: Generation, *, now: float) -> None:
        """Have a checkpoint's manifest written, or its files deleted if there is no room for them."""
        asking, over = (
            (generation, checkpoint.version),
            self._above_quota(checkpoint.version, self._last_bytes),
        )
        if over and not self._is_awaited(asking):
            self._tell_over(over)
            self._give_up(asking, now=now)
            keep = tuple(kept.version for kept in self._job.checkpoints)
            drop = PruneCheckpoints(
                job=self._job.job, url=checkpoint.url, keep=keep, drop=(checkpoint.version,)
            )
            self._out.do(drop)
            return
        if over:
            self._log(
                f"checkpoint={checkpoint.version} is stored above the quota, for the run waits for it: {over}"
            )
        else:
            self._over = ""
        self._finishing.append(checkpoint)
        self._out.do(WriteManifest(checkpoint=checkpoint))

    def finished(self, event: ManifestWritten, *, now: float) -> None:
        """The coordinator has completed a checkpoint, or could not."""
        if event.checkpoint not in self._finishing:
            return  # It is of a history that does not count, though its version may be reached again.
        self._finishing.remove(event.checkpoint)
        if event.error is None:
            self.waits_for = ""
            self.record(event.checkpoint)
        else:
            self._not_finished(event, event.error, now=now)

    def _not_written(self, worker: WorkerId, report: CheckpointUnwritten, *, now: float) -> None:
        """A holder has the stage still."""
        asking, part = (report.generation, report.version), (report.stage, report.walker)
        if part not in self._missing.get(asking, ()):
            return
        self._tell(report.version, f"stage {report.stage} was not written by {worker}: {report.reason}")
        if self._is_awaited(asking):
            self._failed[part] = worker
            self.again_at = now + AGAIN_S
        else:
            self._give_up(asking, now=now)

    def _not_finished(self, event: ManifestWritten, error: str, *, now: float) -> None:
        """Have the holders write an awaited checkpoint anew, later, for it was not completed; give up any other."""
        version = event.checkpoint.version
        asking = (self._job.generation, version)
        self._tell(version, f"was not completed: {error}")
        if self._awaited is None or not self._is_awaited(asking):
            self._give_up(asking, now=now)
            return
        self.again_at = now + AGAIN_S
        parts = {part: w for w, parts in self._parts(*self._awaited).items() for part in parts}
        self._failed = parts
        self._missing[asking], self._files[asking] = set(parts), {}

    def _is_awaited(self, asking: _Asking) -> bool:
        return self._awaited is not None and asking == (self._job.generation, self._job.version)

    def _give_up(self, asking: _Asking, *, now: float) -> None:
        """Steps went on meanwhile: a newer version is saved in its place."""
        self._missing.pop(asking, None)
        self._files.pop(asking, None)
        self._asked = Step(0)
        self._not_before = now + LATER_S

    def _tell(self, version: Step, said: str) -> None:
        line = f"checkpoint {version}: {said}"
        if line != self.waits_for:
            self._log(f"checkpoint={version} {said}")
        self.waits_for = line

    def record(self, checkpoint: CheckpointCommitted) -> None:
        """The manifest exists, and so does the checkpoint, unless it came too late; older ones may go."""
        job = self._job
        if not self.newest < checkpoint.version <= job.version:
            return
        self._out.record(
            replace(checkpoint, keeps=kept_with(job, checkpoint.version, self._out.history.jobs.resident()))
        )
        self._log(f"checkpoint={checkpoint.version}")
        keep = tuple(kept.version for kept in job.checkpoints)
        self._out.do(PruneCheckpoints(job=job.job, url=checkpoint.url, keep=keep))


def _own_parts(plan: Plan, main: int) -> dict[WorkerId, list[_Part]]:
    """Parts of each holder in the walkers of `plan`, the main one counted first."""
    walkers = list(walkers_of(plan))
    walkers.insert(0, walkers.pop(main))
    parts_by_worker: dict[WorkerId, list[_Part]] = {}
    for number, walker in enumerate(walkers):
        for chunk in walker:
            parts_by_worker.setdefault(chunk.worker, []).append((chunk.stage, number))
    return parts_by_worker


def _by_stage(files: Mapping[_Part, tuple[CheckpointFile, ...]]) -> tuple[StageFiles, ...]:
    found: dict[StageIndex, list[CheckpointFile]] = {}
    for stage, walker in sorted(files):
        found.setdefault(stage, []).extend(files[stage, walker])
    return tuple(StageFiles(stage=stage, files=tuple(held)) for stage, held in found.items())
