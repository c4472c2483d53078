"""Features of training rows at a head, kept from the forwards of a selection until candidates are picked of them.

Rules of this file
- Kept are the two factors of a last layer's gradient, hidden state and error, or the logits: never their product.
- `Traits` is the torch thread's; `picked` runs beside, on what it has given away.
- More rows than there is room for are not kept, and chance draws of them: that is no failure of the worker.

N rows, H hidden, C classes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skein.config.job import JobSpec
from skein.errors import UserError
from skein.numeric.coreset.distributed import Candidates
from skein.numeric.coreset.features import Features, last_layer, vectors
from skein.numeric.coreset.portions import Picking, pick_candidates
from skein.numeric.coreset.room import MOST_FEATURE_BYTES, no_room
from skein.types import MicrobatchId, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAsked:
    """Row of an array whose model is asked, and the steps that it has made; any other job asks for row 0."""

    row: int
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """Training rows at a head: their ids, classes and logits, and the inputs of its matrix.

    `step`: steps that the model has made by which they are compared.
    """

    step: Step
    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    hidden_NH: NDArray[np.float64] | None
    """None where nobody wants it."""
    logits_NC: NDArray[np.float64]

    @property
    def errors_NC(self) -> NDArray[np.float64]:
        """Gradients of the losses by logits: probabilities less the label's 1."""
        logits = self.logits_NC
        with np.errstate(invalid="ignore", over="ignore"):  # such rows are set aside
            shares = np.exp(logits - logits.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
        errors: NDArray[np.float64] = shares
        errors[np.arange(len(errors)), self.labels] -= 1.0
        return errors

    @property
    def features(self) -> Features:
        """By which rows are compared."""
        return (
            vectors(self.logits_NC) if self.hidden_NH is None else last_layer(self.hidden_NH, self.errors_NC)
        )


class Traits:
    """Rows that have come to the head here in the forwards of one selection."""

    def __init__(self) -> None:
        self._version: Step | None = None
        self._rows: dict[int, dict[MicrobatchId, HeadRows]] = {}
        self._num_bytes = 0
        self._refusal: UserError | None = None

    def forget(self) -> None:
        """Drop everything."""
        self._version, self._rows, self._num_bytes, self._refusal = None, {}, 0, None

    def keep(
        self,
        job: JobSpec,
        version: Step,
        microbatch: MicrobatchId,
        hidden: Tensor,
        logits: Tensor,
        labels: Tensor,
        of: RowAsked | None = None,
    ) -> None:
        """Keep what the head has of a microbatch of training rows, which are in the order of their ids.

        `of`: the model, in an array.
        """
        if self._version != version:
            self.forget()
            self._version = version
        wants_hidden = job.data.coreset.feature == "last_layer"
        first = microbatch * job.batch.microbatch_samples
        asked = of or RowAsked(row=0, step=version)
        rows = HeadRows(
            step=asked.step,
            ids=np.arange(first, first + len(labels)),
            labels=labels.cpu().numpy(),
            hidden_NH=_float64(hidden) if wants_hidden else None,
            logits_NC=_float64(logits),
        )
        self._num_bytes += rows.logits_NC.nbytes + (0 if rows.hidden_NH is None else rows.hidden_NH.nbytes)
        kept = self._rows.setdefault(asked.row, {})
        if self._num_bytes > MOST_FEATURE_BYTES:
            self._refusal = no_room(job.data.coreset)
            self._rows = {row: {} for row in self._rows}
        elif self._refusal is None:
            kept[microbatch] = rows

    def take(self) -> dict[int, HeadRows | UserError]:
        """All rows that are here, ascending, by the row of the array whose model was asked; they are kept no longer.

        Where they were too many, why there are none.
        """
        found = {
            row: self._refusal or _together([rows[m] for m in sorted(rows)])
            for row, rows in sorted(self._rows.items())
        }
        self.forget()
        return found


def _together(found: list[HeadRows]) -> HeadRows:
    hidden = [x.hidden_NH for x in found if x.hidden_NH is not None]
    return HeadRows(
        step=found[0].step,
        ids=np.concatenate([x.ids for x in found]),
        labels=np.concatenate([x.labels for x in found]),
        hidden_NH=np.concatenate(hidden) if hidden else None,
        logits_NC=np.concatenate([x.logits_NC for x in found]),
    )


def picked(rows: HeadRows, job: JobSpec, *, num_rows: int) -> Candidates:
    """Candidates among a worker's rows, of `num_rows` that all workers have. Takes seconds where these are many.

    Raises:
        UserError: it cannot be.
    """
    spec = job.data.coreset
    groups = rows.labels if spec.group_by == "label" else np.zeros_like(rows.labels)
    size = job.batch.microbatch_samples
    picking = Picking.at(spec, rows.step, num_rows=num_rows, block_rows=size)
    return pick_candidates(rows.features, groups, rows.ids, picking)


def _float64(x: Tensor) -> NDArray[np.float64]:
    return x.detach().to("cpu", torch.float64).numpy()
