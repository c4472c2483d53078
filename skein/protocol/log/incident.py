"""Words and sums for what failures cost: the line of the log, and the totals below a list.

Steps count from 1 here, as in everything that users read; `Incident.step` itself counts from 0.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import shorten

from skein.protocol.log.records import Incident, IncidentKind, Remedy
from skein.types import MicrobatchId
from skein.units import counted

_NUM_NAMED = 8
"""Workers, runs of microbatches and stages that a line names one by one."""
_REASON_CHARACTERS = 200
"""Most characters of a reason in a line; it may be what a worker's library said."""


def incident_line(incident: Incident) -> str:
    """An incident in one line of the coordinator's log, however large it was.

    >>> from skein.protocol.log.records import Replayed
    >>> from skein.types import Generation, JobId, StageIndex, Step, WorkerId
    >>> lost = (MicrobatchId(2), MicrobatchId(5))
    >>> print(incident_line(Incident(
    ...     job=JobId("demo-1"), generation=Generation(3), step=Step(40), kind=IncidentKind.WORKER_LOST,
    ...     workers=(WorkerId("w3"),), reason="stream broke", remedy=Remedy.RESUMED, silent_s=0.3, fenced_s=0.41,
    ...     seconds=0.62, num_rerouted=4, replayed=(Replayed(stage=StageIndex(1), microbatches=lost),),
    ...     num_retried=0, num_steps_lost=0, num_samples_repeated=8, wall_s=0.0)))
    incident job=demo-1 step=41 generation=3 worker_lost w3 (stream broke, silent 0.30 s): resumed after 0.62 s \
(fence 0.41 s), 4 hops rerouted, replayed stage 1: 2, 5; 0 steps lost, 8 samples repeated
    """
    head = f"incident job={incident.job} step={incident.step + 1} generation={incident.generation}"
    return f"{head} {what(incident)}: {remedied(incident)}; {cost(incident)}"


def what(incident: Incident) -> str:
    """Kind of the failure, the workers that had it, and how it was noticed, in words."""
    named = short(incident.workers)
    reason = shorten(incident.reason, _REASON_CHARACTERS, placeholder=" ...")
    noticed = [reason] if reason else []
    if incident.silent_s > 0 and "silent" not in reason:
        noticed.append(f"silent {incident.silent_s:.2f} s")
    words = [
        incident.kind.value,
        *([named] if named else []),
        *([f"({', '.join(noticed)})"] if noticed else []),
    ]
    return " ".join(words)


def remedied(incident: Incident) -> str:
    """Remedy in words: how work went on, and what was computed elsewhere or again."""
    parts = [f"{incident.remedy.value} after {incident.seconds:.2f} s (fence {incident.fenced_s:.2f} s)"]
    if incident.num_rerouted:
        parts.append(f"{counted(incident.num_rerouted, 'hop')} rerouted")
    if incident.replayed:
        stages = [f"stage {one.stage}: {ranges(one.microbatches)}" for one in incident.replayed[:_NUM_NAMED]]
        more = len(incident.replayed) - len(stages)
        parts.append("replayed " + " and ".join([*stages, *([f"{more} stages more"] if more else [])]))
    if incident.num_dropped:
        parts.append(f"{counted(incident.num_dropped, 'contribution')} given up")
    if incident.num_retried:
        parts.append(f"{counted(incident.num_retried, 'microbatch', 'microbatches')} begun anew")
    return ", ".join(parts)


def cost(incident: Incident) -> str:
    """Steps and samples."""
    steps, samples = incident.num_steps_lost, incident.num_samples_repeated
    return f"{counted(steps, 'step')} lost, {counted(samples, 'sample')} repeated"


def num_replayed(incident: Incident) -> int:
    """Contributions, each of one microbatch to one stage, that were computed again."""
    return sum(len(one.microbatches) for one in incident.replayed)


def ranges(microbatches: Sequence[MicrobatchId]) -> str:
    """Microbatches in a few words: runs of neighbours, the first ones only where there are many.

    >>> ranges([MicrobatchId(m) for m in (5, 2, 6, 7)])
    '2, 5-7'
    """
    runs = [
        [number for _, number in group]
        for _, group in groupby(enumerate(sorted(microbatches)), lambda pair: pair[1] - pair[0])
    ]
    return short([str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Cost of all incidents of a job together. Seconds are from the notice to the moment when work went on."""

    num_incidents: int
    num_by_kind: Mapping[IncidentKind, int]
    """Number of incidents of each kind that occurred."""
    num_by_remedy: Mapping[Remedy, int]
    num_rerouted: int
    num_replayed: int
    num_retried: int
    num_steps_lost: int
    num_samples_repeated: int
    seconds: float
    median_s: float
    """0 where there was no incident."""
    p99_s: float


def total(incidents: Sequence[Incident]) -> Totals:
    """The sums, and quantiles of recovery, each the time of an incident: so many percent took no longer."""
    kinds, remedies = Counter(one.kind for one in incidents), Counter(one.remedy for one in incidents)
    seconds = sorted(one.seconds for one in incidents)
    return Totals(
        num_incidents=len(incidents),
        num_by_kind={kind: kinds[kind] for kind in IncidentKind if kinds[kind]},
        num_by_remedy={remedy: remedies[remedy] for remedy in Remedy if remedies[remedy]},
        num_rerouted=sum(one.num_rerouted for one in incidents),
        num_replayed=sum(map(num_replayed, incidents)),
        num_retried=sum(one.num_retried for one in incidents),
        num_steps_lost=sum(one.num_steps_lost for one in incidents),
        num_samples_repeated=sum(one.num_samples_repeated for one in incidents),
        seconds=sum(seconds),
        median_s=_quantile(seconds, percent=50),
        p99_s=_quantile(seconds, percent=99),
    )


def _quantile(ascending: Sequence[float], *, percent: int) -> float:
    return ascending[-(-percent * len(ascending) // 100) - 1] if ascending else 0.0


def short(names: Sequence[str], *, separator: str = ", ") -> str:
    """The first few of `names`, and how many more there are."""
    more = len(names) - _NUM_NAMED
    return separator.join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
