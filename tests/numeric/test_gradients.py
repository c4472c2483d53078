"""Flat gradients: layout, sums, norms and digests."""

import hashlib
import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skein.numeric.gradients import (
    digest,
    flatten,
    is_finite,
    shard_bounds,
    squared_norm,
    sum_in_order,
    unflatten,
)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_flattening_and_back_restores_every_tensor_as_a_view() -> None:
    named = {"b": normal(2, 3), "a": normal(4, seed=1), "scale": normal(seed=2), "none": normal(0, 5)}
    flat = flatten(named)
    restored = unflatten(flat, named)
    assert all(torch.equal(restored[name], named[name]) for name in named)
    flat.zero_()
    assert not restored["b"].any()


def test_layout_depends_on_names_and_not_on_their_order() -> None:
    a, b = normal(3), normal(2, 2, seed=1)
    assert torch.equal(flatten({"a": a, "b": b}), flatten({"b": b, "a": a}))


@pytest.mark.parametrize("named", [{}, {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.float64)}])
def test_flattening_needs_one_dtype(named: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="one dtype"):
        flatten(named)


@pytest.mark.parametrize("shape", [(3,), (5,), (2, 2)])
def test_unflattening_a_vector_of_another_length_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="vector of 4 elements"):
        unflatten(torch.zeros(shape), {"a": torch.zeros(4)})


@given(num_elements=st.integers(0, 10_000))
def test_squared_norm_is_the_exact_sum_to_float64_rounding(num_elements: int) -> None:
    flat = normal(num_elements, seed=num_elements)
    exact = math.fsum(x * x for x in flat.double().tolist())
    # Rows of 4,096 are summed in float64 in blocks, everything else exactly: far below 1e-13.
    assert squared_norm(flat) == pytest.approx(exact, rel=1e-13, abs=0)


def test_squared_norm_does_not_overflow_where_float32_would() -> None:
    assert squared_norm(torch.full((3,), 1e30)) == pytest.approx(
        3e60, rel=1e-6
    )  # 1e30 in float32 is off by 1e-8


def test_squared_norm_has_the_same_bits_with_any_number_of_threads() -> None:
    flat, num_threads, results = normal(2_000_003), torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.add(squared_norm(flat))
    finally:
        torch.set_num_threads(num_threads)
    assert len(results) == 1


def test_a_squared_norm_beyond_float64_is_infinite() -> None:
    assert squared_norm(torch.full((9000,), 2e152, dtype=torch.float64)) == math.inf


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5000, 9999])
def test_one_element_that_is_not_finite_shows(wrong: float, place: int) -> None:
    flat = normal(10_000)
    assert is_finite(flat)
    flat[place] = wrong
    assert not is_finite(flat)
    assert not math.isfinite(squared_norm(flat))


def test_nothing_is_finite_and_has_norm_zero() -> None:
    assert is_finite(torch.empty(0))
    assert squared_norm(torch.empty(0)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_digest_is_blake2b_over_the_bytes(dtype: torch.dtype) -> None:
    flat = torch.arange(100).to(dtype)
    raw = bytes(flat.view(torch.uint8).tolist())
    assert digest(flat) == hashlib.blake2b(raw, digest_size=16).hexdigest()


def test_a_digest_of_several_leaves_is_the_root_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.arange(9_000_000, dtype=torch.float32)
    raw = flat.numpy().tobytes()
    tree = partial(hashlib.blake2b, digest_size=16, fanout=0, depth=2, leaf_size=1 << 24, inner_size=16)
    leaves = [raw[first : first + (1 << 24)] for first in range(0, len(raw), 1 << 24)]
    hashes = [tree(leaf, node_offset=i, last_node=i == 2).digest() for i, leaf in enumerate(leaves)]
    root = tree(b"".join(hashes), node_depth=1, last_node=True).hexdigest()
    assert digest(flat) == root
    monkeypatch.setattr("skein.numeric.gradients._MOST_HASHERS", 1)
    assert digest(flat) == root
    for place in (0, 5_000_000, 8_999_999):
        changed = flat.clone()
        changed[place] += 1
        assert digest(changed) != root


def test_digest_sees_one_bit_and_not_the_storage_behind() -> None:
    flat = normal(1000)
    shifted = torch.cat([torch.zeros(7), flat])[7:]
    assert digest(shifted) == digest(flat)
    flat[500] = torch.nextafter(flat[500], torch.tensor(9.0))
    assert digest(shifted) != digest(flat)


def test_digest_of_scattered_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        digest(normal(10)[::2])


@given(num_elements=st.integers(0, 10**12), num_shards=st.integers(1, 200))
def test_shards_tile_the_vector_and_differ_by_at_most_one(num_elements: int, num_shards: int) -> None:
    bounds = shard_bounds(num_elements, num_shards)
    sizes = [stop - start for start, stop in bounds]
    assert len(bounds) == num_shards
    assert (bounds[0][0], bounds[-1][1]) == (0, num_elements)
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("num_elements", "num_shards"), [(-1, 1), (1, 0)])
def test_shards_of_nothing_sensible_are_refused(num_elements: int, num_shards: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        shard_bounds(num_elements, num_shards)


@given(num_shards=st.integers(1, 9))
def test_summing_shard_by_shard_gives_the_bits_of_the_whole(num_shards: int) -> None:
    parts = [normal(1003, seed=seed) for seed in range(4)]
    shards = [
        sum_in_order([part[start:stop] for part in parts]) for start, stop in shard_bounds(1003, num_shards)
    ]
    assert torch.equal(torch.cat(shards), sum_in_order(parts))


def test_the_sum_goes_from_the_left_and_leaves_its_parts() -> None:
    parts = [torch.tensor([x]) for x in (1e8, 1.0, -1e8)]
    assert sum_in_order(parts).tolist() == [0.0]  # (1e8 + 1) - 1e8 in float32
    assert sum_in_order([parts[0], parts[2], parts[1]]).tolist() == [1.0]
    assert parts[0].tolist() == [1e8]


@pytest.mark.parametrize(
    "parts", [[], [torch.ones(2), torch.ones(1)], [torch.ones(1), torch.ones(1).double()]]
)
def test_parts_that_do_not_match_are_refused(parts: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="one shape and dtype"):
        sum_in_order(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_squared_norm_leaves_its_vector_alone(dtype: torch.dtype) -> None:
    flat = torch.tensor([3.0, -4.0], dtype=dtype)
    assert squared_norm(flat) == 25.0
    assert flat.tolist() == [3.0, -4.0]
