"""Which elements are exchanged together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skein.numeric.aggregate.fragments import fragment_spans, gathered, shards_of, span_view, views_of

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(sizes=SIZES, num_fragments=st.integers(1, 50))
def test_fragments_hold_every_element_once(sizes: list[int], num_fragments: int) -> None:
    tensors = {f"p{i}": torch.zeros(size, dtype=torch.int64) for i, size in enumerate(sizes)}
    for fragment in range(num_fragments):
        for span in fragment_spans(tensors, fragment=fragment, num_fragments=num_fragments):
            span_view(tensors, span).add_(1)
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())


@given(sizes=SIZES, num_fragments=st.integers(1, 50))
def test_fragments_differ_by_one_element_and_cut_few_tensors(sizes: list[int], num_fragments: int) -> None:
    tensors = {f"p{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    fragments = [
        fragment_spans(tensors, fragment=fragment, num_fragments=num_fragments)
        for fragment in range(num_fragments)
    ]
    counts = [gathered(tensors, spans).numel() for spans in fragments]
    assert max(counts) - min(counts) <= 1
    assert sum(map(len, fragments)) <= len(sizes) + num_fragments - 1


@given(sizes=SIZES, num_shards=st.integers(1, 50))
def test_shards_and_parts_are_what_was_gathered(sizes: list[int], num_shards: int) -> None:
    tensors = {f"p{i}": torch.randn(size) for i, size in enumerate(sizes)}
    spans = fragment_spans(tensors, fragment=0, num_fragments=2)
    flat = gathered(tensors, spans)
    assert torch.equal(torch.cat(shards_of(flat, num_shards)), flat)
    assert all(
        torch.equal(part, span_view(tensors, span))
        for part, span in zip(views_of(flat, spans), spans, strict=True)
    )


@pytest.mark.parametrize("fragment", [-1, 2])
def test_a_fragment_that_is_none_is_refused(fragment: int) -> None:
    with pytest.raises(ValueError, match="there is none"):
        fragment_spans({"w": torch.zeros(4)}, fragment=fragment, num_fragments=2)
