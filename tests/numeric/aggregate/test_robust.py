"""Robust combining: what one liar can do, what honest members lose, who is refused and why."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skein.config.robust import CentredClip, Krum, NormClip, NoRobust, RobustSpec, TrimmedMean
from skein.numeric.aggregate.robust import (
    Part,
    clipped_gossip,
    combiner_of,
    gates,
    part_of,
    row_without,
)
from skein.numeric.gradients import shard_bounds

SPECS: tuple[RobustSpec, ...] = (
    NoRobust(),
    NormClip(kind="median_norm_clip"),
    TrimmedMean(kind="trimmed_mean", trimmed=1),
    Krum(kind="krum", bad=1, chosen=1),
    Krum(kind="krum", bad=1, chosen=3),
    CentredClip(kind="centred_clip"),
)
ROBUST = SPECS[1:]
NUM_MEMBERS, NUM_ELEMENTS = 7, 40


@pytest.fixture(params=SPECS, ids=lambda spec: f"{spec.kind} {getattr(spec, 'chosen', '')}".strip())
def spec(request: pytest.FixtureRequest) -> RobustSpec:
    chosen: RobustSpec = request.param
    return chosen


def around(centre: float, *, num: int, seed: int, spread: float = 0.1) -> list[Tensor]:
    """Contributions near (centre, ..., centre)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        centre + spread * torch.randn(NUM_ELEMENTS, generator=generator, dtype=torch.float64)
        for _ in range(num)
    ]


def equally(vectors: Sequence[Tensor]) -> list[Part]:
    return [part_of(vector, 1.0 / len(vectors)) for vector in vectors]


def assert_near(found: Tensor, expected: Tensor) -> None:
    # Float64 sums of seven numbers of order one, in another order or scaled: rounding is below 1e-14.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def combine(spec: RobustSpec, vectors: Sequence[Tensor]) -> Tensor:
    return combiner_of(spec)(equally(vectors)).values


@given(order=st.permutations(range(NUM_MEMBERS)), seed=st.integers(0, 1000))
def test_the_order_of_members_changes_nothing_but_rounding(order: list[int], seed: int) -> None:
    vectors = around(1.0, num=NUM_MEMBERS, seed=seed)
    for spec in SPECS:
        there = combine(spec, vectors)
        assert_near(combine(spec, [vectors[i] for i in order]), there)


def test_members_that_agree_get_what_they_sent(spec: RobustSpec) -> None:
    (vector,) = around(2.0, num=1, seed=3)
    assert_near(combine(spec, [vector] * NUM_MEMBERS), vector)


@given(lie=st.floats(-9.0, 9.0), seed=st.integers(0, 1000))
def test_a_liar_within_the_gates_moves_a_robust_result_no_further_than_honest_members_differ(
    lie: float, seed: int
) -> None:
    honest = around(1.0, num=NUM_MEMBERS - 1, seed=seed)
    mean = torch.stack(honest).mean(dim=0)
    furthest = max(float((vector - mean).norm()) for vector in honest)
    shortest, *_, longest = sorted(float(vector.norm()) for vector in honest)
    liar = torch.full_like(mean, lie)
    for spec in ROBUST:
        off = float((combine(spec, [*honest, liar]) - mean).norm())
        # Clipping by length lets a liar count like one member turned round, and shortens the longest of the others to
        # the median; the other rules see how far apart members are.
        by_length = 2 * longest / NUM_MEMBERS + longest - shortest
        bound = by_length if isinstance(spec, NormClip) else 2 * furthest
        assert off <= bound + 1e-9, (spec, lie, off, bound)


def test_the_plain_mean_follows_a_liar_within_the_gates() -> None:
    honest = around(1.0, num=NUM_MEMBERS - 1, seed=0)
    off = combine(NoRobust(), [*honest, torch.full_like(honest[0], -9.0)]) - torch.stack(honest).mean(dim=0)
    assert float(off.abs().min()) > 1.0


@pytest.mark.parametrize("lie", [math.nan, math.inf, 1e30])
def test_gates_keep_the_worst_out_of_every_rule(spec: RobustSpec, lie: float) -> None:
    honest = around(1.0, num=NUM_MEMBERS - 1, seed=1)
    broken = honest[0].clone()
    broken[5] = lie
    combined = combiner_of(spec)(equally([*honest[:2], broken, *honest[2:]]))
    assert [refusal.part for refusal in combined.refused] == [2]
    assert float((combined.values - torch.stack(honest).mean(dim=0)).norm()) < 2.0


