"""The ops of a microbatch, one row for each kind: what it takes and gives, what it does to slots and sums, its cost.

Rules of this file
- Whoever asks what follows what, what an op waits for, frees or adds to, or what it costs, asks these rows, or
  `path_ops`, which lays them out along a path. A new kind is a row here, and its deed where ops are carried out.
- A path's ops are a graph: each waits for those whose outputs it takes. They are numbered so that every op comes after
  what it waits for; a microbatch's ops may be taken in that order wherever a single line of them is wanted.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Direction(StrEnum):
    """Direction of a boundary tensor: an activation to the next hop, or a gradient to the one before."""

    FORWARD = "forward"
    BACKWARD = "backward"

    def takers(self, hop: int, num_hops: int) -> tuple[int, ...]:
        """Hops that take such a tensor of `hop`; none where a path of so many hops ends that way.

        >>> Direction.FORWARD.takers(0, 3), Direction.BACKWARD.takers(0, 3)
        ((1,), ())
        """
        return _beside(hop, 1 if self is Direction.FORWARD else -1, num_hops)

    def makers(self, hop: int, num_hops: int) -> tuple[int, ...]:
        """Hops whose tensors of this direction `hop` takes; none where a path begins that way."""
        return _beside(hop, -1 if self is Direction.FORWARD else 1, num_hops)


def _beside(hop: int, step: int, num_hops: int) -> tuple[int, ...]:
    return (hop + step,) if 0 <= hop + step < num_hops else ()


class Kept(StrEnum):
    """Data that an op leaves at its chunk for a later op of the same microbatch."""

    GRAPH = "graph"
    PENDING = "pending"
    """Weight gradients that are put aside."""


class ChunkOrder(StrEnum):
    """The two strict orders of a chunk: of the ops that take a slot, and of those that add to its gradient."""

    SLOTS = "slots"
    SUMS = "sums"


_Seconds = TypeVar("_Seconds", float, "npt.NDArray[np.float64]")


WEIGHT_SHARE = 1 / 3
"""Share of a backward that weight gradients take where it was not measured; the rest is attention, norms and the way
back (`bench split`)."""


class Cost(StrEnum):
    """Kind of seconds that an op takes, of those known of a chunk: LOSS is both passes, unless measured by itself.

    INPUT and WEIGHT are a BACKWARD between them, LOSS_INPUT and WEIGHT a LOSS.
    """

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    INPUT = "input"
    WEIGHT = "weight"
    LOSS_INPUT = "loss_input"

    @property
    def whole(self) -> "Cost":
        """The kind of seconds that these are a part of, or are."""
        return _WHOLE.get(self, self)

    def seconds(
        self,
        forward_s: _Seconds,
        backward_s: _Seconds,
        loss_s: _Seconds | None = None,
        weight_s: _Seconds | None = None,
    ) -> _Seconds:
        """The op's seconds; a loss that was not measured is its chunk's forward and backward.

        Of a backward, weight gradients take `weight_s`.
        """
        weights_s = backward_s * WEIGHT_SHARE if weight_s is None else weight_s
        both_s = forward_s + backward_s if loss_s is None else loss_s
        match self:
            case Cost.FORWARD:
                return forward_s
            case Cost.LOSS:
                return both_s
            case Cost.LOSS_INPUT:
                return both_s - weights_s
            case Cost.INPUT:
                return backward_s - weights_s
            case Cost.WEIGHT:
                return weights_s
            case Cost.BACKWARD:
                return backward_s


_WHOLE = {Cost.INPUT: Cost.BACKWARD, Cost.WEIGHT: Cost.BACKWARD, Cost.LOSS_INPUT: Cost.LOSS}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """Properties of a kind of op.

    Args:
        letter: in plan files and pictures.
        words: for people.
        is_last: it is done at the last hop of a path (True), or at hops before that (False); None: at any.
        scores: it makes the microbatch's loss.
        is_split: it is done where a backward is split (True), or where it is whole (False); None: at both.
        takes: the boundary tensor that it waits for, if any; where its path begins there is none.
        gives: the boundary tensor that it makes, for which the neighbouring hop waits.
        uses: what it waits for at its own chunk, and uses up.
        leaves: what it leaves at its own chunk.
        slots: how many slots of its chunk it takes (1), or gives back (-1).
        is_accumulating: its end is the microbatch's contribution to the chunk's gradient.
        cost: whose seconds it takes.
        urgency: of what is ready, the least goes first where no order is given.
    """

    letter: str
    words: str
    is_last: bool | None = False
    scores: bool = False
    is_split: bool | None = None
    takes: Direction | None = None
    gives: Direction | None = None
    uses: Kept | None = None
    leaves: Kept | None = None
    slots: int = 0
    is_accumulating: bool = False
    cost: Cost
    urgency: int

    @property
    def lane(self) -> ChunkOrder | None:
        """The order of its chunk that it keeps to; None: it begins as soon as what it waits for is there."""
        if self.is_accumulating:
            return ChunkOrder.SUMS
        return ChunkOrder.SLOTS if self.slots > 0 else None

    @property
    def is_onward(self) -> bool:
        """Whether it takes or gives a boundary tensor: such ops are a microbatch's way there and back."""
        return self.takes is not None or self.gives is not None

    def is_shown_by(self, held: Collection[Kept]) -> bool:
        """Whether what is held at the op's chunk of its microbatch says that it is done there."""
        leaves = self.leaves
        return leaves is not None and (
            leaves in held or any(x.row.is_shown_by(held) for x in OpKind if x.row.uses is leaves)
        )


