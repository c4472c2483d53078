"""Array: rows of one model that train side by side, each with its own numbers, seed, schedule, clip and fate.

R rows, B batch.

Rules of this file
- A row computes what a job alone would: sums over microbatches, divided by its own valid tokens, clipped by its own
  norm.
- A row whose loss or gradient is not finite is frozen: selected out of every update from then on. No other row hears
  of it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from skein.config.optimizer import OptimizerSpec
from skein.config.schedule import learning_rate
from skein.numeric.optim.optimizers import optimizer_of
from skein.numeric.optim.side_by_side import RowTerms, update_rows
from skein.numeric.rows import RowBuffer
from skein.numeric.walker import Walker
from skein.protocol.messages.array_rounds import GRADIENT_NOT_FINITE, LOSS_NOT_FINITE, MOST_LOSS, PassKind
from skein.protocol.rounds.weighing import clip_of
from worker.model.base import IGNORED_LABEL, Stage
from worker.sweep.passes import Pass, RowBatch, make_pass

Batches = Iterable[RowBatch]
"""Microbatches of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """Numbers by which a row differs from those beside it, after its parameters were drawn."""

    optimizer: OptimizerSpec
    num_steps: int
    """Steps of its whole budget, by which its learning rate falls."""
    rate_ratio: float = 1.0
    """Share of its learning rate that is left to it."""
    label_smoothing: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """Numbers of a row's step, as of a job's. `reason`: why the row made none; "" if it did."""

    loss: float
    num_tokens: int
    gradient_norm: float
    clip: float
    learning_rate: float
    reason: str


class RowArray:
    """Rows with their settings, and the pass that they go through."""

    def __init__(self, stage: Stage, rows: RowBuffer, settings: Sequence[RowSettings], made: Pass) -> None:
        self.stage = stage
        self.rows = rows
        self.settings = tuple(settings)
        self.frozen: dict[int, str] = {}
        """Rows that make no more steps, and why."""
        self._pass = made
        self._optimizers = [optimizer_of(x.optimizer) for x in settings]

    @classmethod
    def of(cls, stages: Sequence[Stage], settings: Sequence[RowSettings], kind: PassKind) -> "RowArray":
        """Rows that begin with the parameters of these stages, each a whole model; looped where `kind` cannot be."""
        walkers = []
        for stage, setting in zip(stages, settings, strict=True):
            params = {name: x.detach() for name, x in stage.named_parameters()}
            walkers.append(Walker(params=params, state=optimizer_of(setting.optimizer).init(params)))
        return cls.over(stages[0], RowBuffer.of(walkers), settings, kind)

    @classmethod
    def over(
        cls, stage: Stage, rows: RowBuffer, settings: Sequence[RowSettings], kind: PassKind
    ) -> "RowArray":
        """These very rows, of models like `stage`."""
        shares = [x.label_smoothing for x in settings]
        made = make_pass(kind, stage, rows, shares) or make_pass(PassKind.LOOPED, stage, rows, shares)
        assert made is not None, "any model goes in turn"
        return cls(stage, rows, settings, made)

    def taken(self, rows: Sequence[int], kind: PassKind) -> "RowArray":
        """An array of copies of these rows, which go on as they would have here."""
        part = RowArray.over(self.stage, self.rows.taken(rows), [self.settings[r] for r in rows], kind)
        part.frozen = {place: self.frozen[r] for place, r in enumerate(rows) if r in self.frozen}
        return part

    @classmethod
    def joined(cls, parts: "Sequence[RowArray]", kind: PassKind) -> "RowArray":
        """An array of copies of the rows of several, one after another."""
        settings = [x for part in parts for x in part.settings]
        whole = cls.over(parts[0].stage, RowBuffer.joined([part.rows for part in parts]), settings, kind)
        ahead = 0
        for part in parts:
            whole.frozen |= {ahead + row: reason for row, reason in part.frozen.items()}
            ahead += len(part.rows)
        return whole

    def put(self, row: int, before: RowBuffer, place: int, *, rate_ratio: float | None = None) -> None:
        """Have a row be what `before` has at `place`; with a `rate_ratio` it goes on, at that share of its rate."""
        self.rows.put([row], before.taken([place]))
        if rate_ratio is not None:
            self.frozen.pop(row, None)
            changed = replace(self.settings[row], rate_ratio=rate_ratio)
            self.settings = (*self.settings[:row], changed, *self.settings[row + 1 :])

    def step(self, batches: Batches, resting: Collection[int] = ()) -> tuple[RowStep, ...]:
        """Make one step of every row that is not frozen; each is at the step that its count of updates says.

        Rows that are `resting` make none.
        """
        losses, counts = self._sum_up(batches)
        counts = [0 if row in resting else count for row, count in enumerate(counts)]
        norms = self._norms(counts)
        steps = tuple(map(self._decide, range(len(self.rows)), losses, counts, norms))
        terms = [
            None
            if step.reason
            else RowTerms(learning_rate=step.learning_rate, gradient_scale=step.clip / step.num_tokens)
            for step in steps
        ]
        update_rows(self.rows, self._pass.grads, self._optimizers, terms)
        return steps

    def _sum_up(self, batches: Batches) -> tuple[list[float], list[int]]:
        """Summed losses and valid tokens of each row, with gradients summed in the pass."""
        self._pass.clear()
        losses: Tensor | None = None
        counts: Tensor | None = None
        for batch in batches:
            found = self._pass.run(*batch)
            valid = (batch.labels != IGNORED_LABEL).flatten(1).sum(1)
            losses = found if losses is None else losses + found
            counts = valid if counts is None else counts + valid
        assert losses is not None, "a step has a microbatch"
        assert counts is not None
        return losses.tolist(), counts.tolist()

    def _norms(self, counts: Sequence[int]) -> list[float]:
        """Norms of each row's mean gradient; not finite where one of its numbers is not."""
        sums = torch.linalg.vector_norm(self._pass.grads, dim=1, dtype=torch.float64).tolist()
        return [x / n if n else 0.0 for x, n in zip(sums, counts, strict=True)]

    def _decide(self, row: int, loss_sum: float, num_tokens: int, norm: float) -> RowStep:
        settings = self.settings[row]
        if row not in self.frozen and num_tokens:
            if not abs(loss_sum) < MOST_LOSS:
                self.frozen[row] = LOSS_NOT_FINITE
            elif not norm < inf:
                self.frozen[row] = GRADIENT_NOT_FINITE
        reason = self.frozen.get(row, "" if num_tokens else "no valid token in the batch")
        return RowStep(
            loss=loss_sum / num_tokens if num_tokens else 0.0,
            num_tokens=num_tokens,
            gradient_norm=norm,
            clip=1.0 if reason else clip_of(norm, settings.optimizer.clip_norm),
            learning_rate=0.0
            if reason
            else learning_rate(settings.optimizer, self.rows.num_updates[row], settings.num_steps)
            * settings.rate_ratio,
            reason=reason,
        )
