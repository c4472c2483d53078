"""What became of a disturbed job, by its records, by those of the same job undisturbed, and by what struck it. No I/O.

Rules of this file
- Times are Unix seconds of one machine: those of the coordinator's records and those of the nemesis.
- A step that is committed twice is doubled, unless a `RolledBack` between the two says that it was lost.
- Contributions are counted by valid tokens per step. What that cannot show, one left out and another counted twice, or
  a stage alone that counted one twice, bends the loss of this step or of the next, and the norm of the gradient.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench.chaosing.blows import OF_COORDINATOR, Fault, Strike
from skein.protocol.log.incident import Totals, total
from skein.protocol.log.records import (
    GenerationOpened,
    Incident,
    JobEnded,
    Record,
    RolledBack,
    StepCommitted,
)
from skein.protocol.messages.directives import StepRecord
from skein.types import JobId, JobState

NUM_WARM_STEPS = 3
"""At the start of a job, in which connections are opened: not counted where the pace is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of one job's records, against the steps that it should have."""

    committed: int
    lost: int
    missing: int
    doubled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bends:
    """Greatest distances from the undisturbed job, relative, over the steps that both committed; `final`: at the last.

    `first_bent_step`: the first whose loss is farther off than was allowed; None: there is none.
    """

    loss: float
    norm: float
    final: float
    first_bent_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Figures of a disturbed job. Seconds and ratios are one for each strike of their kind that can be told apart.

    Attributes:
        detection_s: from a worker's death until it is noticed, by the incident or the generation that names it.
        recovery_s: from a worker's death until the step in progress went on, by the incident that names it.
        commit_s: from a worker's death until a step is committed after the notice.
        coordinator_recovery_s: from the coordinator's death until a step is committed.
        death_step_ratio: the step in which a worker died, in medians of all steps.
        num_last_holders: strikes that fell on somebody who held a stage alone, against what is promised.
        num_unnoticed: deaths that nothing names: of workers without a place, or back too soon.
        incidents: what they say of themselves, summed.
        capacity: mean share of workers that were up and not frozen.
    """

    is_finished: bool
    strikes: tuple[tuple[Fault, int], ...]
    counts: Counts
    microbatches_lost: int
    double_counted: int
    bends: Bends
    detection_s: tuple[float, ...]
    recovery_s: tuple[float, ...]
    commit_s: tuple[float, ...]
    coordinator_recovery_s: tuple[float, ...]
    death_step_ratio: tuple[float, ...]
    num_last_holders: int
    num_unnoticed: int
    incidents: Totals
    capacity: float
    steps_per_s: float
    undisturbed_steps_per_s: float

    @property
    def throughput_ratio(self) -> float:
        """Steps per second beside those of the undisturbed job times the mean share of live capacity."""
        return self.steps_per_s / (self.undisturbed_steps_per_s * self.capacity)

    def num_strikes(self, *faults: Fault) -> int:
        """How many of these kinds there were."""
        return sum(count for fault, count in self.strikes if fault in faults)


def judge(
    records: Sequence[Record],
    strikes: Sequence[Strike],
    *,
    job: JobId,
    undisturbed: JobId,
    num_workers: int,
    microbatch_tokens: int,
    max_rel_loss_diff: float,
) -> Verdict:
    """The figures of `job`.

    Args:
        records: the log of a coordinator that had both jobs.
        strikes: while `job` ran, by time.
        job: the disturbed one.
        undisturbed: the other.
        num_workers: that the cluster had.
        microbatch_tokens: valid tokens of a full microbatch.
        max_rel_loss_diff: above which a step counts as bent.

    Raises:
        ValueError: one of the jobs has too few steps to have a pace.
    """
    mine, calm = _commits(records, job), _commits(records, undisturbed)
    for name, commits in ((job, mine), (undisturbed, calm)):
        if len(commits) <= NUM_WARM_STEPS + 1:
            raise ValueError(f"{name} committed {len(commits)} steps: too few to have a pace")
    times = [commit.wall_s for commit in mine]
    deaths = _of(strikes, Fault.KILL)
    notices = [n for n in (_notice(records, job, strikes, death) for death in deaths) if n is not None]
    outages = tuple(_outages(times, strikes))
    # Deaths while nobody was there to notice are the coordinator's, and counted as such.
    fair = [n for n in notices if not _is_within(n.struck_s, n.noticed_s, outages)]
    begin_s, end_s = times[0], _end_of_strikes(times, strikes)
    return Verdict(
        is_finished=any(
            isinstance(r, JobEnded) and r.job == job and r.state is JobState.FINISHED for r in records
        ),
        strikes=tuple((fault, len(_of(strikes, fault))) for fault in Fault),
        counts=_counts(records, job),
        microbatches_lost=_num_microbatches(mine, calm, microbatch_tokens, sign=-1),
        double_counted=_num_microbatches(mine, calm, microbatch_tokens, sign=1),
        bends=_bends(mine, calm, max_rel_loss_diff),
        detection_s=tuple(n.noticed_s - n.struck_s for n in fair),
        recovery_s=tuple(n.resumed_s - n.struck_s for n in fair if n.resumed_s is not None),
        commit_s=tuple(_until_commit(fair, times)),
        coordinator_recovery_s=tuple(end - begin for begin, end in outages),
        death_step_ratio=tuple(_death_steps(times, strikes, notices)),
        num_last_holders=sum(strike.is_last_holder for strike in strikes),
        num_unnoticed=len(deaths) - len(notices),
        incidents=total([r for r in records if isinstance(r, Incident) and r.job == job]),
        capacity=capacity(strikes, num_workers, begin_s=begin_s, end_s=end_s),
        steps_per_s=_pace([at_s for at_s in times if at_s <= end_s]),
        undisturbed_steps_per_s=_pace([commit.wall_s for commit in calm]),
    )


def _of(strikes: Sequence[Strike], *faults: Fault) -> tuple[Strike, ...]:
    return tuple(strike for strike in strikes if strike.fault in faults)


def _commits(records: Sequence[Record], job: JobId) -> tuple[StepCommitted, ...]:
    return tuple(record for record in records if isinstance(record, StepCommitted) and record.job == job)


def _pace(times: Sequence[float]) -> float:
    counted = times[NUM_WARM_STEPS:]
    return (len(counted) - 1) / (counted[-1] - counted[0]) if len(counted) > 1 else 0.0


# --- what was counted ---


def _counts(records: Sequence[Record], job: JobId) -> Counts:
    version, committed, lost, missing, doubled = 0, set[int](), 0, 0, 0
    for record in records:
        match record:
            case StepCommitted() if record.job == job:
                step = record.record.step
                doubled += step < version
                missing += max(0, step - version)
                version = max(version, step + 1)
                committed.add(step)
            case RolledBack() if record.job == job:
                lost += record.from_version - record.to_version
                version = int(record.to_version)
            case _:
                pass
    return Counts(committed=len(committed), lost=lost, missing=missing, doubled=doubled)


def _pairs(
    mine: Sequence[StepCommitted], calm: Sequence[StepCommitted]
) -> Iterator[tuple[StepRecord, StepRecord]]:
    """Every commit beside the undisturbed one of its step."""
    by_step = {commit.record.step: commit.record for commit in calm}
    for commit in mine:
        if commit.record.step in by_step:
            yield commit.record, by_step[commit.record.step]


def _num_microbatches(
    mine: Sequence[StepCommitted], calm: Sequence[StepCommitted], microbatch_tokens: int, *, sign: int
) -> int:
    """Microbatches that are too many (`sign` 1) or too few (-1), over all steps."""
    off = (sign * (one.num_tokens - other.num_tokens) for one, other in _pairs(mine, calm))
    return sum(math.ceil(max(0, tokens) / microbatch_tokens) for tokens in off)


def _bends(mine: Sequence[StepCommitted], calm: Sequence[StepCommitted], allowed: float) -> Bends:
    pairs = list(_pairs(mine, calm))
    losses = [_apart(one.loss, other.loss) for one, other in pairs]
    bent = [one.step for (one, _), off in zip(pairs, losses, strict=True) if not off <= allowed]
    return Bends(
        loss=max(losses, default=math.inf),
        norm=max((_apart(one.gradient_norm, other.gradient_norm) for one, other in pairs), default=math.inf),
        final=losses[-1] if losses else math.inf,
        first_bent_step=min(bent, default=None),
    )


def _apart(value: float, against: float) -> float:
    """Relative distance; infinite if either is no number."""
    distance = abs(value - against) / abs(against) if against else abs(value)
    return distance if math.isfinite(distance) else math.inf


# --- how long it took ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Notice:
    """That a worker's death was noticed; `resumed_s`: when an incident says that work went on."""

    struck_s: float
    noticed_s: float
    resumed_s: float | None


