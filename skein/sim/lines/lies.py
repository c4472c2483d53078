"""Reports that are not what their worker made of them: other numbers, ids and lists, missing and repeated ones.

What a liar does stays honest; only what it says is mutated, as by a faulty machine, or by somebody who is let in.
A worker that withholds reports, or accuses its peers, says nothing false of its own state.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from math import inf, nan
from typing import TypeVar

from numpy.random import Generator as Draw

from skein.protocol.messages.coresets import CandidatesPicked
from skein.protocol.messages.ranges import MAX_INTEGER
from skein.protocol.messages.reports import (
    Ack,
    Beat,
    CheckpointWritten,
    ChunksReady,
    EvaluationDone,
    Hello,
    Report,
    SketchTaken,
    StageDone,
    Suspected,
    Vote,
)
from skein.protocol.worker.worker import Worker
from skein.types import Generation, GroupId, Own, StageIndex

SHARE = 0.4
"""Share of a liar's reports that are mutated."""
_INTEGERS = (0, -1, MAX_INTEGER, MAX_INTEGER + 1)
_FLOATS = (nan, inf, -inf, -1.0, 0.0, 1e-300, 1e30, 1e308)
_NO_STAGE = 10**9
_NAMES = ("", "w0000", "w0001", "s0", "sim-1", "nobody")
_KEPT = frozenset({"worker", "incarnation", "secret"})
"""Fields of a Hello that stay: a worker that says another's name there has no place in the world."""

OWED: tuple[type[Report], ...] = (
    Ack,
    ChunksReady,
    StageDone,
    Vote,
    SketchTaken,
    EvaluationDone,
    CandidatesPicked,
    CheckpointWritten,
)
"""Reports that a member owes the coordinator: a run waits for each of them."""

Place = tuple[str | int, ...]
Says = Callable[[Report], tuple[Report, ...]]
"""Reports that a worker sends in the place of one that its machine made."""
T = TypeVar("T")


def withholding(kinds: Collection[type[Report]]) -> Says:
    """Send all reports but those of these kinds."""
    return lambda report: () if isinstance(report, tuple(kinds)) else (report,)


@dataclass(slots=True, kw_only=True)
class Accuser:
    """A worker that accuses a peer once it has built in a generation, or with every beat too, and reaches that peer.

    It goes round among the first `num_named` of its peers, by name.
    """

    machine: Worker
    num_named: int
    with_every_beat: bool = False
    num_accusations: int = 0
    _accused_in: Generation = field(default=Generation(-1))

    def __call__(self, report: Report) -> tuple[Report, ...]:
        """The report, and after it an accusation if one is due."""
        machine = self.machine
        is_new = self._accused_in != machine.generation or self.with_every_beat
        others = sorted(machine.peers)[: self.num_named]
        if not isinstance(report, Beat | ChunksReady) or machine.pipeline is None or not is_new or not others:
            return (report,)
        self._accused_in = machine.generation
        peer = others[self.num_accusations % len(others)]
        self.num_accusations += 1
        accusation = Suspected(generation=machine.generation, peer=peer, reason="connection refused")
        return (report, accusation)


def mutated(report: Report, draw: Draw) -> tuple[Report, ...]:
    """Reports in place of `report`: mostly itself, else none, the same twice, or a mutated one."""
    if draw.random() >= SHARE:
        return (report,)
    how = 1.0 if isinstance(report, Hello) else draw.random()  # a stream begins with one and no more
    if how < 0.1:
        return ()
    if how < 0.2:
        return (report, report)
    places = list(_places(report))
    return (_changed(report, _picked(places, draw), draw),) if places else (report,)


def _places(value: object, above: Place = ()) -> Iterator[Place]:
    """Everything in a value that may be another."""
    if isinstance(value, GroupId):
        yield above
    elif is_dataclass(value):
        kept = _KEPT if isinstance(value, Hello) else frozenset()
        for field in fields(value):
            if field.name not in kept:
                yield from _places(getattr(value, field.name), (*above, field.name))
    elif isinstance(value, tuple):
        yield above
        for index, inner in enumerate(value):
            yield from _places(inner, (*above, index))
    elif value is not None:
        yield above


def _changed(value: T, place: Place, draw: Draw) -> T:
    """`value` with another one at `place`."""
    if not place:
        return _other(value, draw)
    at, *rest = place
    if isinstance(value, tuple):
        assert isinstance(at, int)
        return (*value[:at], _changed(value[at], tuple(rest), draw), *value[at + 1 :])  # type: ignore[return-value]
    assert is_dataclass(value) and not isinstance(value, type) and isinstance(at, str)
    return replace(value, **{at: _changed(getattr(value, at), tuple(rest), draw)})


def _other(value: T, draw: Draw) -> T:
    """Replacement for a value, of the same type."""
    found: object
    if isinstance(value, bool):
        found = not value
    elif isinstance(value, StrEnum):
        found = _picked(list(type(value)), draw)
    elif isinstance(value, int):
        found = _picked((*_INTEGERS, value + 1, value - 1), draw)
    elif isinstance(value, float):
        found = _picked((*_FLOATS, 2.0 * value, -value), draw)
    elif isinstance(value, str):
        found = _picked((*_NAMES, f"{value}x"), draw)
    elif isinstance(value, GroupId):
        found = Own(StageIndex(0 if _picked((*_NAMES, ""), draw) == "s0" else _NO_STAGE))
    elif isinstance(value, bytes):
        found = _picked((value[1:], value[:-1], value[::-1], value + value[:1], b""), draw)
    else:
        assert isinstance(value, tuple)
        found = _picked((value[1:], value[:-1], value[::-1], (*value, *value[:1]), ()), draw)
    return found  # type: ignore[return-value]


def _picked(choices: Sequence[T], draw: Draw) -> T:
    return choices[int(draw.integers(len(choices)))]
