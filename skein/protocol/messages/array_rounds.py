"""Rows of a step: numbers of each, and of the round of an array that it was; a job that is no array has one row.

Rules of this file
- A row's numbers are its own: nothing is summed over rows.
- A row that is retired makes no step any more, in this array or any other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite

from skein.numeric.sums import exact_sum

LOSS_NOT_FINITE, GRADIENT_NOT_FINITE = "loss not finite", "gradient not finite"
PARAMETERS_NOT_FINITE = "parameters not finite"
MOST_LOSS = 1e200
"""Nats from which on the loss of a row counts as not finite: what all rows sum up to in a round is told, and that has
bounds."""
REASONS = (LOSS_NOT_FINITE, GRADIENT_NOT_FINITE, PARAMETERS_NOT_FINITE)
"""Reasons for which rows are retired."""


class PassKind(StrEnum):
    """Way of the rows of an array through their models: as one wider model, by `torch.func.vmap`, or in turn."""

    FUSED = "fused"
    VMAPPED = "vmapped"
    LOOPED = "looped"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNumbers:
    """Numbers of one row in a step, or in several after one another.

    `loss` is its mean over their valid tokens, nats; norm, clip and rate are those of the last step that it made, as of
    a `StepRecord`. `num_updates` counts all that its parameters have seen, `num_rewinds` how often it went back to
    where a round began, with half the rate. `retired`: why it makes no more steps; "": it does, as far as its budget
    goes.
    """

    loss: float
    num_tokens: int
    gradient_norm: float
    clip: float
    learning_rate: float
    num_updates: int
    num_rewinds: int = 0
    retired: str = ""

    @staticmethod
    def begun(num_updates: int) -> "RowNumbers":
        """Numbers of a row that has seen so many updates, and of none of which anything is told."""
        return RowNumbers(
            loss=0.0, num_tokens=0, gradient_norm=0.0, clip=1.0, learning_rate=0.0, num_updates=num_updates
        )

    @property
    def weight(self) -> float:
        """Factor that makes a mean of its sums over tokens."""
        return 1.0 / self.num_tokens if self.num_tokens else 0.0

    def before(self, later: "RowNumbers") -> "RowNumbers":
        """The numbers of both together, `later` being those of the steps that followed."""
        if not later.num_tokens:
            return replace(later, loss=self.loss, num_tokens=self.num_tokens)
        num_tokens = self.num_tokens + later.num_tokens
        total = exact_sum((self.loss * self.num_tokens, later.loss * later.num_tokens))
        return replace(later, loss=total / num_tokens, num_tokens=num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRound:
    """Local steps of an array's rows, each of which made as many as its own count of updates has grown by.

    `speedup`: how many times as fast as the loop the best other pass was when it was measured; 1: there is no other.
    `step_s`: seconds of a local step of all rows that make steps, samples and updates included, as measured where they
    are made, warm; 0: it was not. `fixed_bytes` and `row_bytes`: memory of rows that make a step, whatever their
    number, and of each, by dry runs; both 0: there were none.
    """

    rows: tuple[RowNumbers, ...]
    num_local_steps: int
    pass_kind: PassKind
    speedup: float
    step_s: float = 0.0
    fixed_bytes: int = 0
    row_bytes: int = 0

    @property
    def num_alive(self) -> int:
        """Rows that are not retired."""
        return sum(not row.retired for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Valid tokens of all rows."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def loss(self) -> float:
        """Mean loss of the rows that have made steps and can go on; 0 without any."""
        losses = [x.loss for x in self.rows if x.num_tokens and not x.retired and isfinite(x.loss)]
        return exact_sum(losses) / len(losses) if losses else 0.0

    @classmethod
    def together(cls, parts: "Sequence[ArrayRound]") -> "ArrayRound | None":
        """Round that these parts are, in that order; None of no part."""
        if not parts:
            return None
        rows = parts[0].rows
        for part in parts[1:]:
            rows = tuple(x.before(y) for x, y in zip(rows, part.rows, strict=True))
        num_local_steps = sum(part.num_local_steps for part in parts)
        return replace(parts[-1], rows=rows, num_local_steps=num_local_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScore:
    """Loss of one row on validation data: summed nats over so many valid tokens."""

    loss_sum: float
    num_tokens: int

    @property
    def mean(self) -> float:
        """Nats per token; infinite without any."""
        return self.loss_sum / self.num_tokens if self.num_tokens else float("inf")


def added_scores(parts: Iterable[tuple[RowScore, ...]]) -> tuple[RowScore, ...]:
    """Sums by row; nothing where nobody tells of rows.

    >>> added_scores([(RowScore(loss_sum=1.0, num_tokens=2),), (), (RowScore(loss_sum=2.0, num_tokens=2),)])
    (RowScore(loss_sum=3.0, num_tokens=4),)
    """
    told = [rows for rows in parts if rows]
    return tuple(
        RowScore(
            loss_sum=exact_sum(score.loss_sum for score in scores),
            num_tokens=sum(score.num_tokens for score in scores),
        )
        for scores in zip(*told, strict=True)
    )