def _notice(
    records: Sequence[Record], job: JobId, strikes: Sequence[Strike], strike: Strike
) -> _Notice | None:
    """The first sign of the strike's worker being missed, before that one was struck again."""
    worker, struck_s = strike.targets[0], strike.struck_s
    until_s = min(
        (s.struck_s for s in strikes if worker in s.targets and s.struck_s > struck_s), default=math.inf
    )
    named = re.compile(rf"(?<![\w-]){re.escape(worker)}(?![\w-])")
    found: list[tuple[float, float | None]] = []
    for record in records:
        match record:
            case GenerationOpened() if record.job == job and named.search(record.reason):
                found.append((record.wall_s, None))
            case Incident() if record.job == job and worker in record.workers:
                found.append((record.wall_s, record.wall_s + record.seconds))
            case _:
                pass
    signs = [sign for sign in found if struck_s <= sign[0] < until_s]
    if not signs:
        return None
    noticed_s = min(at_s for at_s, _ in signs)
    resumed_s = min((end_s for _, end_s in signs if end_s is not None), default=None)
    return _Notice(struck_s=struck_s, noticed_s=noticed_s, resumed_s=resumed_s)


def _outages(times: Sequence[float], strikes: Sequence[Strike]) -> Iterator[tuple[float, float]]:
    """From each death of the coordinator to the first step that was committed after it."""
    for strike in _of(strikes, *OF_COORDINATOR):
        after = bisect_right(times, strike.struck_s)
        if after < len(times):
            yield strike.struck_s, times[after]