def test_a_refused_members_weight_goes_to_the_others_in_proportion() -> None:
    parts = [
        part_of(torch.tensor([value]), weight) for value, weight in ((1.0, 0.2), (3.0, 0.6), (math.nan, 0.2))
    ]
    # (0.2 * 1 + 0.6 * 3) / 0.8 = 2.5
    torch.testing.assert_close(combiner_of(NoRobust())(parts).values, torch.tensor([2.5]))


def test_if_nobody_counts_nothing_moves() -> None:
    combined = combiner_of(NoRobust())(equally([torch.tensor([math.nan, 1.0])] * 2))
    assert combined.values.tolist() == [0.0, 0.0]
    assert [refusal.reason for refusal in combined.refused] == ["not finite"] * 2


def test_idle_members_make_nobody_unusual_and_of_two_nobody_is() -> None:
    assert not gates(equally([torch.zeros(3), torch.zeros(3), torch.ones(3)]))
    assert not gates(equally([torch.full((3,), 1e-6), torch.ones(3)]))


def test_a_shard_longer_than_the_whole_it_is_said_to_be_of_is_refused() -> None:
    parts = [*equally([torch.ones(4)] * 3), Part(values=torch.ones(4), weight=0.25, norm=1.9)]
    assert [refusal.part for refusal in gates(parts)] == [3]


def test_of_a_row_a_refused_neighbours_weight_is_put_on_oneself() -> None:
    row = ((2, 0.25), (3, 0.5), (4, 0.25))
    refused = gates(
        [part_of(torch.tensor([x]), 0.25) for x in (math.inf, 1.0, 1.0)],
    )
    assert row_without(row, refused, me=3) == ((3, 0.75), (4, 0.25))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_shards_with_the_norm_of_the_whole_are_combined_like_the_whole(num_shards: int) -> None:
    vectors = [*around(1.0, num=4, seed=4), *around(-6.0, num=1, seed=5)]
    whole = equally(vectors)
    for spec in SPECS:
        if spec.compares_vectors:
            continue
        pieces = [
            combiner_of(spec)(
                [Part(values=part.values[a:b], weight=part.weight, norm=part.norm) for part in whole]
            ).values
            for a, b in shard_bounds(NUM_ELEMENTS, num_shards)
        ]
        assert torch.equal(torch.cat(pieces), combiner_of(spec)(whole).values)


def test_krum_and_centred_clipping_want_whole_contributions() -> None:
    assert [spec.kind for spec in SPECS if spec.compares_vectors] == ["krum", "krum", "centred_clip"]


def test_weights_count_in_a_clipped_mean() -> None:
    vectors = [torch.tensor([x, 0.0]) for x in (1.0, -2.0, 8.0)]
    parts = [part_of(vector, weight) for vector, weight in zip(vectors, (0.5, 0.25, 0.25), strict=True)]
    # The median norm is 2: 0.5 * 1 - 0.25 * 2 + 0.25 * 2.
    clipped = combiner_of(NormClip(kind="median_norm_clip"))(parts).values
    torch.testing.assert_close(clipped, torch.tensor([0.5, 0.0]))


def test_a_trimmed_mean_is_each_coordinates_own() -> None:
    rows = torch.tensor([[1.0, 9.0], [2.0, 1.0], [3.0, 2.0], [4.0, 6.0], [9.0, -5.0]])
    trimmed = combine(TrimmedMean(kind="trimmed_mean", trimmed=1), list(rows))
    torch.testing.assert_close(trimmed, torch.tensor([3.0, 3.0]))


def test_krum_takes_the_member_whose_neighbours_are_nearest() -> None:
    vectors = [torch.tensor([x]) for x in (0.0, 1.0, 1.2, 1.5, 4.0)]
    # Two nearest each; squared distances: 1 + 1.44, 0.04 + 0.25, 0.04 + 0.09, 0.09 + 0.25, 6.25 + 7.84.
    assert combine(Krum(kind="krum", bad=1), vectors).tolist() == pytest.approx([1.2])
    two = combine(Krum(kind="krum", bad=1, chosen=2), vectors)
    assert two.tolist() == pytest.approx([1.1])  # of 1.2 and 1.0: 0.13 and 0.29 are the least


