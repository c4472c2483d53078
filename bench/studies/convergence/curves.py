"""What training runs tell, line by line as they go, and as one small record in the end."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter

_DIGITS = 5
_POINTS = 200
"""A kept curve has about as many points: more would not be seen."""


class Kind(StrEnum):
    """What a line is about: one step, the validation set through all stages, or through some of them."""

    STEP = "step"
    VALIDATION = "validation"
    LEFT_OUT = "left_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One figure of one run: `loss` in nats per token, after `num_updates` updates (of a step: before its own)."""

    kind: Kind
    num_updates: int
    loss: float
    stages: tuple[int, ...] = ()
    """The stages that were visited, if it is about some of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOut:
    """Validation losses of a trained model with `num_left_out` stages left out, one for each choice of stages."""

    num_left_out: int
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run: trained with `num_left_out` stages left out per microbatch. Points are (updates, nats per token).

    `training` are means over equally many steps each, through the paths that were trained; `validation` is the whole
    model's.
    """

    num_left_out: int
    seed: int
    training: tuple[tuple[int, float], ...]
    validation: tuple[tuple[int, float], ...]
    leave_outs: tuple[LeaveOut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All runs of one comparison, and what a step costs on a fleet, by stages left out, where that is known."""

    num_stages: int
    num_steps: int
    step_s: Mapping[int, float]
    runs: tuple[RunRecord, ...]
    half: tuple[RunRecord, ...] = ()
    """With nothing left out in half as many steps, the learning rate falling in these: what equal hours buy where
    leaving stages out makes steps twice as fast."""

    def runs_with(self, num_left_out: int) -> tuple[RunRecord, ...]:
        """Those of all seeds, in the order of the record."""
        return tuple(run for run in self.runs if run.num_left_out == num_left_out)

    @property
    def trained_with(self) -> tuple[int, ...]:
        """Numbers of stages left out in training, ascending."""
        return tuple(sorted({run.num_left_out for run in self.runs}))

    def percent(self, num_left_out: int) -> int:
        """Share of the stages, rounded."""
        return round(100 * num_left_out / self.num_stages)


_LINE = TypeAdapter(Told)
_RECORD = TypeAdapter(Record)


class Journal:
    """A file of lines; what an interrupted writer left unfinished at its end is cut off."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes() if path.exists() else b""
        if not whole.endswith(b"\n"):
            path.write_bytes(whole[: whole.rfind(b"\n") + 1])
        self._path = path
        self._file = path.open("ab")

    def tell(self, told: Told) -> None:
        """One line more, at once in the file."""
        self._file.write(_LINE.dump_json(told) + b"\n")
        self._file.flush()

    def read(self) -> tuple[Told, ...]:
        """Every figure once; told again, the later one holds."""
        lines = [_LINE.validate_json(line) for line in self._path.read_bytes().splitlines()]
        return tuple({(told.kind, told.num_updates, told.stages): told for told in lines}.values())

    def close(self) -> None:
        self._file.close()


def run_record(
    lines: Iterable[Told], *, num_left_out: int, seed: int, num_stages: int, num_steps: int
) -> RunRecord:
    """What a run told, rounded and thinned."""
    told_by_kind: dict[Kind, list[Told]] = defaultdict(list)
    for told in sorted(lines, key=lambda told: (told.num_updates, told.stages)):
        told_by_kind[told.kind].append(told)
    losses = defaultdict(list)
    for told in told_by_kind[Kind.LEFT_OUT]:
        losses[num_stages - len(told.stages)].append(round(told.loss, _DIGITS))
    return RunRecord(
        num_left_out=num_left_out,
        seed=seed,
        training=tuple(_thinned(told_by_kind[Kind.STEP], max(1, num_steps // _POINTS))),
        validation=tuple((t.num_updates, round(t.loss, _DIGITS)) for t in told_by_kind[Kind.VALIDATION]),
        leave_outs=tuple(LeaveOut(num_left_out=n, losses=tuple(losses[n])) for n in sorted(losses)),
    )


def _thinned(steps: Sequence[Told], size: int) -> Iterator[tuple[int, float]]:
    """Means over `size` steps, each at the end of its steps."""
    for index, group in groupby(steps, key=lambda told: told.num_updates // size):
        yield (index + 1) * size, round(fmean(told.loss for told in group), _DIGITS)


def save(record: Record, path: Path) -> None:
    """Writes a record as compact JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_RECORD.dump_json(record) + b"\n")


def load(path: Path) -> Record:
    """What `save` wrote.

    Raises:
        ValueError: it is not a record.
    """
    return _RECORD.validate_json(path.read_bytes())


def perplexity(loss: float) -> float:
    """How many tokens a model hesitates between: e to the nats per token.

    >>> perplexity(0.0)
    1.0
    """
    return math.exp(loss)