def _until_commit(notices: Sequence[_Notice], times: Sequence[float]) -> Iterator[float]:
    for notice in notices:
        after = bisect_right(times, notice.noticed_s)
        if after < len(times):
            yield times[after] - notice.struck_s


def _is_within(begin_s: float, end_s: float, outages: Sequence[tuple[float, float]]) -> bool:
    return any(begin_s < end and begin < end_s for begin, end in outages)


def _death_steps(
    times: Sequence[float], strikes: Sequence[Strike], notices: Sequence[_Notice]
) -> Iterator[float]:
    """The step in which each worker died that was missed, if nothing else befell that step."""
    usual_s = median(after - before for before, after in pairwise(times))
    for notice in notices:
        end = bisect_left(times, notice.struck_s)
        if not 0 < end < len(times):
            continue
        blows = [strike for strike in strikes if times[end - 1] <= strike.struck_s < times[end]]
        if len(blows) == 1:
            yield (times[end] - times[end - 1]) / usual_s


# --- the pace ---


def _end_of_strikes(times: Sequence[float], strikes: Sequence[Strike]) -> float:
    """When the last blow had been made good, or the job was over."""
    last_s = max((strike.healed_s for strike in strikes), default=math.inf)
    after = bisect_left(times, last_s)
    return times[min(after, len(times) - 1)]


def capacity(strikes: Sequence[Strike], num_workers: int, *, begin_s: float, end_s: float) -> float:
    """Mean share of the workers that were up and not frozen, from `begin_s` to `end_s`.

    A worker counts again from the moment its process was started or went on, so what it needs to be of use again is a
    loss like any other.

    >>> killed = Strike(fault=Fault.KILL, targets=("w0",), struck_s=2.0, healed_s=7.0)
    >>> capacity([killed], 2, begin_s=0.0, end_s=10.0)
    0.75
    """
    away_s = sum(
        max(0.0, min(strike.healed_s, end_s) - max(strike.struck_s, begin_s))
        for strike in _of(strikes, Fault.KILL, Fault.FREEZE)
    )
    return 1 - away_s / (num_workers * (end_s - begin_s))
