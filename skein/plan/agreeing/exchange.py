"""Ways of shards inside a group, and how long an exchange along them takes.

Rules of this file
- A *place* is a position in `Group.workers`: each worker of the group once, however many of its chunks are members.
- Parts of a shard go to its owner along one tree (`sum_target`), its result leaves along another (`result_source`); a
  pattern is a choice of both, for every shard. All is a pure function, so nobody has to be told.
- Along Ring and Tree sums are made on the way: only rules whose parts can be added up may use them, and only where
  they travel as they are added. A wire format that rounds, or a combination that is no sum, wants all parts at the
  owner: Direct.
"""

import math
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import numpy.typing as npt

from skein.config.rule import PatternName
from skein.topology.links import F64

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """Each part goes to the shard's owner, which sends the result to all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Sums grow along the ring of places, from behind the owner round to it; then results go round the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Sums go up a tree to the owner, results down: few hops one after the other, little to do for each.

    `parents[place]` is the next place towards the root, the root's itself; the tree is turned so that each shard's
    owner is on top. None given: a binary one over places in order, from the owner on.
    """

    parents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Shard i is place i's alone: it takes the parts that row i of `Group.weights` names, and keeps the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """The vector of place `leader` goes down the tree of `parents` (its own is itself), passed on shard by shard."""

    leader: int
    parents: tuple[int, ...]


Pattern = Direct | Ring | Tree | Neighbours | Broadcast
DIRECT = Direct()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Parts that make a shard, in order of summation: positions in `Group.members`, each with its weight."""

    members: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def pairs(self) -> tuple[tuple[int, float], ...]:
        """Each member with its weight."""
        return tuple(zip(self.members, self.weights, strict=True))


def is_tree(parents: tuple[int, ...], num_places: int) -> bool:
    """Whether `parents` may be those of a Tree; none at all may.

    >>> is_tree((1, 1, 1), 3), is_tree((1, 2, 0), 3), is_tree((0, 1), 2), is_tree((0,), 2)
    (True, False, False, False)
    """
    if not parents:
        return True
    if len(parents) != num_places or not all(0 <= parent < num_places for parent in parents):
        return False
    ends = set(range(num_places))
    for _ in range(num_places):
        ends = {parents[end] for end in ends}
    return len(ends) == 1 and all(parents[end] == end for end in ends)


def owning_place(pattern: Pattern, num_places: int, shard: int) -> int:
    """The place that makes a shard's result."""
    return pattern.leader if isinstance(pattern, Broadcast) else shard % num_places


def sum_target(pattern: Pattern, num_places: int, owner: int, place: int) -> int:
    """Place to which `place` sends its part of a shard, or what it has summed up; the owner keeps it.

    >>> [sum_target(Ring(), 4, 1, place) for place in range(4)], [sum_target(Tree(), 4, 1, place) for place in range(4)]
    ([1, 1, 3, 0], [2, 1, 1, 1])
    """
    if place == owner:
        return owner
    match pattern:
        case Ring():
            return (place + 1) % num_places
        case Tree():
            return _parent(pattern.parents, num_places, owner, place)
        case Direct() | Neighbours() | Broadcast():
            return owner
        case _:
            assert_never(pattern)


def result_source(pattern: Pattern, num_places: int, owner: int, place: int) -> int | None:
    """Place that sends `place` a shard's result; itself for the owner, None if it does not want it."""
    if place == owner:
        return owner
    match pattern:
        case Ring():
            return (place - 1) % num_places
        case Tree():
            return _parent(pattern.parents, num_places, owner, place)
        case Broadcast():
            return pattern.parents[place]
        case Direct():
            return owner
        case Neighbours():
            return None
        case _:
            assert_never(pattern)


def sum_sources(pattern: Ring | Tree, num_places: int, owner: int, place: int) -> tuple[int, ...]:
    """Places that send sums or parts to `place`, in the order in which they are added; its own part comes last."""
    if isinstance(pattern, Ring):
        before = (place - 1) % num_places
        return () if before == owner else (before,)
    if not pattern.parents:
        at = (place - owner) % num_places
        return tuple((x + owner) % num_places for x in (2 * at + 1, 2 * at + 2) if x < num_places)
    others = (other for other in range(num_places) if other != place)
    return tuple(x for x in others if sum_target(pattern, num_places, owner, x) == place)


def result_targets(pattern: Pattern, num_places: int, owner: int, place: int) -> tuple[int, ...]:
    """To whom `place` passes a shard's result on."""
    match pattern:
        case Ring():
            after = (place + 1) % num_places
            return () if after == owner else (after,)
        case Tree():
            return sum_sources(pattern, num_places, owner, place)
        case Broadcast():
            return tuple(x for x, at in enumerate(pattern.parents) if at == place and x != place)
        case Direct():
            return tuple(x for x in range(num_places) if x != owner) if place == owner else ()
        case Neighbours():
            return ()
        case _:
            assert_never(pattern)


