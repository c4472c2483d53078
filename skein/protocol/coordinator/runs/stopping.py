"""Ends and waits of a run, and what is saved before them.

Rules of this file
- No worker is let go, and no run waits for more workers, while what they hold could be saved and is not.
"""

from dataclasses import replace

from skein.plan.plan import Plan
from skein.protocol.coordinator.runs import phase as phases
from skein.protocol.coordinator.runs.course import RunCourse
from skein.protocol.coordinator.runs.ending import Stop
from skein.protocol.coordinator.runs.parts import Parts
from skein.types import JobState


class Stopping:
    """Brings a run to rest. Whoever calls says why."""

    def __init__(self, parts: Parts, course: RunCourse) -> None:
        self._parts = parts
        self._course = course

    # --- the end ---

    def fail(self, reason: str, *, now: float) -> None:
        """End the run, for it cannot go on."""
        self.stop(Stop(state=JobState.FAILED, reason=reason), now=now)

    def stop(self, stop: Stop, *, now: float) -> None:
        """Record the end and free the workers."""
        self._course.enter(phases.EndPhase(), stop.reason)
        self._parts.ending.record(stop, now=now)
        self._parts.members.free_all()

    def halted(self, *, now: float) -> bool:
        """Whether the run has ended, at somebody's wish, with nothing left that could be saved."""
        parts, course = self._parts, self._course
        if parts.job.ends_with_round:
            return self._has_ended_with_round(now=now)
        is_hopeless = course.is_in(phases.GatherPhase) and now >= course.gathers_at()
        may_save = not is_hopeless or (parts.may_save() and not parts.gathering.is_hopeless)
        saved = parts.savings.newest
        waits = None if may_save or parts.job.halt is None else parts.asking.before_ending(saved, now=now)
        course.explain(waits or course.reason)
        stop = parts.ending.halted(saved, may_save=may_save or bool(waits), because=parts.asking.outcome)
        if stop is not None and not course.is_in(phases.EndPhase):
            self.stop(stop, now=now)
        return course.is_in(phases.EndPhase)

    def _has_ended_with_round(self, *, now: float) -> bool:
        """Whether an array that is to end with its round has ended.

        The boundary after its round ends it. While no worker has it, it ends if nothing is newer than what is saved and
        nothing is to be evaluated; else who comes next makes again what is lost, for its rows are to go on.
        """
        parts, course = self._parts, self._course
        halt = parts.job.halt
        assert halt is not None, "asked by the caller"
        if course.is_in(phases.GatherPhase) and parts.ending.may_end_unbuilt(parts.savings.newest):
            self.stop(Stop(state=halt.state, reason=halt.reason), now=now)
        return course.is_in(phases.EndPhase)

    # --- waiting ---

    def wait(self, reason: str) -> None:
        """Ask nothing of anybody until more workers are here, or others."""
        parts, before = self._parts, self._course.reason
        self._course.enter(phases.GatherPhase(), reason)
        parts.stepping.over()
        # An answer would be about workers who are gone.
        parts.placement.forget_question()
        # How long somebody has been silent is counted anew once there is a plan again.
        parts.asking.over()
        parts.members.let_leaving_go()
        if reason != before:
            parts.out.log(f"paused: {reason}", job=parts.job.job)

    def pause(self, reason: str, *, now: float) -> None:
        """No plan exists: save what is held, then wait for more workers."""
        parts = self._parts
        parts.gathering.failed(may_pardon=parts.blame.may_pardon, now=now)
        if parts.holdings.held() is None or not parts.savings.is_behind():
            self.wait(reason)
            return
        self.save_held(f"saving, for no plan exists: {reason}", phases.ThenWait(reason=reason))

    # --- saving before ---

    def save_held(self, reason: str, then: phases.ThenWait | phases.ThenRecut) -> None:
        """No plan fits what is held as it is: save it, all of it being there."""
        held = self._parts.holdings.held()
        assert held is not None
        self._parts.members.place(held.workers)
        self._save_first(held, phases.SavePhase(then=then), reason)

    def save_placed(self, plan: Plan) -> None:
        """At a boundary: save what this plan holds, and look again then."""
        self._save_first(plan, phases.SavePhase(then=phases.ThenGoOn()), None)

    def _save_first(self, plan: Plan, phase: phases.SavePhase, reason: str | None) -> None:
        self._course.enter(replace(phase, may_go_on=self._course.phase.may_go_on), reason)
        self.save(plan)

    def save(self, plan: Plan) -> None:
        """Have the job's version saved; whoever led last is the main walker of the checkpoint."""
        main = self._parts.leading.main(plan)
        self._parts.savings.ask(plan, main=main, is_awaited=self._course.is_in(phases.SavePhase))
