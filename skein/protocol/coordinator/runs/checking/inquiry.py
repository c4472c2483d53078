"""Inquiry into a step: it is computed again without a suspect, and what comes of it is compared.

Rules of this file
- A result that comes out otherwise without a suspect speaks against it, or against those that stood in for it. So the
  step is computed without all of them: if that agrees with those who stood in, the suspect was wrong.
- Else they were, one of them at least, if the others come to the same once more: each has then to show it alone.
- A worker is convicted of what comes out otherwise with it twice: once may be the fault of anybody who took part.
- Nobody is convicted by one worker's word. Where nobody else can compute it, or others do not agree with themselves, it
  is undecided.
- Results are compared by sketches, whose seed is told only once they are there, and by their losses.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from math import isclose, isfinite

from skein.numeric.sketch import Sketch, distance
from skein.plan.plan import Plan
from skein.types import Precision, WorkerId

TOLERANCE = {Precision.FP64: 1e-9, Precision.FP32: 1e-3, Precision.BF16: 5e-2}
"""Share by which honest results differ at most: sums are made in another order, perhaps on devices of other kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Result of one computation of the step: the sketch of its whole gradient, its mean loss, and by which plan."""

    sketch: Sketch
    loss: float
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Verdict so far: the step is to be computed again without these."""

    aside: frozenset[WorkerId]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """Verdict that the step comes out the same without any suspect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convicted:
    """Verdict that two others agree on what a worker should have had."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """Verdict that somebody among these is wrong, and nobody can tell who; of no workers: nothing was found out."""

    workers: tuple[WorkerId, ...]
    reason: str


Verdict = Again | Cleared | Convicted | Undecided


class Inquiry:
    """Inquiry into a step, from its first result: each further one gives a verdict."""

    def __init__(self, suspects: Iterable[WorkerId], seed: int, precision: Precision) -> None:
        self.seed = seed
        self._tolerance = TOLERANCE[precision]
        self._in_doubt: tuple[WorkerId, ...] = ()
        self._course = self._hear(tuple(suspects))
        next(self._course)

    def came(self, outcome: StepOutcome) -> Verdict:
        """The step was computed once more."""
        try:
            return self._course.send(outcome)
        except StopIteration as end:
            verdict: Verdict = end.value
            return verdict

    def failed(self) -> Undecided:
        """The inquiry ends, for nobody else can compute the step as it was."""
        if not self._in_doubt:
            return Undecided(workers=(), reason="the check ends, for nobody else can compute the step")
        return self._undecided(self._in_doubt, "and nobody else can compute that")

    def _hear(self, suspects: tuple[WorkerId, ...]) -> Generator[Again, StepOutcome, Verdict]:
        first = yield _again((), "")  # The first result is what it begins with.
        for suspect in suspects:
            second = yield _again([suspect], f"computed again without {suspect}, as a check")
            if self._is_same(first, second):
                continue
            stand_ins = _stand_ins(first.plan, second.plan)
            both = self._in_doubt = (suspect, *stand_ins)
            third = yield _again(both, f"otherwise without {suspect}: computed again without {_and(both)}")
            if self._is_same(second, third):
                once_more = yield _again([], f"otherwise with {suspect}: computed once more with it")
                if self._is_same(second, once_more):
                    return Undecided(workers=(), reason=f"it came out otherwise with {suspect} only once")
                return Convicted(worker=suspect, reason=_CONVICTED)
            fourth = yield _again(both, f"otherwise without {_and(both)}: computed once more without them")
            if not self._is_same(third, fourth):
                others = sorted({hop.worker for path in third.plan.paths for hop in path.hops})
                return self._undecided(others, "and does not come out the same twice")
            for one in stand_ins:
                rest = [worker for worker in both if worker != one]
                alone = yield _again(
                    rest, f"computed again without {_and(rest)}, to see what {one} makes of it"
                )
                if not self._is_same(third, alone):
                    return Convicted(worker=one, reason=_CONVICTED)
            return self._undecided(both, "though each of them computes the same as others alone")
        return Cleared()

    def _undecided(self, workers: Iterable[WorkerId], why: str) -> Undecided:
        workers = tuple(workers)
        return Undecided(
            workers=workers, reason=f"a step does not come out the same with {_and(workers)}, {why}"
        )

    def _is_same(self, one: StepOutcome, other: StepOutcome) -> bool:
        is_finite = isfinite(one.loss), isfinite(other.loss)
        has_same_loss = is_finite == (False, False) or isclose(one.loss, other.loss, rel_tol=self._tolerance)
        return has_same_loss and distance(one.sketch, other.sketch) <= self._tolerance


_CONVICTED = "what it contributed to a step is not what others computed in its place"


def _again(aside: Iterable[WorkerId], reason: str) -> Again:
    return Again(aside=frozenset(aside), reason=reason)


def _stand_ins(before: Plan, after: Plan) -> tuple[WorkerId, ...]:
    """Workers with a hop that was another's."""
    pairs = zip(before.paths, after.paths, strict=True)
    hops = (hops for path, other in pairs for hops in zip(path.hops, other.hops, strict=True))
    return tuple(sorted({new.worker for old, new in hops if old.worker != new.worker}))


def _and(workers: Iterable[WorkerId]) -> str:
    return " and ".join(workers)
