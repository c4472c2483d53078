"""From votes to numbers: what each group's sums are multiplied with, for one walker and for many."""

from collections.abc import Mapping
from math import inf, nan

import pytest

from skein.plan.agreeing.rounds import StepGroups, local_group
from skein.plan.plan import Group
from skein.protocol.messages.reports import Vote
from skein.protocol.rounds.weighing import Numbers, weigh
from skein.types import GroupId
from tests.support.plans import chunk
from tests.support.reports import vote

A0, B0, A1, B1 = (local_group(chunk(s, w)) for s, w in ((0, "a"), (0, "b"), (1, "a"), (1, "b")))
REDUCED = (A0, B0, A1, B1)


def one_walker(num_sharing: tuple[int, ...]) -> StepGroups:
    return StepGroups(reduced=REDUCED, units=tuple((g.group,) for g in REDUCED), num_sharing=num_sharing)


def two_walkers(*, may_lose_some: bool = True) -> StepGroups:
    units = ((A0.group, A1.group), (B0.group, B1.group))
    return StepGroups(reduced=REDUCED, units=units, may_lose_some=may_lose_some)


def weighed(
    groups: StepGroups,
    visitors: Mapping[GroupId, int],
    *,
    clip_norm: float | None = None,
    norms: Mapping[GroupId, float] | None = None,
    spoilt: tuple[Group, ...] = (),
    loss_sum: float = 6.0,
) -> Numbers:
    votes: list[Vote] = [
        vote(
            g.group,
            squared_norm=(norms or {}).get(g.group, 1.0),
            is_finite=g not in spoilt,
        )
        for g in groups.reduced
    ]
    return weigh(groups, votes, visitors, loss_sum=loss_sum, num_tokens=12, clip_norm=clip_norm)


def test_a_mean_over_those_who_share_a_gradient_is_that_of_all_tokens() -> None:
    # Two hold stage 0 and two stage 1; 12 tokens visit each. Sums a, b: (2/12 a + 2/12 b) / 2 = (a + b) / 12.
    numbers = weighed(one_walker((2, 2, 2, 2)), {g.group: 12 for g in REDUCED})
    assert {numbers.weights[g.group] for g in REDUCED} == {2 / 12}
    assert numbers.gradient_norm == pytest.approx(2 / 12)


def test_stages_may_have_unequal_numbers_of_holders() -> None:
    numbers = weighed(one_walker((3, 3, 1, 1)), {g.group: 12 for g in REDUCED})
    assert [numbers.weights[g.group] for g in REDUCED] == [3 / 12, 3 / 12, 1 / 12, 1 / 12]


def test_without_an_exchange_each_walker_divides_by_its_own_tokens() -> None:
    visitors = {A0.group: 8, A1.group: 8, B0.group: 4, B1.group: 4}
    numbers = weighed(two_walkers(), visitors)
    assert [numbers.weights[g.group] for g in REDUCED] == [1 / 8, 1 / 4, 1 / 8, 1 / 4]
    assert numbers.clip == 1.0


def test_a_walker_is_clipped_by_the_norm_of_all_its_stages_and_the_other_is_not() -> None:
    visitors = dict.fromkeys((g.group for g in REDUCED), 6)
    # a: sqrt(27 + 9) / 6 = 1; b: sqrt(576 + 0) / 6 = 4.
    norms = {A0.group: 27.0, A1.group: 9.0, B0.group: 576.0, B1.group: 0.0}
    numbers = weighed(two_walkers(), visitors, clip_norm=2.0, norms=norms)
    assert numbers.weights[A0.group] == 1 / 6
    assert numbers.weights[B0.group] == numbers.weights[B1.group] == pytest.approx(0.5 / 6, rel=1e-6)
    assert numbers.gradient_norm == pytest.approx(((1 + 16) / 2) ** 0.5)


def test_a_walker_that_is_not_finite_weighs_nothing_and_the_step_goes_on() -> None:
    visitors = dict.fromkeys((g.group for g in REDUCED), 6)
    numbers = weighed(two_walkers(), visitors, spoilt=(B1,))
    assert numbers.reason == ""
    assert [numbers.weights[g.group] for g in REDUCED] == [1 / 6, 0.0, 1 / 6, 0.0]
    assert [numbers.num_tokens_by_group[g.group] for g in REDUCED] == [6, 0, 6, 0], "it has learned nothing"


def test_a_loss_that_is_not_finite_skips_the_step_of_one_walker_alone() -> None:
    visitors = dict.fromkeys((g.group for g in REDUCED), 6)
    assert weighed(two_walkers(), visitors, loss_sum=nan).reason == ""
    assert weighed(one_walker((2, 2, 2, 2)), visitors, loss_sum=nan).reason == "loss not finite"


def test_if_no_walker_is_finite_the_step_is_skipped() -> None:
    visitors = dict.fromkeys((g.group for g in REDUCED), 6)
    numbers = weighed(two_walkers(), visitors, norms={A0.group: inf, B0.group: nan})
    assert numbers.reason == "gradient not finite in s0@a, s0@b"


def test_one_bad_chunk_skips_the_step_of_one_walker() -> None:
    visitors = dict.fromkeys((g.group for g in REDUCED), 12)
    numbers = weighed(one_walker((2, 2, 2, 2)), visitors, spoilt=(B0,))
    assert numbers.reason == "gradient not finite in s0@b"


def test_a_chunk_that_nobody_visited_weighs_nothing() -> None:
    visitors = {A0.group: 12, B0.group: 12, A1.group: 12, B1.group: 0}
    assert weighed(two_walkers(), visitors).weights[B1.group] == 0.0
