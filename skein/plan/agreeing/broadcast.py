"""Trees that bring one walker's parameters to all others soonest: along fast links, in pieces that follow each other.

A member that has a piece sends it on while the next one comes. A sender has one uplink: it sends one piece to one
child at a time, so many children cost as much as a slow link. Members are places in the order of the matrices.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, islice

from skein.topology.links import F64

Tree = tuple[tuple[int, int], ...]
"""(member, parent) for everyone but the leader, sorted by member; parents send to their children in that order."""
Arrival = tuple[float, float]
"""Seconds at which the first piece is there, and the last."""

_MOST_VISITED = 8_000
"""Members that the search for a better tree may visit: it takes some ten milliseconds."""
_WORK = 0.01
"""Weight of a second of one link's time beside a second of waiting, shared among the members."""
_GAIN = 1e-9
"""A change that saves a smaller share of the time is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BroadcastProblem:
    """`num_bytes` of the leader to all members, in `num_pieces` equal pieces, over links as measured.

    `latency_s` and `bytes_per_s` are (num_members, num_members), row sends to column.
    """

    leader: int
    latency_s: F64
    bytes_per_s: F64
    num_bytes: float
    num_pieces: int = 16
    _latency_s: tuple[tuple[float, ...], ...] = field(init=False, repr=False)
    _piece_s: tuple[tuple[float, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n = len(self.latency_s)
        if self.latency_s.shape != (n, n) or self.bytes_per_s.shape != (n, n):
            raise ValueError(f"square matrices are needed: {self.latency_s.shape}, {self.bytes_per_s.shape}")
        if not 0 <= self.leader < n or self.num_pieces < 1:
            raise ValueError(f"leader {self.leader} of {n} members, {self.num_pieces} pieces")
        # Python's own numbers: the search looks at single ones, by the thousand.
        piece_s = self.num_bytes / self.num_pieces / self.bytes_per_s
        object.__setattr__(self, "_latency_s", tuple(map(tuple, self.latency_s.tolist())))
        object.__setattr__(self, "_piece_s", tuple(map(tuple, piece_s.tolist())))

    @property
    def members(self) -> range:
        return range(len(self.latency_s))

    def seconds(self, tree: Tree) -> float:
        """Seconds from the start until the last member has the last piece.

        Raises:
            ValueError: the tree does not reach every member.
        """
        found = self._arrivals_s(dict(tree))
        if len(found) != len(self.members):
            raise ValueError(f"the tree reaches {sorted(found)} of {len(self.members)} members")
        return max(last_s for _, last_s in found.values())

    def _arrivals_s(self, parent_by_member: Mapping[int, int]) -> dict[int, Arrival]:
        """Seconds at which each member that the leader reaches has its first piece and its last; others come evenly."""
        children = defaultdict(list)
        for member in sorted(parent_by_member):
            children[parent_by_member[member]].append(member)
        found: dict[int, Arrival] = {self.leader: (0.0, 0.0)}
        waiting = [self.leader]
        while waiting:
            sender = waiting.pop()
            found.update(self._sent_s(sender, found[sender], children[sender]))
            waiting += children[sender]
        return found

    def _sent_s(self, sender: int, has_s: Arrival, children: list[int]) -> Iterator[tuple[int, Arrival]]:
        """First and last arrival at each child: piece by piece, child by child, one at a time.

        Pieces leave as they come, or as fast as the uplink serves all children, whichever is slower.
        """
        first_s, last_s = has_s
        takes_s = [self._piece_s[sender][child] for child in children]
        last_s = max(last_s, first_s + (self.num_pieces - 1) * sum(takes_s))
        for child, after_s in zip(children, accumulate(takes_s), strict=True):
            after_s += self._latency_s[sender][child]
            yield child, (first_s + after_s, last_s + after_s)

    # --- trees ---

    def star(self) -> Tree:
        """The leader sends to everyone itself."""
        return tuple((member, self.leader) for member in self.members if member != self.leader)

    def chain(self) -> Tree:
        """Each sends to whoever it reaches soonest of those left."""
        at, left, found = self.leader, set(self.members) - {self.leader}, {}
        while left:
            nearest = min(left, key=lambda member: (self._link_s(at, member), member))
            found[nearest] = at
            left.remove(nearest)
            at = nearest
        return tuple(sorted(found.items()))

    def grown(self) -> Tree:
        """Member by member, each where it has everything soonest given what its parent sends already."""
        found: dict[int, int] = {}
        has_s, busy_s = {self.leader: 0.0}, {self.leader: 0.0}
        while len(has_s) < len(self.members):
            pairs = ((at, to) for at in sorted(has_s) for to in self.members if to not in has_s)
            end_s, at, to = min((self._end_s(at, to, has_s, busy_s), at, to) for at, to in pairs)
            found[to] = at
            busy_s[at] += self.num_pieces * self._piece_s[at][to]
            has_s[to], busy_s[to] = end_s, 0.0
        return tuple(sorted(found.items()))

    def _end_s(self, at: int, to: int, has_s: Mapping[int, float], busy_s: Mapping[int, float]) -> float:
        """About when `to` would have everything: the uplink's work, or a piece after its parent."""
        takes_s = busy_s[at] + self.num_pieces * self._piece_s[at][to]
        return self._latency_s[at][to] + max(takes_s, has_s[at] + takes_s / self.num_pieces)

    def _link_s(self, at: int, to: int) -> float:
        return self._latency_s[at][to] + self.num_pieces * self._piece_s[at][to]

    def tree(self) -> Tree:
        """The best tree found: that of star, chain and a grown one, with subtrees moved as long as that helps.

        No slower than star and chain. The search is a short one: leaders change.
        """
        plain = (self.star(), self.chain())
        best = min((*plain, self.grown()), key=self._cost_s)
        num_left = _MOST_VISITED // len(self.members)
        while num_left > 0:
            better, num_tried = self._improved(best, num_left)
            if better is None:
                break
            best, num_left = better, num_left - num_tried
        return self._soonest((best, *plain))

    def _improved(self, tree: Tree, most: int) -> tuple[Tree | None, int]:
        """The first better one of at most so many trees that differ by one subtree, and how many were tried.

        Only what hangs on the way to the last member can hold that up.
        """
        on_the_way = {self.leader, *_upwards(self._last(tree), dict(tree))}
        tops = [member for member, parent in tree if parent in on_the_way]
        enough_s = self._cost_s(tree) * (1 - _GAIN)
        others = islice((other for top in tops for other in self._with_moved(top, tree)), most)
        num_tried = 0
        for num_tried, other in enumerate(others, start=1):
            if self._cost_s(other) < enough_s:
                return other, num_tried
        return None, num_tried

    def _with_moved(self, top: int, tree: Tree) -> Iterator[Tree]:
        """Trees in which the subtree of `top`, entered by any of its members, hangs under any other parent."""
        parents, below = dict(tree), _below(top, tree)
        for entry in sorted(below):
            way = list(_upwards(entry, parents, until=top))
            turned = parents | dict(zip(way[1:], way, strict=False))
            for parent in self.members:
                if parent not in below:
                    yield tuple(sorted((turned | {entry: parent}).items()))

    def _cost_s(self, tree: Tree) -> float:
        """Seconds until the last member is done, and a little for what links carry: of trees as fast the cheapest."""
        work_s = self.num_pieces * sum(self._piece_s[parent][member] for member, parent in tree)
        return self.seconds(tree) + _WORK * work_s / len(self.members)

    def _last(self, tree: Tree) -> int:
        found = self._arrivals_s(dict(tree))
        return min(found, key=lambda member: (-found[member][1], member))

    def _soonest(self, trees: Iterable[Tree]) -> Tree:
        return min(trees, key=self.seconds)


def _below(member: int, tree: Tree) -> set[int]:
    """A member and everyone it reaches."""
    children = defaultdict(list)
    for child, parent in tree:
        children[parent].append(child)
    found, waiting = set[int](), [member]
    while waiting:
        at = waiting.pop()
        found.add(at)
        waiting += children[at]
    return found


def _upwards(member: int, parents: Mapping[int, int], until: int | None = None) -> Iterator[int]:
    """A member and its ancestors below the leader, no further than `until`."""
    while member in parents:
        yield member
        if member == until:
            return
        member = parents[member]


def parents_of(tree: Tree, leader: int) -> tuple[int, ...]:
    """Each member's parent by place, the leader's is itself.

    >>> parents_of(((0, 1), (2, 0)), 1)
    (1, 1, 0)
    """
    parent_by_member = {leader: leader, **dict(tree)}
    return tuple(parent_by_member[member] for member in sorted(parent_by_member))