def test_centred_clipping_from_the_last_mean_needs_one_round_where_zero_needs_more() -> None:
    vectors = [*around(100.0, num=6, seed=6), *around(-100.0, num=1, seed=7)]
    mean = torch.stack(vectors[:6]).mean(dim=0)

    def off(rounds: int, centre: Tensor | None) -> float:
        spec = CentredClip(kind="centred_clip", rounds=rounds)
        return float((combiner_of(spec, centre=centre)(equally(vectors)).values - mean).norm())

    near = mean + 0.01
    assert off(1, near) < 0.5 < off(1, None)
    assert off(6, None) < off(3, None) < off(1, None)


@pytest.mark.parametrize(
    ("spec", "needed"),
    [
        (TrimmedMean(kind="trimmed_mean", trimmed=2), 5),
        (Krum(kind="krum", bad=1), 5),
        (Krum(kind="krum", bad=1, chosen=4), 7),
        (NormClip(kind="median_norm_clip"), 1),
    ],
)
def test_fewer_members_than_a_rule_wants_are_combined(spec: RobustSpec, needed: int) -> None:
    for num in range(1, needed + 1):
        members = around(1.0, num=num, seed=8)
        combined = combiner_of(spec)(equally(members))
        furthest = max(float((member - members[0]).norm()) for member in members)
        assert float((combined.values - members[0]).norm()) <= furthest + 1e-9


def test_with_fewer_members_a_rule_bears_as_many_liars_as_so_few_allow() -> None:
    liar = torch.full((NUM_ELEMENTS,), -8.0, dtype=torch.float64)
    for spec in (TrimmedMean(kind="trimmed_mean", trimmed=3), Krum(kind="krum", bad=3)):
        honest = around(1.0, num=5, seed=14)
        off = combine(spec, [*honest, liar]) - torch.stack(honest).mean(dim=0)
        # Six bear two liars (trimmed) or one (Krum) instead of three.
        assert float(off.norm()) < max(float((x - honest[0]).norm()) for x in honest)


def test_refused_members_are_those_that_a_rule_reckoned_with() -> None:
    honest = around(1.0, num=4, seed=9)
    broken = torch.full_like(honest[0], math.nan)
    trimmed = combine(TrimmedMean(kind="trimmed_mean", trimmed=1), [*honest, broken])
    assert_near(trimmed, torch.stack(honest).mean(dim=0))


def test_gossip_without_liars_is_the_row_of_the_graph() -> None:
    own, left, right = around(1.0, num=3, seed=10)
    parts = [part_of(left, 0.25), part_of(right, 0.25)]
    mixed = clipped_gossip(own, parts, radius=100.0).values
    assert_near(mixed, 0.5 * own + 0.25 * left + 0.25 * right)


@given(lie=st.floats(-5.0, 5.0))
def test_one_of_two_neighbours_lying_pulls_no_further_than_the_other(lie: float) -> None:
    own, honest = around(1.0, num=2, seed=11)
    liar = torch.full_like(own, lie)
    mixed = clipped_gossip(own, [part_of(honest, 0.25), part_of(liar, 0.25)], radius=1.0).values
    assert float((mixed - own).norm()) <= 0.5 * float((honest - own).norm()) + 1e-9


def test_a_neighbour_far_longer_than_oneself_leaves_its_weight_with_oneself() -> None:
    own, honest = around(1.0, num=2, seed=12)
    combined = clipped_gossip(own, [part_of(own * 1e6, 0.25), part_of(honest, 0.25)], radius=1.0)
    assert [refusal.part for refusal in combined.refused] == [0]
    assert_near(combined.values, 0.75 * own + 0.25 * honest)
    alone = clipped_gossip(own, [part_of(own * math.nan, 0.25)], radius=1.0)
    assert torch.equal(alone.values, own)


def test_combining_changes_no_contribution(spec: RobustSpec) -> None:
    vectors = around(1.0, num=NUM_MEMBERS, seed=13)
    before = [vector.clone() for vector in vectors]
    combine(spec, vectors)
    assert all(torch.equal(a, b) for a, b in zip(vectors, before, strict=True))
