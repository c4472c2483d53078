"""Notices that nothing moves any more, whatever the reason."""

from skein.plan.plan import Plan

STALL_S = 120.0
"""No op has ended anywhere for so long in a running step: something is stuck, and a new generation unsticks it.

Steps that are predicted to take longer have `STALL_STEPS` of their own time. Who does not even acknowledge the new
generation for so long is the stuck one, and is turned away.
"""
STALL_STEPS = 4.0


class Watchdog:
    """Knows when something moved last: an op ended, a step was committed, a generation was opened."""

    def __init__(self, *, now: float) -> None:
        self._moved_at = now

    def moved(self, *, now: float) -> None:
        """Something did."""
        self._moved_at = now

    def still_for(self, *, now: float) -> float:
        """Seconds since."""
        return now - self._moved_at

    def barks_at(self, plan: Plan | None) -> float:
        """When it has been too long under this plan."""
        step_s = 0.0 if plan is None else plan.predicted_step_s
        return self._moved_at + max(STALL_S, STALL_STEPS * step_s)
