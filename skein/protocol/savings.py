"""Checkpoints: when one is due, who saves which stage, and which stages of which version are durable yet.

Rules of this file
- All stages of a checkpoint were asked for under one generation. So none has stages of two histories, though a version
  that was rolled back is reached again, nor of another job.
"""

from skein.plan.plan import Plan
from skein.protocol.history import JobHistory
from skein.protocol.members import Members
from skein.protocol.messages import CheckpointFile, CheckpointWritten
from skein.protocol.records import CheckpointCommitted, StageFiles
from skein.types import Generation, StageIndex, Step, WorkerId

_Asking = tuple[Generation, Step]


class Savings:
    """Collects a checkpoint's stages. What is never completed is simply never committed."""

    def __init__(self, job: JobHistory) -> None:
        self._job = job
        self._asked = Step(0)
        self._missing: dict[_Asking, set[StageIndex]] = {}
        self._files: dict[_Asking, dict[StageIndex, tuple[CheckpointFile, ...]]] = {}

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
        if not every or version >= self._job.spec.budget.steps:
            return False
        return version // every * every > max(self.newest, self._asked)

    def fenced(self) -> None:
        """What was asked for under an older generation may never be done."""
        self._asked = Step(0)

    def rolled_back(self) -> None:
        """What is being written is of a history that does not count."""
        self._missing.clear()
        self._files.clear()

    def begin(self, plan: Plan, members: Members) -> dict[WorkerId, tuple[StageIndex, ...]]:
        """Who is to save what of the job's version: the holder of each stage that stays and has the least to save."""
        stages_by_worker: dict[WorkerId, tuple[StageIndex, ...]] = {}
        for stage in plan.stages:
            holder = min(
                plan.holders(stage.index),
                key=lambda w: (members.is_leaving(w), len(stages_by_worker.get(w, ()))),
            )
            stages_by_worker[holder] = (*stages_by_worker.get(holder, ()), stage.index)
        self.expect(members.generation, self._job.version, tuple(stage.index for stage in plan.stages))
        return dict(sorted(stages_by_worker.items()))

    def expect(self, generation: Generation, version: Step, stages: tuple[StageIndex, ...]) -> None:
        """These stages are being saved at `version`; an earlier asking under this generation is forgotten."""
        self._asked = version
        self._missing[generation, version] = set(stages)
        self._files[generation, version] = {}

    def written(self, report: CheckpointWritten, *, wall_s: float) -> CheckpointCommitted | None:
        """A stage is durable; gives the checkpoint when it was the last, and no newer one exists."""
        asking = report.generation, report.version
        missing = self._missing.get(asking)
        if missing is None or report.stage not in missing:
            return None
        missing.discard(report.stage)
        self._files[asking][report.stage] = report.files
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
            stages=tuple(StageFiles(stage=stage, files=files[stage]) for stage in sorted(files)),
            wall_s=wall_s,
        )