class OpKind(StrEnum):
    """Kind of work on a microbatch: LOSS is the last hop of a path, forward and backward in one.

    INPUT and WEIGHT are a split backward: the gradient for the hop before, then all weight gradients at once.
    LOSS_INPUT and WEIGHT are the same of a LOSS.
    """

    row: OpRow

    FORWARD = (
        "forward",
        OpRow(
            letter="F",
            words="forward",
            takes=Direction.FORWARD,
            gives=Direction.FORWARD,
            leaves=Kept.GRAPH,
            slots=1,
            cost=Cost.FORWARD,
            urgency=2,
        ),
    )
    LOSS = (
        "loss",
        OpRow(
            letter="L",
            words="loss",
            is_last=True,
            scores=True,
            is_split=False,
            takes=Direction.FORWARD,
            gives=Direction.BACKWARD,
            is_accumulating=True,
            cost=Cost.LOSS,
            urgency=1,
        ),
    )
    BACKWARD = (
        "backward",
        OpRow(
            letter="B",
            words="backward",
            is_split=False,
            takes=Direction.BACKWARD,
            gives=Direction.BACKWARD,
            uses=Kept.GRAPH,
            slots=-1,
            is_accumulating=True,
            cost=Cost.BACKWARD,
            urgency=0,
        ),
    )
    INPUT = (
        "input",
        OpRow(
            letter="I",
            words="input gradient",
            is_split=True,
            takes=Direction.BACKWARD,
            gives=Direction.BACKWARD,
            uses=Kept.GRAPH,
            leaves=Kept.PENDING,
            cost=Cost.INPUT,
            urgency=0,
        ),
    )
    WEIGHT = (
        "weight",
        OpRow(
            letter="W",
            words="weight gradient",
            is_last=None,
            is_split=True,
            uses=Kept.PENDING,
            slots=-1,
            is_accumulating=True,
            cost=Cost.WEIGHT,
            # Nobody waits for it but the step's end, and whoever needs its slot.
            urgency=3,
        ),
    )
    LOSS_INPUT = (
        "loss_input",
        OpRow(
            letter="J",
            words="loss and input gradient",
            is_last=True,
            scores=True,
            is_split=True,
            takes=Direction.FORWARD,
            gives=Direction.BACKWARD,
            leaves=Kept.PENDING,
            slots=1,
            cost=Cost.LOSS_INPUT,
            urgency=1,
        ),
    )

    def __new__(cls, value: str, row: OpRow) -> "OpKind":
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.row = row
        return kind


class PathOp(NamedTuple):
    """An op of a path, by its number: where it is done, and the numbers of what it waits for and what waits for it.

    `inputs` make the boundary tensors that it takes, `own` what it uses at its own chunk.
    """

    number: int
    kind: OpKind
    hop: int
    inputs: tuple[int, ...]
    own: tuple[int, ...]
    followers: tuple[int, ...]

    @property
    def awaited(self) -> tuple[int, ...]:
        """Ops that end before this one begins."""
        return self.inputs + self.own


COSTS = tuple(Cost)
"""In the order of their rows in arrays."""

_Place = tuple[OpKind, int]
"""A kind and the hop at which it is done."""


