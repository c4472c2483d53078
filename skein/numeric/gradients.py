"""Gradients as one flat vector: laid out, summed, measured and named by content.

Everything here gives the same bits for the same input, whatever the number of threads: sums run in a stated order.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from skein import rng
from skein.numeric.sketch import SKETCH_LENGTH

_ROW = 4096  # one row is summed by one thread, so its sum does not depend on how many there are
_PIECE = 256 * _ROW  # of a sketch, whose sums follow from it
_SQUARED, _SQUARED_ON_GPU = 32 * _ROW, 4096 * _ROW
"""Elements of a squared norm at once: what is in a cache, or what a GPU is busy with for longer than it is asked for.

Rows are summed one by one, so no bit of it follows from that."""
_LEAF = 1 << 24
"""Bytes that one thread hashes at once."""
_MOST_HASHERS = 8
_HASH_BYTES = 16


def flatten(named: Mapping[str, Tensor]) -> Tensor:
    """All tensors one after another, in sorted order of their names, as a new vector of their dtype.

    Raises:
        ValueError: no tensors, or tensors of different dtypes.

    >>> flatten({"b": torch.ones(2), "a": torch.zeros(1, 2)}).tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    tensors = [named[name] for name in sorted(named)]
    if len({tensor.dtype for tensor in tensors}) != 1:
        raise ValueError(f"one dtype is needed, not {sorted({str(tensor.dtype) for tensor in tensors})}")
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of `flat` under the names and shapes of `like`: the inverse of `flatten`, without a copy.

    Raises:
        ValueError: `flat` is not a vector of as many elements as `like` has.
    """
    num_elements = sum(tensor.numel() for tensor in like.values())
    if flat.shape != (num_elements,):
        raise ValueError(
            f"a vector of {num_elements} elements is needed, not one of shape {tuple(flat.shape)}"
        )
    names = sorted(like)
    parts = torch.split(flat, [like[name].numel() for name in names])
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}


def vector_norm(flat: Tensor) -> float:
    """The root of `squared_norm`."""
    return math.sqrt(squared_norm(flat))


def squared_norm(flat: Tensor) -> float:
    """The sum of squares of a vector, squared and accumulated in float64, in an order that its length fixes.

    Not finite if an element is not, or if the sum exceeds float64 (never for float32 input).
    """
    sums: list[float] = []
    for piece in torch.split(flat.detach(), _SQUARED if flat.device.type == "cpu" else _SQUARED_ON_GPU):
        squares = piece.to(torch.float64, copy=True).square_()
        num_whole = squares.numel() // _ROW * _ROW
        sums += squares[:num_whole].view(-1, _ROW).sum(dim=1).tolist()
        sums.append(float(squares[num_whole:].sum()))
    total = sum(sums)
    return math.fsum(sums) if math.isfinite(total) else total


def is_finite(flat: Tensor) -> bool:
    """Whether no element is infinite or not a number, in one pass and without a temporary of its size."""
    if not flat.numel():
        return True
    low, high = torch.aminmax(flat.detach())
    return math.isfinite(low.item()) and math.isfinite(high.item())


def digest(flat: Tensor) -> str:
    """32 hexadecimal digits (BLAKE2b, 128 bits) over a vector's bytes; read in place on the CPU.

    More than 16 MiB are the leaves of a tree, of 16 MiB each, which several threads hash; a GPU's come to the host leaf
    by leaf. Equal vectors have equal digests except that -0.0 is not 0.0 here.

    Raises:
        ValueError: the tensor is not contiguous.

    Source: Aumasson et al., "BLAKE2: simpler, smaller, fast as MD5" (2013), Section 2.10, with a root over all leaves.
    """
    if not flat.is_contiguous():
        raise ValueError("only a contiguous tensor has bytes in order")
    leaves = torch.split(flat.detach().reshape(-1).view(torch.uint8), _LEAF)
    if len(leaves) == 1:
        return hashlib.blake2b(_bytes_of(leaves[0]), digest_size=_HASH_BYTES).hexdigest()

    def hashed(place: int) -> bytes:
        is_last = place == len(leaves) - 1
        leaf = _in_tree(_bytes_of(leaves[place]), node_offset=place, node_depth=0, last_node=is_last)
        return leaf.digest()

    with ThreadPoolExecutor(min(len(leaves), _MOST_HASHERS)) as hashers:
        hashes = b"".join(hashers.map(hashed, range(len(leaves))))
    return _in_tree(hashes, node_offset=0, node_depth=1, last_node=True).hexdigest()


def _bytes_of(leaf: Tensor) -> memoryview:
    return leaf.cpu().numpy().data


_in_tree = partial(
    hashlib.blake2b,
    digest_size=_HASH_BYTES,
    fanout=0,  # as many leaves as there are
    depth=2,
    leaf_size=_LEAF,
    inner_size=_HASH_BYTES,
)


def sketch(named: Mapping[str, Tensor], seed: int) -> tuple[float, ...]:
    """`SKETCH_LENGTH` random projections of tensors: each element, with a sign of its own, is added to one of them.

    Sketches are linear, so they add up over any cut into stages, and their squared norm is that of the tensors in the
    mean. Signs follow from the seed, the tensor's name and the element's place, on every device alike.

    Source: Charikar, Chen and Farach-Colton, "Finding frequent items in data streams" (2002), with places in turn.
    """
    total = torch.zeros(SKETCH_LENGTH, dtype=torch.float64)
    for name in sorted(named):
        key = rng.key(seed, name) >> 2
        for start, piece in enumerate(torch.split(named[name].detach().reshape(-1), _PIECE)):
            signed = _signs(piece, key + start * _PIECE).mul_(piece)
            padded = torch.nn.functional.pad(signed, (0, -signed.numel() % SKETCH_LENGTH))
            total += padded.view(-1, SKETCH_LENGTH).sum(dim=0).cpu()
    return tuple(total.tolist())


def _signs(like: Tensor, first: int) -> Tensor:
    """A sign for each of these elements, of which the first has this number: +1 or -1 in float64, as if by chance."""
    at = torch.arange(like.numel(), dtype=torch.int64, device=like.device) + first
    # Two rounds of a multiplicative hash: products wrap around at 64 bits.
    for factor, shift in ((-7046029254386353131, 32), (-4417276706812531889, 29)):
        at = at * factor
        at ^= at >> shift
    return (at & 2).to(torch.float64).sub_(1.0)


def shard_bounds(num_elements: int, num_shards: int) -> tuple[tuple[int, int], ...]:
    """Begin and end of each shard of a vector; sizes differ by at most one, the longer ones come first.

    Raises:
        ValueError: fewer than one shard or fewer than no elements.

    >>> shard_bounds(10, 4)
    ((0, 3), (3, 6), (6, 8), (8, 10))
    """
    if num_shards < 1 or num_elements < 0:
        raise ValueError(f"{num_elements} elements cannot be cut into {num_shards} shards")
    size, longer = divmod(num_elements, num_shards)
    starts = [index * size + min(index, longer) for index in range(num_shards + 1)]
    return tuple(pairwise(starts))


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """((parts[0] + parts[1]) + parts[2]) + ... as a new tensor, in the dtype of the parts; none is changed.

    Addition of floats does not associate: all who sum the same parts in the same order get the same bits.

    Raises:
        ValueError: no parts, or parts of different shapes or dtypes.
    """
    if len({(part.shape, part.dtype) for part in parts}) != 1:
        raise ValueError(f"parts of one shape and dtype are needed: {[(p.shape, p.dtype) for p in parts]}")
    total = parts[0].detach().clone()
    for part in parts[1:]:
        total.add_(part)
    return total
