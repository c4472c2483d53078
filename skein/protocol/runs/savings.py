"""Checkpoints: when one is due, who saves which stage, and which stages of which version are durable yet.

Rules of this file
- Of many walkers every one is saved, each chunk by its own holder. The main walker has number 0, the others follow in
  the plan's order; the only walker there is, is number 0 too.
- All stages of a checkpoint were asked for under one generation. So none has stages of two histories, though a version
  that was rolled back is reached again, nor of another job.
"""

from collections.abc import Mapping
from dataclasses import replace

from skein.config.aggregation import Walkers
from skein.plan.plan import Plan
from skein.plan.walkers import walkers_of
from skein.protocol.coordinator_io import Outbox, PruneCheckpoints
from skein.protocol.history import JobHistory
from skein.protocol.messages import CheckpointFile, Save
from skein.protocol.records import CheckpointCommitted, StageFiles
from skein.protocol.reports import CheckpointWritten
from skein.protocol.runs.keeping import kept_with
from skein.protocol.runs.members import Members
from skein.protocol.runs.planning import fingerprint_of
from skein.types import Generation, StageIndex, Step, WorkerId

_Asking = tuple[Generation, Step]
_Part = tuple[StageIndex, int]
"""A stage of a walker, by the walker's number."""


class Savings:
    """Collects a checkpoint's stages. What is never completed is simply never committed."""

    def __init__(self, job: JobHistory, members: Members, outbox: Outbox) -> None:
        self._job = job
        self._members = members
        self._out = outbox
        self._asked = Step(0)
        self._missing: dict[_Asking, set[_Part]] = {}
        self._files: dict[_Asking, dict[_Part, tuple[CheckpointFile, ...]]] = {}

    @property
    def newest(self) -> Step:
        """Version of the newest checkpoint; older ones that are completed after it are of no use."""
        checkpoint = self._job.newest_checkpoint
        return Step(0) if checkpoint is None else checkpoint.version

    def is_behind(self) -> bool:
        """Whether workers hold what no checkpoint has."""
        return self._job.version > self.newest

    def is_due(self) -> bool:
        """Whether the newest checkpoint is older than it should be, and none was asked for under this generation."""
        every, version = self._job.spec.checkpoint.every_steps, self._job.version
        if not every or version >= self._job.total_steps:
            return False
        return version // every * every > max(self.newest, self._asked)

    def fenced(self) -> None:
        """What was asked for under an older generation may never be done."""
        self._asked = Step(0)

    def rolled_back(self) -> None:
        """What is being written is of a history that does not count."""
        self._missing.clear()
        self._files.clear()

    def ask(self, plan: Plan, *, main: int) -> None:
        """Have the job's version saved: each stage by the holder that stays and has the least to save.

        Args:
            plan: by which it is held.
            main: which of its walkers is the main one, where there are many; each then saves itself.
        """
        history = self._out.history
        is_many = self._job.spec.aggregation.walkers is Walkers.MANY
        parts_by_worker = _own_parts(plan, main) if is_many else self._shared_out(plan)
        asked = [part for parts in parts_by_worker.values() for part in parts]
        stages = tuple(stage.index for stage in plan.stages)
        self.expect(history.generation, self._job.version, stages, num_walkers=len(asked) // len(stages))
        for worker, parts in sorted(parts_by_worker.items()):
            save = Save(
                epoch=history.epoch,
                generation=history.generation,
                version=self._job.version,
                stages=tuple(stage for stage, _ in parts),
                url=self._job.spec.checkpoint.url,
                walkers=tuple(walker for _, walker in parts),
            )
            self._members.send(worker, save)

    def _shared_out(self, plan: Plan) -> dict[WorkerId, list[_Part]]:
        """The parts of the only walker, among the holders of its stages."""
        is_leaving = self._members.is_leaving
        parts_by_worker: dict[WorkerId, list[_Part]] = {}
        for stage in plan.stages:
            holder = min(
                plan.holders(stage.index), key=lambda w: (is_leaving(w), len(parts_by_worker.get(w, ())))
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
        """These stages are being saved at `version`; an earlier asking under this generation is forgotten."""
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

    def record(self, checkpoint: CheckpointCommitted) -> None:
        """The manifest exists, and so does the checkpoint, unless it came too late; older ones may go."""
        job = self._job
        if not self.newest < checkpoint.version <= job.version:
            return
        self._out.record(replace(checkpoint, keeps=kept_with(job, checkpoint.version)))
        self._out.log(f"job={job.job} checkpoint={checkpoint.version}")
        keep = tuple(kept.version for kept in job.checkpoints)
        self._out.commands.append(PruneCheckpoints(job=job.job, url=checkpoint.url, keep=keep))


def _own_parts(plan: Plan, main: int) -> dict[WorkerId, list[_Part]]:
    """What each holder has of the walkers of `plan`, the main one counted first."""
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
