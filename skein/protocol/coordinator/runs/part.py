"""Interface of the parts of a run that keep state: calls when a generation, a member, a step or a plan comes or goes.

Rules of this file
- `Parts` alone makes these calls, each once and to all. A part that is called changes its own fields and no others.
"""

from dataclasses import dataclass

from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.placing.resuming import Resumed
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.membership.membership import Lost
from skein.protocol.messages.directives import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A plan is put in place: one that the step in progress goes on by, or another one.

    `num_begun` counts microbatches of the step in progress that have to begin anew, `num_steps_lost` committed steps
    that are given up for it; `is_averaged`: a stage is made of its neighbours.
    """

    plan: Plan
    resumed: Resumed | None = None
    num_begun: int = 0
    num_steps_lost: int = 0
    is_averaged: bool = False

    @property
    def gives_up(self) -> bool:
        """Whether something that was committed does not count any more."""
        return self.num_steps_lost > 0 or self.is_averaged


class RunPart:
    """A part of a run, for its job and with its members. What does not concern it changes nothing."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._job = members.job
        self._out = members.out

    def _log(self, words: str) -> None:
        """Tell people of the job."""
        self._out.log(words, job=self._job.job)

    def fenced(self, *, now: float) -> None:
        """A generation is opened: whatever was asked for under older ones is void."""

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone; `is_missed`: the phase depended on it."""

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step that was computed by `plan` is recorded, and not announced yet."""

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """A plan is recorded and assigned."""
