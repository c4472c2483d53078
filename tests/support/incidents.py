"""Incidents that are over."""

from skein.protocol.log.records import Incident, IncidentKind, Remedy, Replayed
from skein.types import Generation, JobId, MicrobatchId, StageIndex, Step, WorkerId


def replayed(stage: int, *microbatches: int) -> Replayed:
    return Replayed(stage=StageIndex(stage), microbatches=tuple(map(MicrobatchId, microbatches)))


def incident(
    job: str = "digits-1",
    *,
    kind: IncidentKind = IncidentKind.WORKER_LOST,
    workers: tuple[WorkerId, ...] = (WorkerId("w3"),),
    reason: str = "stream broke",
    remedy: Remedy = Remedy.RESUMED,
    silent_s: float = 0.3,
    seconds: float = 0.62,
    num_rerouted: int = 4,
    replayed: tuple[Replayed, ...] = (),
    num_retried: int = 0,
    num_steps_lost: int = 0,
    num_samples_repeated: int = 8,
    wall_s: float = 60.0,
) -> Incident:
    """A worker died in the 41st step, which went on."""
    return Incident(
        job=JobId(job),
        generation=Generation(3),
        step=Step(40),
        kind=kind,
        workers=workers,
        reason=reason,
        remedy=remedy,
        silent_s=silent_s,
        fenced_s=0.41,
        seconds=seconds,
        num_rerouted=num_rerouted,
        replayed=replayed,
        num_retried=num_retried,
        num_steps_lost=num_steps_lost,
        num_samples_repeated=num_samples_repeated,
        wall_s=wall_s,
    )
