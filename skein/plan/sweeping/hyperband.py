"""Hyperband: many trials for few steps, fewer for more, and what survives goes on from where it is.

Rules of this file
- Which trials go on follows from the values told, and from nothing else: not from the order in which they came, nor
  from who made their steps. Of equal values the trial with the lower number is better; one that diverged is the worst.
- A rung is decided once all its trials are told. Those that go on keep their state, so a rung costs the steps since the
  one before it alone.

Source: Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization" (2018), Algorithm 1, whose
rungs begin anew where these go on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import inf, isfinite

MIN_ETA = 2
"""Least share by which trials become fewer: of each so many, one goes on."""


class Goal(StrEnum):
    """Direction of the metric that trials are compared by."""

    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Comparison of `num_trials` trials, each after `num_steps` steps counted from its beginning."""

    num_trials: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Trial that is to go on until it has made `num_steps` steps."""

    trial: int
    num_steps: int


def brackets_of(most_steps: int, *, least_steps: int, eta: int) -> tuple[tuple[Rung, ...], ...]:
    """The brackets of a budget, boldest first: each has rungs, first to last, and trials of its own.

    Args:
        most_steps: of a trial that survives all rungs.
        least_steps: of any trial; a rung's steps are rounded up to a multiple of it.
        eta: how many times fewer trials each rung has.

    Raises:
        ValueError: eta is below 2, or no trial could be compared within `most_steps`.

    >>> [[(rung.num_trials, rung.num_steps) for rung in x] for x in brackets_of(27, least_steps=1, eta=3)]
    [[(27, 1), (9, 3), (3, 9), (1, 27)], [(12, 3), (4, 9), (1, 27)], [(6, 9), (2, 27)], [(4, 27)]]
    """
    if eta < MIN_ETA or not 1 <= least_steps <= most_steps:
        raise ValueError(f"{least_steps} to {most_steps} steps with eta {eta} make no bracket")
    deepest = 0
    while least_steps * eta ** (deepest + 1) <= most_steps:
        deepest += 1
    return tuple(_bracket(most_steps, least_steps, eta, depth, deepest) for depth in range(deepest, -1, -1))


def _bracket(most_steps: int, least_steps: int, eta: int, depth: int, deepest: int) -> tuple[Rung, ...]:
    # Integers throughout: powers and quotients of floats fall to either side of a whole number.
    num_trials = -(-(deepest + 1) * eta**depth // (depth + 1))
    rungs = []
    for place in range(depth + 1):
        share = eta ** (depth - place)
        num_units = -(-most_steps // (share * least_steps))
        num_steps = min(most_steps, num_units * least_steps)
        rungs.append(Rung(num_trials=num_trials // eta**place, num_steps=num_steps))
    return tuple(rungs)


def split_brackets(
    num_trials: int, most_steps: int, *, least_steps: int, eta: int, num_brackets: int = 1
) -> tuple[tuple[Rung, ...], ...]:
    """Brackets of so many trials in all, boldest first, each with as large a share of them as in Hyperband.

    There are fewer brackets, or rungs, where there are too few trials or steps for more.

    Args:
        num_trials: at least 1.
        most_steps: of a trial that survives all rungs.
        least_steps: of any trial of the first bracket.
        eta: how many times fewer trials each rung has.
        num_brackets: at most.

    >>> split_brackets(27, 270, least_steps=10, eta=3)[0] == tuple(
    ...     Rung(num_trials=27 // 3**n, num_steps=10 * 3**n) for n in range(4)
    ... )
    True
    >>> [bracket[0].num_trials for bracket in split_brackets(49, 27, least_steps=1, eta=3, num_brackets=4)]
    [27, 12, 6, 4]
    """
    published = brackets_of(most_steps, least_steps=least_steps, eta=eta)[:num_brackets]
    found = []
    for bracket, share in zip(published, _shares(num_trials, published), strict=True):
        depth = min(len(bracket) - 1, _depth(share, eta))
        rungs = bracket[len(bracket) - 1 - depth :]
        found.append(
            tuple(
                Rung(num_trials=share // eta**place, num_steps=rung.num_steps)
                for place, rung in enumerate(rungs)
            )
        )
    return tuple(bracket for bracket in found if bracket[0].num_trials)


def _shares(num_trials: int, brackets: tuple[tuple[Rung, ...], ...]) -> list[int]:
    total = sum(bracket[0].num_trials for bracket in brackets)
    ends, sums = [0], 0
    for bracket in brackets:
        sums += bracket[0].num_trials
        ends.append((num_trials * sums + total // 2) // total)
    return [after - before for before, after in pairwise(ends)]


def _depth(num_trials: int, eta: int) -> int:
    """Rungs after the first that so many trials are enough for."""
    depth = 0
    while eta ** (depth + 1) <= num_trials:
        depth += 1
    return depth


def steps_of(rungs: tuple[Rung, ...]) -> int:
    """Steps that all trials of a bracket make together, each going on from the rung before.

    >>> steps_of(brackets_of(27, least_steps=1, eta=3)[0])  # 27 + 9 * 2 + 3 * 6 + 1 * 18
    81
    """
    before, total = 0, 0
    for rung in rungs:
        total += rung.num_trials * (rung.num_steps - before)
        before = rung.num_steps
    return total


def best_of(values: Mapping[int, float], num_best: int, goal: Goal) -> tuple[int, ...]:
    """Trials with the best values, best first; values that are not finite come last.

    >>> best_of({0: 0.5, 1: float("nan"), 2: 0.1, 3: 0.5}, 3, Goal.MIN)
    (2, 0, 3)
    """

    def place(trial: int) -> tuple[float, int]:
        value = values[trial]
        if not isfinite(value):
            return inf, trial
        return (value if goal is Goal.MIN else -value), trial

    return tuple(sorted(values, key=place)[:num_best])


class Hyperband:
    """A bracket in progress. What is told may come in any order, and again; `due` says what is to be done."""

    def __init__(self, rungs: tuple[Rung, ...], *, first_trial: int = 0, goal: Goal = Goal.MIN) -> None:
        self.rungs = rungs
        self._goal = goal
        self._trials = tuple(range(first_trial, first_trial + rungs[0].num_trials))
        self._place = 0
        self._values: dict[int, float] = {}

    @property
    def due(self) -> tuple[Advance, ...]:
        """Trials that are to make steps now, in order of their numbers; none once the last rung is decided."""
        if self.is_over:
            return ()
        num_steps = self.rungs[self._place].num_steps
        return tuple(
            Advance(trial=trial, num_steps=num_steps)
            for trial in sorted(self._trials)
            if trial not in self._values
        )

    @property
    def is_over(self) -> bool:
        """Whether every rung is decided."""
        return self._place == len(self.rungs)

    @property
    def survivors(self) -> tuple[int, ...]:
        """Trials that no rung has ended so far, the best first once a rung is decided."""
        return self._trials

    def may_hear(self, made: Advance) -> bool:
        """Whether a trial is to make these steps in the rung at hand, or has made them."""
        is_of_rung = not self.is_over and made.num_steps == self.rungs[self._place].num_steps
        return is_of_rung and made.trial in self._trials

    def told(self, made: Advance, value: float) -> None:
        """Take what a trial has come to; not finite: it has diverged. News of an older rung changes nothing.

        Raises:
            ValueError: the trial was not to make these steps.
        """
        if any(made.num_steps == rung.num_steps for rung in self.rungs[: self._place]):
            return
        if not self.may_hear(made):
            raise ValueError(f"{made} was not due")
        self._values.setdefault(made.trial, value)
        if len(self._values) == len(self._trials):
            self._decide()

    def _decide(self) -> None:
        self._place += 1
        num_next = len(self._trials) if self.is_over else self.rungs[self._place].num_trials
        best = best_of(self._values, num_next, self._goal)
        # Who diverged makes no more steps, though nobody takes its place.
        self._trials = tuple(trial for trial in best if isfinite(self._values[trial]))
        self._values = {}
        if not self._trials:
            self._place = len(self.rungs)
