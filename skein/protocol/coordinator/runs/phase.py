"""Where a run is.

GATHERING (too few workers) -> FENCING (a generation is open; acknowledgements and a plan come in) -> BUILDING (workers
make their chunks present) -> STEPPING <-> EVALUATING -> SAVING (a checkpoint that something waits for) -> ENDED.
"""

from enum import StrEnum


class RunPhase(StrEnum):
    """Where a run is."""

    GATHERING = "gathering"
    FENCING = "fencing"
    BUILDING = "building"
    STEPPING = "stepping"
    EVALUATING = "evaluating"
    SAVING = "saving"
    ENDED = "ended"

    @property
    def is_computing(self) -> bool:
        """Whether ops of the plan run."""
        return self in (RunPhase.STEPPING, RunPhase.EVALUATING)

    @property
    def is_of_all(self) -> bool:
        """Whether every member is waited for, with or without a place in the plan."""
        return self in (RunPhase.FENCING, RunPhase.BUILDING)

    @property
    def is_of_plan(self) -> bool:
        """Whether those with a place in the plan are waited for."""
        return self.is_computing or self is RunPhase.SAVING

    def standstill(self, seconds: float) -> str:
        """What is told when nothing has moved in this phase for so long."""
        if self.is_computing:
            return f"no op ended for {seconds:.0f} s"
        return f"nothing moved for {seconds:.0f} s while {self}"
