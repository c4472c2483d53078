"""Workers that compute and get nowhere, and workers that are slower than they were, or than their peers.

Rules of this file
- A bound is a multiple of what that worker's ops were measured to take. Until a worker has done each kind of op for its
  chunks it may take much longer: devices warm up, and plans rest on profiles.
- Nothing here decides what becomes of a worker.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from skein.plan.plan import ChunkTime, Plan
from skein.protocol.messages.reports import Beat
from skein.types import ChunkRef, StageSpec, WorkerId

ChunkTimeOf = Callable[[ChunkRef, StageSpec], ChunkTime | None]
"""Times that a chunk's ops were measured to take; None: not yet."""

# --- stuck ---

STUCK_S, STUCK_TIMES = 4.2, 2.6
"""An op that runs for so long, and for so many times what ops take, never ends. With a beat that comes half a second
late, and the way of the news, that is noticed within 5 s, or three times what ops take."""
WARMING_S, WARMING_TIMES = 30.0, 10.0
"""The same while ops have not been measured; the multiple is of what the plan expects."""
NUM_PROVEN = 2
"""Commits under the same chunks after which each kind of op has ended: the update comes after its commit."""
_NUM_STEPS = 5


@dataclass(slots=True, kw_only=True)
class _Placed:
    """A worker under the plan. `longest_s` has the longest op of each of the last steps, as far as beats saw it."""

    stages: tuple[tuple[ChunkTime, StageSpec], ...]
    running_s: float = 0.0
    step_s: float = 0.0
    longest_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_STEPS))

    @property
    def expected_s(self) -> float:
        """The longest op, as planned."""
        return max((_longest_s(time) for time, _ in self.stages), default=0.0)


class OpWatch:
    """Notices ops that never end, from what beats say of the running one."""

    def __init__(self, chunk_time: ChunkTimeOf) -> None:
        self._chunk_time = chunk_time
        self._placed: dict[WorkerId, _Placed] = {}
        self._long: set[WorkerId] = set()
        """Workers whose running op may be beyond a bound, by their last beats."""

    def planned(self, plan: Plan) -> None:
        """Note that a plan is in place. A worker that keeps its chunks has shown already what they take."""
        stages = {stage.index: stage for stage in plan.stages}
        found: dict[WorkerId, list[tuple[ChunkTime, StageSpec]]] = {worker: [] for worker in plan.workers}
        for time in plan.chunk_times:
            if time.chunk.worker in found:
                found[time.chunk.worker].append((time, stages[time.chunk.stage]))
        before = self._placed
        self._placed = {worker: _Placed(stages=tuple(own)) for worker, own in found.items()}
        for worker, placed in self._placed.items():
            if worker in before and _specs(before[worker]) == _specs(placed):
                placed.longest_s = before[worker].longest_s
        self._long.clear()

    def beat(self, worker: WorkerId, beat: Beat) -> None:
        """A worker says how long its running op has been at it."""
        placed = self._placed.get(worker)
        if placed is not None:
            placed.running_s = beat.running_s
            placed.step_s = max(placed.step_s, beat.running_s)
            if beat.running_s > min(STUCK_S, WARMING_S):
                self._long.add(worker)
            else:
                self._long.discard(worker)

    def committed(self) -> None:
        """A step is."""
        for placed in self._placed.values():
            placed.longest_s.append(placed.step_s)
            placed.step_s = 0.0

    def lose(self, worker: WorkerId) -> None:
        """A worker is gone; who comes in its name may be another machine."""
        self._placed.pop(worker, None)
        self._long.discard(worker)

    def bound_s(self, worker: WorkerId) -> float:
        """Seconds for which an op of this worker may run."""
        placed = self._placed.get(worker)
        if placed is None:
            return WARMING_S
        measured = [self._chunk_time(time.chunk, stage) for time, stage in placed.stages]
        known = [_longest_s(time) for time in measured if time is not None]
        if len(placed.longest_s) < NUM_PROVEN or len(known) < len(measured):
            return max(WARMING_S, WARMING_TIMES * placed.expected_s)
        # Updates are no stage's ops, but part of every step; a stall in one of the steps is not.
        usual_s = max([*known, min(placed.longest_s)])
        return max(STUCK_S, STUCK_TIMES * usual_s)

    def stuck(self) -> dict[WorkerId, str]:
        """Workers whose running op is beyond its bound, by the last beat of each; with the reason, and what to do."""
        found = {}
        # Asked at every report of every worker: bounds are worked out for the few that may be beyond any.
        for worker in sorted(self._long):
            placed = self._placed[worker]
            if placed.running_s <= self.bound_s(worker):
                continue
            far = f"where {self.bound_s(worker):.1f} s is far too long: start it again"
            found[worker] = f"an op has run for {placed.running_s:.1f} s, {far}"
        return found


