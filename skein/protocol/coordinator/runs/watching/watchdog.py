"""Notices that nothing moves any more, whatever the reason: the last resort, behind leases and `OpWatch`."""

from skein.plan.plan import Plan

STALL_S = 60.0
"""No op has ended anywhere for so long in a running step: something is stuck, and a new generation unsticks it.

Steps that are predicted to take longer have `STALL_STEPS` of their own time. It costs what was on its way, so each time
that it was in vain doubles the wait: a tensor that takes longer than anybody knew arrives in the end.
"""
STALL_STEPS = 4.0
STUCK_STALLS = 2.0
"""Who does not even acknowledge a new generation for so many times as long is the stuck one, and is turned away."""
_MAX_DOUBLINGS = 6


class Watchdog:
    """Knows when something moved last: an op ended, a step was committed, a generation was opened."""

    def __init__(self, *, now: float) -> None:
        self._moved_at = now
        self._num_barks = 0

    def moved(self, *, now: float) -> None:
        """Something did."""
        self._moved_at = now

    def committed(self, *, now: float) -> None:
        """A step was: all is well."""
        self._moved_at = now
        self._num_barks = 0

    def barked(self) -> None:
        """A new generation is opened because nothing moved."""
        self._num_barks = min(self._num_barks + 1, _MAX_DOUBLINGS)

    def still_for(self, *, now: float) -> float:
        """Seconds since."""
        return now - self._moved_at

    def barks_at(self, plan: Plan | None) -> float:
        """When it has been too long under this plan."""
        return self._moved_at + self._stall_s(plan) * 2.0**self._num_barks

    def gives_up_at(self, plan: Plan | None) -> float:
        """When whoever has not acknowledged a generation by then is turned away."""
        return self._moved_at + STUCK_STALLS * self._stall_s(plan)

    def _stall_s(self, plan: Plan | None) -> float:
        step_s = 0.0 if plan is None else plan.predicted_step_s
        return max(STALL_S, STALL_STEPS * step_s)
