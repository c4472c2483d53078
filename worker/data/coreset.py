"""Weighted part of the training rows: which of them a place in the shuffled sequence means, and how much it counts.

Rules of this file
- A choice is a function of the rows and the settings, so whoever reads the data has the same one, after any restart.
  Its digest is in the fingerprint of the data: workers that chose otherwise find out before anything is computed.
- Choices that follow the model are made along the run: whoever draws is told, and only settings are in the digest.
- Weights have a mean of 1 over a choice, and losses are divided by samples: weights of a batch need not sum to that.
- The sequence is that of all rows for the warm-up; from then on each pass shuffles the choice anew.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skein import rng
from skein.config.data.coreset import CoresetSpec
from skein.config.job import BatchSpec
from skein.data.cursor import Cursor
from skein.data.order import shuffled_indices
from skein.errors import UserError
from skein.numeric.coreset.budgets import check_fraction
from skein.numeric.coreset.choice import Choice, choose_by_chance, choose_coreset
from skein.numeric.coreset.features import vectors
from skein.numeric.coreset.greedy import Greedy
from skein.numeric.coreset.room import MOST_FEATURE_BYTES
from skein.protocol.messages.coresets import MOST_PICKS, MOST_ROWS, ToldChoice
from skein.storage.outside import call_moved
from skein.types import Step
from skein.units import format_bytes

_SIGN_S = 1.0
_MOST_KEPT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPlaces:
    """Rows at places of the sequence, by their numbers among all training rows, and the weights of their losses.

    In the warm-up the row is `NO_ROW`, for all are drawn then.
    """

    rows: NDArray[np.int64]
    weights: NDArray[np.float32]


NO_ROW = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawing:
    """A choice that was made along the run, and the position of the sequence from which samples are drawn by it."""

    choice: Choice
    weights: NDArray[np.float32]
    first: int

    @staticmethod
    def of(told: ToldChoice, batch: BatchSpec) -> "Drawing":
        """Drawing by what the coordinator has told."""
        return _drawing_from(told.version, told.read(), batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDrawing:
    """Drawing of one row of an array, and its own step at which the next choice is due; None: it stays."""

    drawing: Drawing
    until: int | None


def row_drawings(told: ToldChoice, batch: BatchSpec) -> dict[int, RowDrawing]:
    """Drawings by row; of one and the same choice from one step on they are one object.

    Args:
        told: by the coordinator, of an array.
        batch: of a row's step.
    """
    choice = told.read() if told.rows else None
    found: dict[Step, Drawing] = {}
    drawings = {}
    for row in told.rows:
        assert choice is not None, "read above"
        if row.since not in found:
            found[row.since] = _drawing_from(row.since, choice, batch)
        drawings[row.row] = RowDrawing(drawing=found[row.since], until=row.until)
    return drawings


def _drawing_from(step: Step, choice: Choice, batch: BatchSpec) -> Drawing:
    return Drawing(choice=choice, weights=choice.weights, first=Cursor.at_step(step, batch).position)


class Coreset:
    """The rows that are trained on.

    Args:
        groups_N: group of each training row.
        shares_N: factor on the weight of each, so that sources weigh what the job says.
        num_picks: rows of a choice.
        first: the choice that training begins with; None: choices follow the model, and are told.
        seed: of the job's order.
    """

    def __init__(
        self,
        spec: CoresetSpec,
        groups_N: NDArray[np.int64],
        shares_N: NDArray[np.float32],
        num_picks: int,
        first: Choice | None,
        *,
        seed: int,
    ) -> None:
        self._spec = spec
        self._groups_N = groups_N
        self._shares_N = shares_N
        self._seed = seed
        self._lock = threading.Lock()
        self._choices = OrderedDict({} if first is None else {0: first})
        self.num_picks = num_picks
        self.num_rows = len(groups_N)
        self.num_warmup = spec.warmup_epochs * self.num_rows
        self.first = first

    def places(self, positions: Sequence[int], drawing: Drawing | None = None) -> DrawnPlaces:
        """The rows at `positions` of the endless sequence.

        Args:
            positions: in any order.
            drawing: by what is drawn where choices follow the model, once there is one.
        """
        at = np.asarray(positions, np.int64)
        found = DrawnPlaces(rows=np.full(len(at), NO_ROW), weights=np.ones(len(at), np.float32))
        if self.first is not None:
            drawn = at - self.num_warmup
            self._draw(found, np.flatnonzero(drawn >= 0), drawn)
        elif drawing is not None:
            # Each choice is shuffled on its own: a place says nothing of what was drawn before.
            seed = rng.key(self._seed, drawing.first)
            drawn = at - drawing.first
            _fill(found, np.flatnonzero(drawn >= 0), drawn, drawing.choice, drawing.weights, seed=seed)
        return found

    def _draw(self, found: DrawnPlaces, where: NDArray[np.int64], drawn: NDArray[np.int64]) -> None:
        refresh = self._spec.refresh_epochs
        numbers = drawn[where] * 0 if refresh is None else drawn[where] // (refresh * self.num_picks)
        for number in np.unique(numbers):
            own = where[numbers == number]
            choice = self.choice(int(drawn[own[0]]))
            weights = choice.weights * self._shares_N[choice.ids]
            _fill(found, own, drawn, choice, weights, seed=self._seed)

    def choice(self, drawn: int) -> Choice:
        """The choice by which sample `drawn` after the warm-up is drawn."""
        refresh = self._spec.refresh_epochs
        number = 0 if refresh is None else drawn // (refresh * self.num_picks)
        with self._lock:  # batches are read ahead on threads of their own
            found = self._choices.pop(number, None)
            if found is None:
                found = by_chance(self._spec, self._groups_N, self.num_picks, number=number)
            self._choices[number] = found
            while len(self._choices) > _MOST_KEPT:
                self._choices.popitem(last=False)
        return found

    @property
    def digest(self) -> str:
        """Name of all choices: the first, and what later ones follow from."""
        settings = self._spec.model_dump_json()
        first = "" if self.first is None else self.first.digest
        return hashlib.sha256(f"{settings} {first}".encode()).hexdigest()

    def __str__(self) -> str:
        chosen = f"{self.num_picks} of {self.num_rows} rows by {self._spec.method}"
        if self.first is None:
            return f"{chosen}, chosen along the run by {self._spec.feature}"
        weights = self.first.weights
        return (
            f"{chosen}, weights {weights.min():.3g} to {weights.max():.3g}, choice {self.first.digest[:12]}"
        )


def _fill(
    found: DrawnPlaces,
    where: NDArray[np.int64],
    drawn: NDArray[np.int64],
    choice: Choice,
    weights: NDArray[np.float32],
    *,
    seed: int,
) -> None:
    """Write what a choice has at these places, `drawn` being how many samples were drawn by it before each."""
    index = shuffled_indices(drawn[where], num_samples=len(choice.ids), seed=seed)
    found.rows[where], found.weights[where] = choice.ids[index], weights[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """Training rows of one source.

    Args:
        x_ND: numbers of each row.
        labels_N: class of each.
        weight: of the source, among those of all.
    """

    x_ND: NDArray[np.float32]
    labels_N: NDArray[np.int64]
    weight: float = 1.0


def coreset_of(
    spec: CoresetSpec, sources: Sequence[SourceRows], *, batch_samples: int | None, seed: int
) -> Coreset:
    """The part of the training rows that a job asks for; no row stands for one of another source.

    Args:
        sources: rows are numbered through all of them.
        batch_samples: rows of one step, if a choice has to have as many.
        seed: of the job's order.

    Raises:
        UserError: there are fewer picks than groups or than rows of a step, or more than can be told or compared.
    """
    groups_N = _groups(spec, sources)
    num_rows = len(groups_N)
    num_picks = spec.num_picks(num_rows)
    num_groups = len(np.unique(groups_N))
    check_fraction(spec, num_rows, num_groups, num_sources=len(sources), step_rows=batch_samples)
    if spec.follows_model and num_picks > MOST_PICKS:
        hint = f"{num_picks} rows are more than can be told at once: give at most {MOST_PICKS / num_rows:.3g}"
        raise UserError("data.coreset.fraction", spec.fraction, hint)
    if spec.follows_model and num_rows > MOST_ROWS:
        hint = f"{num_rows} rows are more than can be compared along the run: give inputs, or method: random"
        raise UserError("data.coreset.feature", spec.feature, hint)
    first: Choice | None = None
    if spec.method == "random":
        first = by_chance(spec, groups_N, num_picks, number=0)
    elif not spec.follows_model:
        first = _meanwhile(lambda: _by_cover(spec, [x.x_ND for x in sources], groups_N, num_picks))
    order = rng.key(seed, "coreset", "order")
    return Coreset(spec, groups_N, _shares(sources), num_picks, first, seed=order)


def _groups(spec: CoresetSpec, sources: Sequence[SourceRows]) -> NDArray[np.int64]:
    """Group of each row: its source, or its class in that."""
    if spec.group_by == "source":
        return np.repeat(np.arange(len(sources)), [len(x.labels_N) for x in sources])
    num_classes = 1 + max(int(x.labels_N.max()) for x in sources)
    return np.concatenate([place * num_classes + x.labels_N for place, x in enumerate(sources)])


def _shares(sources: Sequence[SourceRows]) -> NDArray[np.float32]:
    """Factor on each row's weight: that part of all losses which its source weighs, over its part of all rows."""
    num_rows, weight = sum(len(x.labels_N) for x in sources), sum(x.weight for x in sources)
    return np.concatenate(
        [
            np.full(len(x.labels_N), (x.weight / weight) * (num_rows / len(x.labels_N)), np.float32)
            for x in sources
        ]
    )