def _parent(parents: tuple[int, ...], num_places: int, owner: int, place: int) -> int:
    """The next place towards `owner`: the parent, except on the way from the owner up to the tree's own root."""
    if not parents:
        return (((place - owner) % num_places - 1) // 2 + owner) % num_places
    at = owner
    while at != parents[at]:
        if parents[at] == place:
            return at
        at = parents[at]
    return parents[place]


# --- what it costs ---


def exchange_s(
    pattern: Pattern, num_shards: int, num_bytes: float, latency_s: F64, bytes_per_s: F64
) -> float:
    """Seconds until all have the results of a vector of `num_bytes`, cut into equal shards.

    Sums first, then results. Each phase takes the latencies of its longest way, and then as long as the largest of: a
    shard along its way, and all that one worker sends, or receives, over links that carry one shard at a time. So
    Direct is 2 (l + (W - 1) N / W / b) over equal links of W workers, Ring 2 (W - 1) (l + N / W / b).

    Args:
        pattern: not Neighbours: what those send depends on their weights.
        num_shards: of the vector.
        num_bytes: of the vector, as it travels.
        latency_s: (num_places, num_places), seconds, zero diagonal; row sends to column.
        bytes_per_s: same shape, bytes per second, infinite diagonal.
    """
    num_places = len(latency_s)
    owners = [owning_place(pattern, num_places, shard) for shard in range(num_shards)]
    # Shards of one owner take the same way: each way once, with how many shards go it.
    distinct, count = np.unique(np.array(owners, dtype=np.int64), return_counts=True)
    piece_s = num_bytes / num_shards / bytes_per_s
    down = _ways(pattern, num_places, distinct, for_results=True)
    total_s = _phase_s(down, count, latency_s.T, piece_s.T)
    if not isinstance(pattern, Broadcast):
        up = _ways(pattern, num_places, distinct, for_results=False)
        total_s += _phase_s(up, count, latency_s, piece_s)
    return total_s


def cheapest(num_shards: int, num_bytes: float, latency_s: F64, bytes_per_s: F64) -> Direct | Ring | Tree:
    """The pattern that sums a vector soonest, by `exchange_s`; of equal ones Direct, then Tree."""
    patterns: tuple[Direct | Ring | Tree, ...] = (DIRECT, Tree(), Ring())
    if len(latency_s) < 3:
        return patterns[0]
    cost_s = [exchange_s(pattern, num_shards, num_bytes, latency_s, bytes_per_s) for pattern in patterns]
    # A margin, for sums of the same terms in another order are not a reason.
    return patterns[next(i for i, x in enumerate(cost_s) if x <= min(cost_s) * (1 + 1e-9))]


def pattern_called(
    name: PatternName, num_shards: int, num_bytes: int, latency_s: F64, bytes_per_s: F64
) -> Direct | Ring | Tree:
    """The pattern that a job file calls so; "auto" is the cheapest, by the arguments of `cheapest`."""
    match name:
        case "direct":
            return DIRECT
        case "ring":
            return Ring()
        case "tree":
            return Tree()
        case "auto":
            return cheapest(num_shards, num_bytes, latency_s, bytes_per_s)
        case _:
            assert_never(name)


def _ways(pattern: Pattern, num_places: int, owners: I64, *, for_results: bool) -> I64:
    """(num_owners, num_places): from each place the next towards the owner, the way its shard's sums or results go."""
    places = np.arange(num_places, dtype=np.int64)[None, :]
    tops = owners[:, None]
    match pattern:
        case Ring():
            ways = (places + (-1 if for_results else 1)) % num_places
        case Tree(parents=()):
            ways = (((places - tops) % num_places - 1) // 2 + tops) % num_places
        case Direct():
            ways = np.broadcast_to(tops, (len(owners), num_places))
        case _:
            following = _result_way if for_results else sum_target
            ways = np.array(
                [[following(pattern, num_places, int(top), x) for x in range(num_places)] for top in owners]
            )
    return np.where(places == tops, tops, ways)


def _result_way(pattern: Pattern, num_places: int, owner: int, place: int) -> int:
    source = result_source(pattern, num_places, owner, place)
    return place if source is None else source


def _phase_s(ways: I64, count: I64, latency_s: F64, piece_s: F64) -> float:
    """Seconds until all that goes along `ways` has arrived; row is the further from the owner."""
    num_places = ways.shape[1]
    places = np.arange(num_places)[None, :]
    hop_s = piece_s[places, ways]
    busy_s = hop_s * count[:, None]
    outer_s = busy_s.sum(axis=0)
    inner_s = np.bincount(ways.ravel(), weights=busy_s.ravel(), minlength=num_places)
    busiest_s = max(outer_s.max(), inner_s.max())
    return float(_longest(ways, latency_s[places, ways]) + max(_longest(ways, hop_s), busiest_s))


def _longest(ways: I64, hop: F64) -> float:
    """The largest sum of hops from any place to the top."""
    num_doublings = max(1, math.ceil(math.log2(ways.shape[1])))
    for _ in range(num_doublings):
        hop = hop + np.take_along_axis(hop, ways, axis=1)
        ways = np.take_along_axis(ways, ways, axis=1)
    return float(hop.max())
