"""Pieces of a walker's parameters that are exchanged in turn, and the shards that a piece is cut into.

Fragment k of K is the k-th of K equal ranges of all elements, tensor after tensor in order of their names. So fragments
differ by one element at most, few tensors are cut, and what belongs to one layer is mostly exchanged together: a small
language model learns visibly less where every tensor is cut, for then rows of one matrix are of different times. Which
fragment an element is in depends on the tensors that are held, so on how stages are cut, and not on the members.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Elements [start, stop) of a tensor, counted as if it were a vector."""

    name: str
    start: int
    stop: int


def fragment_spans(tensors: Mapping[str, Tensor], *, fragment: int, num_fragments: int) -> tuple[Span, ...]:
    """The spans of one fragment, in order of names; those without elements are left out.

    Raises:
        ValueError: there is no such fragment.

    >>> fragment_spans({"w": torch.zeros(2, 4), "b": torch.zeros(2)}, fragment=0, num_fragments=2)
    (Span(name='b', start=0, stop=2), Span(name='w', start=0, stop=3))
    """
    if not 0 <= fragment < num_fragments:
        raise ValueError(f"fragment {fragment} of {num_fragments}: there is none")
    num_elements = sum(tensor.numel() for tensor in tensors.values())
    first, end = equal_range(num_elements, part=fragment, num_parts=num_fragments)
    spans, begin = [], 0
    for name in sorted(tensors):
        size = tensors[name].numel()
        start, stop = max(first - begin, 0), min(end - begin, size)
        if start < stop:
            spans.append(Span(name=name, start=start, stop=stop))
        begin += size
    return tuple(spans)


def equal_range(num_elements: int, *, part: int, num_parts: int) -> tuple[int, int]:
    """First element of a part and the first after it; parts differ by one element at most.

    >>> [equal_range(7, part=part, num_parts=3) for part in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    return part * num_elements // num_parts, (part + 1) * num_elements // num_parts


def span_view(tensors: Mapping[str, Tensor], span: Span) -> Tensor:
    """A span as a vector, to be changed in place.

    Raises:
        RuntimeError: the tensor is not contiguous; a copy would lose what is written.
    """
    return tensors[span.name].view(-1)[span.start : span.stop]


def gathered(tensors: Mapping[str, Tensor], spans: Sequence[Span]) -> Tensor:
    """The spans one after the other, as a new vector."""
    if not spans:
        return next(iter(tensors.values())).new_empty(0)
    return torch.cat([span_view(tensors, span) for span in spans])


def views_of(flat: Tensor, spans: Sequence[Span]) -> tuple[Tensor, ...]:
    """Views of what `gathered` has put together, one for each span."""
    return torch.split(flat, [span.stop - span.start for span in spans])


def shards_of(flat: Tensor, num_shards: int) -> list[Tensor]:
    """Views of equal parts, to one element; some are empty if there are fewer elements than shards."""
    cuts = (equal_range(flat.numel(), part=shard, num_parts=num_shards) for shard in range(num_shards))
    return [flat[start:stop] for start, stop in cuts]
