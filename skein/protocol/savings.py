"""Checkpoints that are being written: which stages of which version are durable yet."""

from skein.protocol.messages import CheckpointFile, CheckpointWritten
from skein.protocol.records import CheckpointCommitted, StageFiles
from skein.types import JobId, StageIndex, Step


class Savings:
    """Collects a checkpoint's stages. What is never completed is simply never committed."""

    def __init__(self, job: JobId, url: str | None) -> None:
        self._job = job
        self._url = url
        self._missing: dict[Step, set[StageIndex]] = {}
        self._files: dict[Step, dict[StageIndex, tuple[CheckpointFile, ...]]] = {}

    def begin(self, version: Step, stages: tuple[StageIndex, ...]) -> None:
        """Workers were asked to save these stages at `version`; an earlier asking is forgotten."""
        self._missing[version] = set(stages)
        self._files[version] = {}

    def written(self, report: CheckpointWritten, *, wall_s: float) -> CheckpointCommitted | None:
        """A stage is durable; gives the checkpoint when it was the last."""
        missing = self._missing.get(report.version)
        if missing is None or report.stage not in missing:
            return None
        missing.discard(report.stage)
        self._files[report.version][report.stage] = report.files
        if missing:
            return None
        files = self._files.pop(report.version)
        del self._missing[report.version]
        stages = tuple(StageFiles(stage=stage, files=files[stage]) for stage in sorted(files))
        return CheckpointCommitted(
            job=self._job, version=report.version, url=self._url, stages=stages, wall_s=wall_s
        )
