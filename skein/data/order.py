"""Shuffled order with random access: which sample stands at a position, without a list of all samples.

Each epoch is a pseudo-random permutation computed where it is asked for: a Feistel network over a rectangle of
about `num_samples` cells, walked until it lands on a sample. Memory and time do not depend on `num_samples`.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from skein import rng

_ROUNDS = 8  # four give a pseudo-random permutation (Luby and Rackoff); small domains mix better with more
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]


def _mixed(x: U64) -> U64:
    """The finaliser of SplitMix64: 64 bits in, 64 scattered bits out."""
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> _LAST_SHIFT)


def _round_keys(key: int) -> U64:
    return _mixed(np.uint64(key) + _GOLDEN * np.arange(1, _ROUNDS + 1, dtype=np.uint64))


def _feistel(x: U64, keys: U64, rows: np.uint64, columns: np.uint64) -> U64:
    """Each element of `x` in [0, rows * columns) moved to its place in one permutation of that range."""
    row, column = x // columns, x % columns
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        row = (row + _mixed(column ^ even) % rows) % rows
        column = (column + _mixed(row ^ odd) % columns) % columns
    return row * columns + column


def permuted(x: ArrayLike, *, size: int, key: int) -> I64:
    """Place of each element of `x` under the permutation of [0, size) that `key` names.

    Args:
        x: integers in [0, size), any shape.
        size: how many things are permuted, 1 to 2**62.
        key: 64 bits, for instance from `skein.rng.key`.

    Raises:
        ValueError: an element lies outside [0, size).

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002): their generalised Feistel network on a
    rectangle just larger than the domain, made exact by their cycle walking. The rectangle has fewer than
    sqrt(size) + 1 cells too many, which bounds the walk.

    >>> sorted(permuted(range(10), size=10, key=7).tolist()) == list(range(10))
    True
    """
    places = np.asarray(x, dtype=np.int64)
    if places.size and (places.min() < 0 or places.max() >= size):
        raise ValueError(f"positions {places.min()} to {places.max()} do not lie in [0, {size})")
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys, walking = _round_keys(key), places.reshape(-1).astype(np.uint64)
    out, where = np.empty(places.size, np.int64), np.arange(places.size)
    while where.size:
        walking = _feistel(walking, keys, np.uint64(rows), np.uint64(columns))
        home = walking < size
        out[where[home]] = walking[home].astype(np.int64)
        where, walking = where[~home], walking[~home]
    return out.reshape(places.shape)


def shuffled_indices(positions: ArrayLike, *, num_samples: int, seed: int) -> I64:
    """`shuffled_index` of many positions at once, in their shape.

    >>> positions = np.arange(6)
    >>> several = shuffled_indices(positions, num_samples=4, seed=1)
    >>> several.tolist() == [shuffled_index(int(p), num_samples=4, seed=1) for p in positions]
    True
    """
    places = np.asarray(positions, dtype=np.int64)
    epochs, within = np.divmod(places, num_samples)
    out = np.empty(places.shape, np.int64)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        out[chosen] = permuted(within[chosen], size=num_samples, key=rng.key(seed, "order", epoch))
    return out


def shuffled_index(position: int, *, num_samples: int, seed: int) -> int:
    """The sample at `position` of an endless sequence of epochs, each a permutation of its own.

    Args:
        position: 0-based; epoch `position // num_samples`.
        num_samples: samples in one epoch, at least 1.
        seed: names the sequence.

    >>> epoch = [shuffled_index(p, num_samples=5, seed=3) for p in range(5)]
    >>> sorted(epoch)
    [0, 1, 2, 3, 4]
    """
    return int(shuffled_indices(position, num_samples=num_samples, seed=seed))
