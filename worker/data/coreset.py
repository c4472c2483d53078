"""Weighted part of the training rows: which of them a place in the shuffled sequence means, and how much it counts.

Rules of this file
- A choice is a function of the rows and the settings, so whoever reads the data has the same one, after any restart.
  Its digest is in the fingerprint of the data: workers that chose otherwise find out before anything is computed.
- Weights have a mean of 1 over a choice, and losses are divided by samples: weights of a batch need not sum to that.
- The sequence is that of all rows for the warm-up; from then on each pass shuffles the choice anew.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skein import rng
from skein.config.data.coreset import CoresetSpec
from skein.data.order import shuffled_index
from skein.errors import UserError
from skein.numeric.coreset.choice import Choice, choose_by_chance, choose_coreset
from skein.numeric.coreset.features import vectors
from skein.numeric.coreset.greedy import Greedy
from skein.storage.outside import call_moved
from skein.units import format_bytes

MOST_FEATURE_BYTES = 4 << 30
"""Distances are made of rows in float64, which take no more than this."""
_SIGN_S = 1.0
_MOST_KEPT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Row at a place of the sequence, by its number among all training rows, and the weight of its loss."""

    row: int
    weight: float


class Coreset:
    """The rows that are trained on.

    Args:
        labels_N: class of each training row.
        num_picks: rows of a choice.
        first: the choice that training begins with.
        seed: of the job's order.
    """

    def __init__(
        self, spec: CoresetSpec, labels_N: NDArray[np.int64], num_picks: int, first: Choice, *, seed: int
    ) -> None:
        self._spec = spec
        self._labels_N = labels_N
        self._seed = seed
        self._lock = threading.Lock()
        self._choices = OrderedDict({0: first})
        self.num_picks = num_picks
        self.num_rows = len(labels_N)
        self.num_warmup = spec.warmup_epochs * self.num_rows
        self.first = first

    def place(self, position: int) -> Place:
        """The row at `position` of the endless sequence, once the warm-up is over."""
        drawn = position - self.num_warmup
        choice = self.choice(drawn)
        index = shuffled_index(drawn, num_samples=self.num_picks, seed=self._seed)
        return Place(row=int(choice.ids[index]), weight=float(choice.weights[index]))

    def choice(self, drawn: int) -> Choice:
        """The choice by which sample `drawn` after the warm-up is drawn."""
        refresh = self._spec.refresh_epochs
        number = 0 if refresh is None else drawn // (refresh * self.num_picks)
        with self._lock:  # batches are read ahead on threads of their own
            found = self._choices.pop(number, None)
            if found is None:
                found = by_chance(self._spec, self._labels_N, self.num_picks, number=number)
            self._choices[number] = found
            while len(self._choices) > _MOST_KEPT:
                self._choices.popitem(last=False)
        return found

    @property
    def digest(self) -> str:
        """Name of all choices: the first, and what later ones follow from."""
        settings = self._spec.model_dump_json()
        return hashlib.sha256(f"{settings} {self.first.digest}".encode()).hexdigest()

    def __str__(self) -> str:
        chosen = f"{self.num_picks} of {self.num_rows} rows by {self._spec.method}"
        weights = self.first.weights
        return (
            f"{chosen}, weights {weights.min():.3g} to {weights.max():.3g}, choice {self.first.digest[:12]}"
        )


def coreset_of(
    spec: CoresetSpec,
    x_ND: NDArray[np.float32],
    labels_N: NDArray[np.int64],
    *,
    batch_samples: int | None,
    seed: int,
) -> Coreset:
    """The part of the training rows that a job asks for.

    Args:
        x_ND: numbers of each row.
        labels_N: class of each.
        batch_samples: rows of one step, if a choice has to have as many.
        seed: of the job's order.

    Raises:
        UserError: there are fewer picks than classes or than rows of a step, or rows are too many to compare.
    """
    num_picks = max(1, round(spec.fraction * len(labels_N)))
    num_classes = len(np.unique(labels_N))
    wanted = max(num_classes, batch_samples or 1)
    if num_picks < wanted:
        why = f"{num_classes} classes" if wanted == num_classes else f"the {wanted} rows of one step"
        least = f"{wanted / len(labels_N):.3g}"
        hint = f"{num_picks} of {len(labels_N)} rows are fewer than {why}: give at least {least}"
        raise UserError("data.coreset.fraction", spec.fraction, hint)
    if spec.method == "random":
        first = by_chance(spec, labels_N, num_picks, number=0)
    else:
        first = _meanwhile(lambda: _by_cover(spec, x_ND, labels_N, num_picks))
    return Coreset(spec, labels_N, num_picks, first, seed=rng.key(seed, "coreset", "order"))


def by_chance(spec: CoresetSpec, labels_N: NDArray[np.int64], num_picks: int, *, number: int) -> Choice:
    """Choice of that number: rows of each class drawn evenly."""
    return choose_by_chance(labels_N, num_picks, seed=rng.key(spec.seed, "coreset", number))


def _by_cover(
    spec: CoresetSpec, x_ND: NDArray[np.float32], labels_N: NDArray[np.int64], num_picks: int
) -> Choice:
    num_bytes = 8 * x_ND.size
    if num_bytes > MOST_FEATURE_BYTES:
        most = format_bytes(MOST_FEATURE_BYTES)
        hint = f"rows take {format_bytes(num_bytes)} in float64, more than {most}: give random, or fewer rows"
        raise UserError("data.coreset.method", spec.method, hint)
    return choose_coreset(vectors(x_ND), labels_N, num_picks, form=Greedy(spec.greedy), seed=spec.seed)


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
