"""Whether training still learns anything, as the run log alone tells it.

Rules of this file
- A loss is bad if its step made no update or the loss is not finite; it is far above if it is beyond `far`. Losses are
  in nats per token, or per sample, so a bound in nats means the same for every job.
- What is judged is a row of steps, never one: a single bad batch is left out by the step itself, and no harm is done.
- Whatever makes the losses those of another model (a roll-back, a stage made of its neighbours) begins a new row.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median

from skein.protocol.messages.directives import Decision, StepRecord
from skein.types import Step

MAX_SKIPPED = 10
"""Steps without an update, one after the other, after which a job has diverged."""
NUM_JUDGED = 16
"""Losses whose median is believed: more than a spike or a warm-up's first steps last."""
LEAST_RISE_NATS = 1.0
"""Below this a loss that rises has not diverged, however small it was: tiny losses vary by large factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Sign that training has diverged: since which step, and the newest version whose loss was as it should be."""

    step: Step
    last_good: Step
    reason: str


@dataclass(slots=True)
class LossWatch:
    """Follows a job's steps, in log order. `good` is the newest version whose loss was as it should be."""

    good: Step = field(default=Step(0))
    _bad: list[StepRecord] = field(default_factory=list)
    """The last steps, as far as they are bad one after the other; no more than are judged."""
    _bad_since: Step | None = None
    _losses: deque[tuple[Step, float]] = field(default_factory=lambda: deque(maxlen=NUM_JUDGED))
    _start: float = inf
    """The first median."""
    _best: float = inf
    """The lowest median."""

    def stepped(self, record: StepRecord) -> None:
        """A step is committed. Its loss is that of the parameters which it began with."""
        is_finite = isfinite(record.loss)
        if record.decision is Decision.SKIP or not is_finite:
            if self._bad_since is None:
                self._bad_since = record.step
                # Without updates the versions that follow are this one.
                self.good = record.step if is_finite and record.loss <= self.far else self.good
            self._bad = [*self._bad, record][-MAX_SKIPPED:]
            return
        self._bad, self._bad_since = [], None
        self._losses.append((record.step, record.loss))
        if record.loss <= self.far:
            self.good = record.step
        level = self._level()
        if level is not None:
            self._start = level if self._start == inf else self._start
            self._best = min(self._best, level)

    def went_back(self, version: Step) -> None:
        """Later steps do not count; what was learned by then was learned."""
        self._begin_again()
        self.good = min(self.good, version)

    def changed(self) -> None:
        """The model is another one: its losses have a level of their own."""
        self._begin_again()
        self._best = inf

    @property
    def far(self) -> float:
        """Nats above which a loss is far from what was learned: twice the best median, and half of it unlearned."""
        if self._best == inf:
            return inf
        return max(2 * self._best, (self._best + self._start) / 2, self._best + LEAST_RISE_NATS)

    def doubt(self) -> Doubt | None:
        """Sign that training has diverged; None while it learns."""
        if len(self._bad) >= MAX_SKIPPED and self._bad_since is not None:
            why = self._bad[-1].reason or "loss not finite"
            reason = f"{why}, {self._bad[-1].step + 1 - self._bad_since} steps in a row without an update"
            return Doubt(step=self._bad_since, last_good=self.good, reason=reason)
        level = self._level()
        if level is None or level <= self.far:
            return None
        since = next(step for step, loss in self._losses if loss > self.far)
        reason = f"loss {level:.4g}, the median of {NUM_JUDGED} steps, is far above {self._best:.4g}"
        return Doubt(step=since, last_good=Step(max(0, since - 1)), reason=reason)

    def last_doubt(self, version: Step, score: float | None) -> Doubt | None:
        """Doubt about a job's last version; None if its loss is finite. `score`: its validation loss, if it has one."""
        since = version if self._bad_since is None else self._bad_since
        if score is not None:
            is_bad, reason = not isfinite(score), "validation loss not finite"
        else:
            # Without an update since, what this loss was computed with is the last version.
            is_bad, reason = bool(self._bad) and not isfinite(self._bad[-1].loss), "loss not finite"
        return Doubt(step=since, last_good=self.good, reason=f"{reason} at the end") if is_bad else None

    def _level(self) -> float | None:
        return median(loss for _, loss in self._losses) if len(self._losses) == NUM_JUDGED else None

    def _begin_again(self) -> None:
        self._bad, self._bad_since = [], None
        self._losses.clear()
