"""What a replica is told. No torch."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from skein.config.job import JobSpec


class Part(BaseModel):
    """What one process is told: the job, its number among how many, where the others are met, and where it tells.

    `checkpoint` and `checkpoint_every_steps` are for those that restart from a file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: JobSpec
    replica: int
    num_replicas: int
    meeting: str
    told: Path
    checkpoint: Path
    checkpoint_every_steps: int


def replica_of(worker: str) -> int:
    """The replica that stands for a worker of ours.

    >>> replica_of("w3")
    3
    """
    return int(worker.removeprefix("w"))
