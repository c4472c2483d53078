"""Working time of a job, as the run log tells it: from one commit to the next, and nothing in between.

Rules of this file
- Only differences of times that one coordinator wrote within one generation count, so neither a pause nor another wall
  clock is taken for work. The first step of a generation has no beginning in the log, and counts as long as the others.
"""

from dataclasses import dataclass
from math import ceil

from skein.config.job import JobSpec
from skein.types import Step


@dataclass(slots=True)
class WorkClock:
    """Counts the work of one job, record by record."""

    num_steps: int = 0
    num_timed: int = 0
    timed_s: float = 0.0
    _began: float | None = None

    def stepped(self, wall_s: float) -> None:
        """A step was committed."""
        self.num_steps += 1
        if self._began is not None and wall_s > self._began:
            self.num_timed += 1
            self.timed_s += wall_s - self._began
        self._began = wall_s

    def goes_on(self, wall_s: float) -> None:
        """Begin timing the next step: something that is no step is over."""
        self._began = wall_s

    def stops(self) -> None:
        """Stop timing: what comes until the next commit is no step alone."""
        self._began = None

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None before one was timed."""
        return self.timed_s / self.num_timed if self.num_timed else None

    def total_steps(self, spec: JobSpec, version: Step) -> int:
        """Steps after which the budget is spent; with hours in it a forecast, which is true once they are over."""
        if spec.budget.hours is None or self.step_s is None:
            return spec.total_steps
        left_s = 3600 * spec.budget.hours - self.step_s * self.num_steps
        return min(spec.total_steps, version + max(0, ceil(left_s / self.step_s)))
