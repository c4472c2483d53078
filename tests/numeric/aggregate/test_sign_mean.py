import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skein.numeric.aggregate.one_bit.sign_mean import (
    SegmentLayout,
    decode_shard,
    encode_all,
    encode_shard,
    join_shards,
)

LAYOUTS = st.builds(
    SegmentLayout,
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4).map(tuple),
    num_shards=st.integers(1, 6),
)


def normal(num_elements: int, seed: int) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(layout=LAYOUTS)
def test_shards_have_every_element_once_and_begin_where_a_byte_does(layout: SegmentLayout) -> None:
    seen: list[int] = []
    for shard in range(layout.num_shards):
        start = 0
        for (first, stop), length in zip(layout.ranges(shard), layout.lengths, strict=True):
            assert (first - start) % 8 == 0 or first == stop
            seen += range(first, stop)
            start += length
    assert sorted(seen) == list(range(sum(layout.lengths)))


@given(layout=LAYOUTS, num_members=st.integers(1, 5))
def test_nothing_is_lost_between_what_is_given_and_what_comes_out(
    layout: SegmentLayout, num_members: int
) -> None:
    num_elements = sum(layout.lengths)
    weights = [(member + 1) / sum(range(num_members + 1)) for member in range(num_members)]
    totals = [normal(num_elements, seed) for seed in range(num_members)]
    before = join_shards(
        [normal(layout.num_elements(shard), 100 + shard) for shard in range(layout.num_shards)], layout
    )
    given_in = sum((w * total for w, total in zip(weights, totals, strict=True)), start=before)
    sent = [encode_all(total, layout) for total in totals]
    member_errors = sum(
        (w * (total - said) for w, total, (_, said) in zip(weights, totals, sent, strict=True)),
        start=torch.zeros(num_elements, dtype=torch.float64),
    )
    means, errors = [], []
    for shard in range(layout.num_shards):
        summed = torch.cat([before[slice(*cut)] for cut in layout.ranges(shard)])
        for weight, (parts, _) in zip(weights, sent, strict=True):
            summed = summed + weight * decode_shard(parts[shard], layout, shard, dtype=torch.float64)
        _, said = encode_shard(summed, layout, shard)
        means.append(said)
        errors.append(summed - said)
    out = join_shards(means, layout) + member_errors + join_shards(errors, layout)
    # A dozen terms of order 1 in float64.
    torch.testing.assert_close(out, given_in, rtol=0, atol=1e-13)


def test_one_member_and_one_shard_give_signs_times_the_root_mean_square() -> None:
    layout = SegmentLayout(lengths=(5,), num_shards=1)
    total = torch.tensor([3.0, -4.0, 0.0, 0.0, -0.0], dtype=torch.float64)
    parts, said = encode_all(total, layout)
    assert said.tolist() == [5**0.5, -(5**0.5), 5**0.5, 5**0.5, 5**0.5]
    assert parts[0]["bits"].tolist() == [0b10111000]
    torch.testing.assert_close(encode_shard(said, layout, 0)[1], said)


def test_segments_have_scales_of_their_own() -> None:
    layout = SegmentLayout(lengths=(8, 8), num_shards=2)
    total = torch.cat([torch.full((8,), 1e-6), torch.full((8,), -1e6)])
    assert torch.equal(encode_all(total, layout)[1], total)


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_parts_of_another_shard_are_refused(shard: int) -> None:
    layout = SegmentLayout(lengths=(100,), num_shards=3)
    parts, _ = encode_all(normal(100, 0), layout)
    with pytest.raises(ValueError, match="fit"):
        decode_shard({**parts[shard], "bits": parts[shard]["bits"][1:]}, layout, shard, dtype=torch.float64)
    with pytest.raises(ValueError, match="scale"):
        decode_shard({**parts[shard], "scales": -parts[shard]["scales"]}, layout, shard, dtype=torch.float64)