@cache
def kinds_at(*, is_last: bool, is_split: bool = False) -> tuple[OpKind, ...]:
    """The kinds that are done at a path's last hop, or at one before, where the backward is split or whole."""
    return tuple(x for x in OpKind if x.row.is_last in (None, is_last) and x.row.is_split in (None, is_split))


@cache
def path_ops(num_hops: int, split: tuple[int, ...] = ()) -> tuple[PathOp, ...]:
    """All ops of a path of so many hops, each after those that it waits for.

    Args:
        num_hops: the last of them has the loss.
        split: hops whose backward is an input op and a weight op.

    >>> [f"{op.kind.row.letter}{op.hop}" for op in path_ops(3)]
    ['F0', 'F1', 'L2', 'B1', 'B0']
    >>> path_ops(3)[3].inputs, path_ops(3)[3].own, path_ops(3)[1].followers
    ((2,), (1,), (2, 3))
    >>> [f"{op.kind.row.letter}{op.hop}" for op in path_ops(3, split=(1,))]
    ['F0', 'F1', 'L2', 'I1', 'B0', 'W1']
    """
    at = [kinds_at(is_last=hop == num_hops - 1, is_split=hop in split) for hop in range(num_hops)]
    places = [(kind, hop) for kind in OpKind for hop in range(num_hops) if kind in at[hop]]
    makers: defaultdict[tuple[int, Direction | Kept | None], list[_Place]] = defaultdict(list)
    for kind, hop in places:
        makers[hop, kind.row.gives].append((kind, hop))
        makers[hop, kind.row.leaves].append((kind, hop))
    inputs = {
        (x, hop): [
            maker
            for source in (x.row.takes.makers(hop, num_hops) if x.row.takes else ())
            for maker in makers[source, x.row.takes]
        ]
        for x, hop in places
    }
    own = {(x, hop): makers[hop, x.row.uses] if x.row.uses else [] for x, hop in places}
    followers: defaultdict[_Place, list[_Place]] = defaultdict(list)
    for place in places:
        for awaited in (*inputs[place], *own[place]):
            followers[awaited].append(place)
    number = _numbered({place: len(inputs[place]) + len(own[place]) for place in places}, followers)
    return tuple(
        PathOp(
            number=at,
            kind=place[0],
            hop=place[1],
            inputs=tuple(number[x] for x in inputs[place]),
            own=tuple(number[x] for x in own[place]),
            followers=tuple(sorted(number[x] for x in followers[place])),
        )
        for place, at in number.items()
    )


@cache
def taker_of(direction: Direction, *, is_last: bool, is_split: bool) -> OpKind | None:
    """The kind of op that takes such a boundary tensor at such a hop; None: none does."""
    kinds = kinds_at(is_last=is_last, is_split=is_split)
    return next((x for x in kinds if x.row.takes is direction), None)


@cache
def linked_hops(num_hops: int, split: tuple[int, ...] = ()) -> tuple[tuple[int, int], ...]:
    """Pairs of hops between which a path's boundary tensors go, there or back, each once and the lower first.

    >>> linked_hops(3)
    ((0, 1), (1, 2))
    """
    ops = path_ops(num_hops, split)
    pairs = (sorted((ops[maker].hop, op.hop)) for op in ops for maker in op.inputs)
    return tuple(dict.fromkeys((lower, higher) for lower, higher in pairs))


@cache
def only_using(kept: Kept) -> tuple[OpKind, ...]:
    """The kinds that wait for nothing but what an op has left at their own chunk."""
    return tuple(x for x in OpKind if x.row.uses is kept and x.row.takes is None)


@cache
def op_numbers_at(num_hops: int, split: tuple[int, ...] = ()) -> Mapping[tuple[OpKind, int], int]:
    """The number of each op of a path of so many hops, by its kind and hop; `split` as of `path_ops`."""
    return {(op.kind, op.hop): op.number for op in path_ops(num_hops, split)}


def _numbered(num_awaited: dict[_Place, int], followers: Mapping[_Place, list[_Place]]) -> dict[_Place, int]:
    """Numbers of all ops, each above those of what it waits for; of those that may be next the first listed."""
    ready = deque(place for place, num in num_awaited.items() if not num)
    number: dict[_Place, int] = {}
    while ready:
        place = ready.popleft()
        number[place] = len(number)
        for follower in followers.get(place, ()):
            num_awaited[follower] -= 1
            if not num_awaited[follower]:
                ready.append(follower)
    assert len(number) == len(num_awaited), "the rows make ops wait for each other in a circle"
    return number
