"""What replicas tell of their steps, a line of JSON each, and what comes of it. No torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import IO

from pydantic import TypeAdapter, ValidationError

NUM_SMOOTHED = 10
"""Steps whose mean loss is looked at: single ones go up and down by more than they gain."""


class Kind(StrEnum):
    """A replica begins to compute its part of a step; the step was applied here, or thrown away."""

    BEGUN = "begun"
    APPLIED = "applied"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One line. `loss_sum` is nats over `num_tokens` of this replica's part; `is_counted`: the update has that part."""

    kind: Kind
    replica: int
    step: int
    at_s: float
    num_samples: int
    loss_sum: float = 0.0
    num_tokens: int = 0
    is_counted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A step as it was applied, by whoever was there: when, on how many samples, and their mean loss."""

    step: int
    at_s: float
    num_samples: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A training. `num_computed`: samples that somebody began to compute a gradient of, some of them in vain."""

    applied: tuple[Applied, ...]
    num_computed: int

    @property
    def begun_s(self) -> float:
        """When the first step was done; before it there is start-up only."""
        return self.applied[0].at_s

    @property
    def lasted_s(self) -> float:
        """From the first step to the last."""
        return self.applied[-1].at_s - self.begun_s

    def num_lost(self, step_samples: int) -> int:
        """Samples which no update has seen, of the steps that were made since one had all its `step_samples`.

        Before that the first replicas may have begun without the last.
        """
        whole = [index for index, step in enumerate(self.applied) if step.num_samples == step_samples]
        since = self.applied[whole[0] :] if whole else self.applied
        return sum(step_samples - step.num_samples for step in since)

    @property
    def num_used(self) -> int:
        return sum(step.num_samples for step in self.applied)

    @property
    def num_repeated(self) -> int:
        """Samples that were computed in vain, and again if they were not lost."""
        return self.num_computed - self.num_used

    def smoothed(self) -> tuple[float, ...]:
        """Mean loss of the last `NUM_SMOOTHED` steps after each step, from the first that has so many on."""
        losses = [step.loss for step in self.applied]
        return tuple(fmean(losses[end - NUM_SMOOTHED : end]) for end in range(NUM_SMOOTHED, len(losses) + 1))

    def reaches_s(self, loss: float) -> float | None:
        """Seconds after the first step when the smoothed loss is `loss` or below; None: it never is."""
        for index, value in enumerate(self.smoothed()):
            if value <= loss:
                return self.applied[index + NUM_SMOOTHED - 1].at_s - self.begun_s
        return None


def curve_of(told: Iterable[Told]) -> Curve:
    """One training out of what all its replicas told, however often a step was made.

    Of a step that was applied more than once, after a return to a checkpoint, the last time counts.
    """
    lines = sorted(told, key=lambda line: (line.at_s, line.replica))
    by_step: dict[int, dict[int, Told]] = {}
    for line in lines:
        if line.kind is Kind.APPLIED and line.is_counted:
            by_step.setdefault(line.step, {})[line.replica] = line
    return Curve(
        applied=tuple(_applied(step, tuple(by_step[step].values())) for step in sorted(by_step)),
        num_computed=sum(line.num_samples for line in lines if line.kind is Kind.BEGUN),
    )


def _applied(step: int, parts: Sequence[Told]) -> Applied:
    return Applied(
        step=step,
        at_s=min(part.at_s for part in parts),
        num_samples=sum(part.num_samples for part in parts),
        loss=sum(part.loss_sum for part in parts) / sum(part.num_tokens for part in parts),
    )


_TOLD = TypeAdapter(Told)


def tell(told: Told, out: IO[bytes]) -> None:
    """Write a line that is there even if this process is killed next."""
    out.write(_TOLD.dump_json(told) + b"\n")
    out.flush()


def read_told(path: Path, *, begin: int = 0) -> tuple[tuple[Told, ...], int]:
    """The lines of one replica that are whole, from byte `begin` on, and where the next begins.

    A line that a death cut off goes on with the first line of whoever comes after, and both are nobody's.
    """
    if not path.exists():
        return (), begin
    with path.open("rb") as file:
        file.seek(begin)
        text, _, _ = file.read().rpartition(b"\n")
    lines = text.split(b"\n") if text else []
    return tuple(line for line in map(_parsed, lines) if line is not None), begin + len(text) + bool(text)


def _parsed(line: bytes) -> Told | None:
    try:
        return _TOLD.validate_json(line)
    except ValidationError:
        return None