def by_chance(spec: CoresetSpec, groups_N: NDArray[np.int64], num_picks: int, *, number: int) -> Choice:
    """Choice of that number: rows of each group drawn evenly."""
    return choose_by_chance(groups_N, num_picks, seed=rng.key(spec.seed, "coreset", number))


def _by_cover(
    spec: CoresetSpec, x: Sequence[NDArray[np.float32]], groups_N: NDArray[np.int64], num_picks: int
) -> Choice:
    num_bytes = 8 * sum(x_ND.size for x_ND in x)
    if num_bytes > MOST_FEATURE_BYTES:
        most = format_bytes(MOST_FEATURE_BYTES)
        hint = f"rows take {format_bytes(num_bytes)} in float64, more than {most}: give random, or fewer rows"
        raise UserError("data.coreset.method", spec.method, hint)
    return choose_coreset(
        vectors(np.concatenate(x)), groups_N, num_picks, form=Greedy(spec.greedy), seed=spec.seed
    )


def _meanwhile(compute: Callable[[], Choice]) -> Choice:
    """Result of what computes for long, with signs of life: it is no file system that never answers."""
    future: Future[Choice] = Future()

    def run() -> None:
        try:
            future.set_result(compute())
        except BaseException as error:  # noqa: BLE001 - the outermost of this thread: whoever asked gets it
            future.set_exception(error)

    threading.Thread(target=run, name="coreset", daemon=True).start()
    while True:
        try:
            return future.result(_SIGN_S)
        except FutureTimeoutError:
            call_moved()
