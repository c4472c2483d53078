"""Phases of a run, each with what belongs to being there.

GATHERING (too few workers) -> FENCING (a generation is open; acknowledgements and a plan come in) -> BUILDING (workers
make their chunks present) -> STEPPING <-> EVALUATING -> SAVING (a checkpoint that something waits for) -> ENDED.
"""

from dataclasses import dataclass
from typing import ClassVar

from skein.plan.plan import Plan
from skein.protocol.messages.tensors import Phase
from skein.types import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """Properties that every phase has.

    A run that `may_go_on` goes on with its plan after a failure: it was computed with, and nobody wants another.
    `is_computing`: ops of the plan run. `waits_for_all`: every member is waited for; `waits_for_placed`: those with a
    place in the plan are; `waits_for_state`: those that hold any of the model's state are, from whom others may fetch.
    """

    may_go_on: bool = False

    name: ClassVar[str]
    state: ClassVar[JobState] = JobState.RUNNING
    is_computing: ClassVar[bool] = False
    waits_for_all: ClassVar[bool] = False
    waits_for_placed: ClassVar[bool] = False
    waits_for_state: ClassVar[bool] = False

    def standstill(self, seconds: float) -> str:
        """Reason that is given when nothing has moved in this phase for so long."""
        if self.is_computing:
            return f"no op ended for {seconds:.0f} s"
        return f"nothing moved for {seconds:.0f} s while {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPhase(_Phase):
    """Too few workers, or nothing that they can do, and nothing to lose."""

    name = "gathering"
    state = JobState.PAUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class FencePhase(_Phase):
    """A generation is open; acknowledgements and a plan come in.

    A plan that would give steps up is `held_back` for a while.
    """

    held_back: Plan | None = None

    name = "fencing"
    state = JobState.PLANNING
    waits_for_all = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPhase(_Phase):
    """Workers make their chunks present."""

    name = "building"
    state = JobState.PLANNING
    waits_for_placed = True
    waits_for_state = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPhase(_Phase):
    """A step is computed."""

    name = "stepping"
    is_computing = True
    waits_for_placed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatePhase(_Phase):
    """Samples are scored, for the loss on validation data, to see who leads, or to choose which to train on."""

    purpose: Phase

    name = "evaluating"
    is_computing = True
    waits_for_placed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ThenWait:
    """Saving is the last thing before the run waits, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThenRecut:
    """Stages that are cut otherwise read the checkpoint again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThenGoOn:
    """The boundary between two steps waited for the checkpoint, and goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePhase(_Phase):
    """A checkpoint is written, and what comes `then` waits for it."""

    then: ThenWait | ThenRecut | ThenGoOn

    name = "saving"
    waits_for_placed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPhase(_Phase):
    """The run is over."""

    name = "ended"


RunPhase = GatherPhase | FencePhase | BuildPhase | StepPhase | EvaluatePhase | SavePhase | EndPhase
