"""Checkpoints: when one is due, who saves which stage, and which stages of which version are durable yet.

Rules of this file
- All stages of a checkpoint were asked for under one generation. So none has stages of two histories, though a version
  that was rolled back is reached again, nor of another job.
"""

from skein.config.aggregation import Walkers
from skein.plan.plan import Plan
from skein.plan.walkers import walkers_of
from skein.protocol.coordinator_io import Outbox, PruneCheckpoints
from skein.protocol.history import JobHistory
from skein.protocol.messages import CheckpointFile, Save
from skein.protocol.records import CheckpointCommitted, StageFiles
from skein.protocol.reports import CheckpointWritten
from skein.protocol.runs.members import Members
from skein.types import Generation, StageIndex, Step, WorkerId

_Asking = tuple[Generation, Step]


class Savings:
    """Collects a checkpoint's stages. What is never completed is simply never committed."""

    def __init__(self, job: JobHistory, members: Members, outbox: Outbox) -> None:
        self._job = job
        self._members = members
        self._out = outbox
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

    def ask(self, plan: Plan) -> None:
        """Have the job's version saved: each stage by the holder that stays and has the least to save.

        Of many walkers one saves all, of those with most who stay the first: stages of two would be no model.
        """
        history, members = self._out.history, self._members
        holders = {stage.index: plan.holders(stage.index) for stage in plan.stages}
        if self._job.spec.aggregation.walkers is Walkers.MANY:
            saver = min(walkers_of(plan), key=lambda x: sum(members.is_leaving(at.worker) for at in x))
            holders = {chunk.stage: (chunk.worker,) for chunk in saver}
        stages_by_worker: dict[WorkerId, tuple[StageIndex, ...]] = {}
        for stage in plan.stages:
            holder = min(
                holders[stage.index],
                key=lambda w: (members.is_leaving(w), len(stages_by_worker.get(w, ()))),
            )
            stages_by_worker[holder] = (*stages_by_worker.get(holder, ()), stage.index)
        self.expect(history.generation, self._job.version, tuple(stage.index for stage in plan.stages))
        for worker, stages in sorted(stages_by_worker.items()):
            save = Save(
                epoch=history.epoch,
                generation=history.generation,
                version=self._job.version,
                stages=stages,
                url=self._job.spec.checkpoint.url,
            )
            members.send(worker, save)

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

    def record(self, checkpoint: CheckpointCommitted) -> None:
        """The manifest exists, and so does the checkpoint, unless it came too late; older ones may go."""
        job = self._job
        if not self.newest < checkpoint.version <= job.version:
            return
        self._out.record(checkpoint)
        self._out.log(f"job={job.job} checkpoint={checkpoint.version}")
        keep = tuple(kept.version for kept in job.checkpoints)
        self._out.commands.append(PruneCheckpoints(job=job.job, url=checkpoint.url, keep=keep))