def _specs(placed: _Placed) -> tuple[StageSpec, ...]:
    return tuple(stage for _, stage in placed.stages)


def _longest_s(time: ChunkTime) -> float:
    return max(time.forward_s, time.backward_s, time.loss_s)


# --- stragglers ---

SLOW, WELL = 1.5, 1.2
"""Times as long that make a worker a straggler; times as long down to which it stays one."""
NUM_SLOW = 3
"""Reports in a row that make a straggler: one beat's may be an accident."""
LEAST_HISTORY = 8
MAX_HISTORY = 256
"""Reports. Who has been slow for so many of them is as fast as it is."""
_DEVIATIONS = 3.0
_SIGMA_PER_MAD = 1.4826
"""Standard deviation of normal noise, in median absolute deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Seconds that one visit of a microbatch takes of a worker."""

    stage: StageSpec
    measured_s: float
    planned_s: float


@dataclass(slots=True, kw_only=True)
class _Seen:
    history: dict[StageSpec, deque[float]] = field(default_factory=dict)
    own: float = 1.0
    beside_plan: float = 1.0
    ratio: float = 1.0
    num_slow: int = 0
    is_straggler: bool = False


class Stragglers:
    """Workers that are slower than they were, or than planned, when their peers are not.

    Both are ratios of medians. What all suffer alike, such as a machine that they share, makes nobody a straggler.
    """

    def __init__(self) -> None:
        self._seen: dict[WorkerId, _Seen] = {}

    def told(self, worker: WorkerId, visits: Iterable[Visit]) -> None:
        """A worker reports what its chunks take by now, medians of its last ops."""
        listed = [visit for visit in visits if visit.measured_s > 0]
        if not listed:
            return
        seen = self._seen.setdefault(worker, _Seen())
        seen.own = max(self._own_ratio(seen, visit) for visit in listed)
        planned_s = sum(visit.planned_s for visit in listed)
        seen.beside_plan = sum(visit.measured_s for visit in listed) / planned_s if planned_s > 0 else 1.0
        self._judge(seen)
        self._remember(seen, listed)

    def lose(self, worker: WorkerId) -> None:
        """A worker is gone."""
        self._seen.pop(worker, None)

    def found(self) -> tuple[tuple[WorkerId, float], ...]:
        """Stragglers, and how many times as long as expected they take; sorted by worker."""
        return tuple((worker, seen.ratio) for worker, seen in sorted(self._seen.items()) if seen.is_straggler)

    def _own_ratio(self, seen: _Seen, visit: Visit) -> float:
        """Beside this worker's own past; 1 where the difference may be noise."""
        history = seen.history.get(visit.stage, ())
        if len(history) < LEAST_HISTORY:
            return 1.0
        middle_s = median(history)
        if visit.measured_s <= middle_s:
            return 1.0
        mad_s = median([abs(seconds - middle_s) for seconds in history])
        is_noise = visit.measured_s - middle_s <= _DEVIATIONS * _SIGMA_PER_MAD * mad_s
        return 1.0 if is_noise else visit.measured_s / middle_s

    def _judge(self, seen: _Seen) -> None:
        everybody = self._seen.values()
        own = seen.own / max(median(other.own for other in everybody), 1.0)
        usual = median(other.beside_plan for other in everybody)
        seen.ratio = max(own, seen.beside_plan / usual) if usual > 0 else own
        seen.num_slow = seen.num_slow + 1 if seen.ratio >= SLOW else 0
        seen.is_straggler = seen.ratio > WELL if seen.is_straggler else seen.num_slow >= NUM_SLOW

    def _remember(self, seen: _Seen, visits: Iterable[Visit]) -> None:
        """Remember visits as the past; those of a worker that is slow now do not count as such, unless it lasts."""
        if 0 < seen.num_slow < MAX_HISTORY and seen.own >= SLOW:
            return
        if seen.num_slow >= MAX_HISTORY:
            seen.history.clear()
        for visit in visits:
            seen.history.setdefault(visit.stage, deque(maxlen=MAX_HISTORY)).append(visit.measured_s)
