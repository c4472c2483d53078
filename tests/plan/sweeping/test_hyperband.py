"""Hyperband: rungs as the paper has them, and survivors that follow from values alone."""

import math
from itertools import pairwise
from random import Random

import pytest

from skein.plan.sweeping.hyperband import Advance, Goal, Hyperband, Rung, best_of, brackets_of, steps_of

FIRST = brackets_of(27, least_steps=1, eta=3)[0]


def value_of(trial: int, num_steps: int) -> float:
    """Losses that cross each other as trials go on."""
    return math.cos(1 + trial * trial) + trial / num_steps


def carried_out(search: Hyperband, order: Random) -> list[tuple[Advance, ...]]:
    """What was due at each rung, told in an order of its own."""
    rungs = []
    while due := search.due:
        rungs.append(due)
        for advance in order.sample(due, len(due)):
            search.told(advance, value_of(advance.trial, advance.num_steps))
    return rungs


def test_brackets_are_those_of_the_papers_algorithm() -> None:
    # Algorithm 1 with R = 81 and eta = 3: ceil(5 * 3**s / (s + 1)) trials, s = 4 .. 0.
    found = brackets_of(81, least_steps=1, eta=3)
    assert [[(x.num_trials, x.num_steps) for x in rungs] for rungs in found] == [
        [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        [(34, 3), (11, 9), (3, 27), (1, 81)],
        [(15, 9), (5, 27), (1, 81)],
        [(8, 27), (2, 81)],
        [(5, 81)],
    ]


@pytest.mark.parametrize(("most", "least", "eta"), [(100, 7, 3), (1000, 10, 4), (5, 5, 2), (4096, 1, 2)])
def test_every_rung_has_fewer_trials_and_more_steps_and_ends_within_the_budget(
    most: int, least: int, eta: int
) -> None:
    for rungs in brackets_of(most, least_steps=least, eta=eta):
        assert all(a.num_trials > b.num_trials >= 1 for a, b in pairwise(rungs))
        assert all(least <= a.num_steps < b.num_steps for a, b in pairwise(rungs))
        assert rungs[-1].num_steps == most
        assert all(x.num_steps % least == 0 or x.num_steps == most for x in rungs)


def test_trials_that_go_on_cost_the_steps_since_their_last_rung() -> None:
    assert steps_of((Rung(num_trials=9, num_steps=3), Rung(num_trials=3, num_steps=9))) == 9 * 3 + 3 * 6


def test_survivors_do_not_depend_on_the_order_of_news() -> None:
    runs = [carried_out(Hyperband(FIRST), Random(seed)) for seed in range(5)]
    assert all(run == runs[0] for run in runs)
    assert [len(due) for due in runs[0]] == [27, 9, 3, 1]
    for before, after, rung in zip(runs[0], runs[0][1:], FIRST, strict=False):
        values = {x.trial: value_of(x.trial, rung.num_steps) for x in before}
        assert {x.trial for x in after} == set(best_of(values, len(after), Goal.MIN))


def test_a_larger_value_is_better_where_the_goal_says_so() -> None:
    search = Hyperband(FIRST, goal=Goal.MAX)
    for advance in search.due:
        search.told(advance, float(advance.trial))
    assert [x.trial for x in search.due] == [*range(18, 27)]


def test_old_news_change_nothing() -> None:
    search = Hyperband(FIRST)
    first = search.due
    for advance in first:
        search.told(advance, float(advance.trial))
    due = search.due
    search.told(first[0], -100.0)
    assert search.due == due
    search.told(due[0], 1.0)
    search.told(due[0], 2.0)
    assert search.due == due[1:]


def test_who_diverged_is_no_survivor_though_nobody_takes_its_place() -> None:
    search = Hyperband(FIRST)
    for advance in search.due:
        search.told(advance, 1.0 if advance.trial in (3, 20) else math.nan)
    assert [x.trial for x in search.due] == [3, 20]
    for advance in search.due:
        search.told(advance, math.inf)
    assert search.is_over
    assert (search.due, search.survivors) == ((), ())


def test_the_last_rung_puts_the_best_first() -> None:
    search = Hyperband((Rung(num_trials=3, num_steps=5),), first_trial=10)
    for advance in search.due:
        search.told(advance, -float(advance.trial))
    assert search.is_over
    assert search.survivors == (12, 11, 10)


@pytest.mark.parametrize("made", [Advance(trial=0, num_steps=2), Advance(trial=27, num_steps=1)])
def test_what_was_not_due_is_refused(made: Advance) -> None:
    with pytest.raises(ValueError, match="was not due"):
        Hyperband(FIRST).told(made, 0.0)


@pytest.mark.parametrize(("most", "least", "eta"), [(27, 1, 1), (27, 0, 3), (5, 6, 3)])
def test_budgets_without_a_bracket_are_refused(most: int, least: int, eta: int) -> None:
    with pytest.raises(ValueError, match="make no bracket"):
        brackets_of(most, least_steps=least, eta=eta)
