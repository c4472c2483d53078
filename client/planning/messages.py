"""Errands of a portfolio's members, and what these tell the process that started them: one JSON object per line.

Only our own processes read these lines. Floats survive: JSON has their shortest exact form. Imports nothing heavy:
members start while this process is still loading.
"""

import json
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias, cast

from skein.errors import SkeinError
from skein.plan.route.portfolio import Cost, Role

if TYPE_CHECKING:
    from skein.plan.route.problem import Routing


SEARCH = "search"
"""Method that plan files and reports name for how a plan was found."""


class Objective(StrEnum):
    """Time that is made short: the step with its aggregation, or until the last backward ends."""

    STEP = "step"
    MAKESPAN = "makespan"


class NoPlan(SkeinError):
    """There is none, or none was found in time; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """Request to a member.

    Args:
        role: what to do.
        objective: None: as the case implies.
        seed: of all draws.
        budget_s: seconds from the member's start.
        settling_s: budget by whose work what the case leaves open is settled, equally by all who read it.
        num_rounds: search so many rounds of fixed size instead, whatever time they take.
        cutoff_s: for `BOUND`: a known plan's seconds; None if there is none yet.
    """

    role: Role
    objective: Objective | None
    seed: int = 0
    budget_s: float = 10.0
    settling_s: float = 2.5
    num_rounds: int | None = None
    cutoff_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFound:
    """A better routing than this member had before."""

    seed: int
    step_s: float
    jittered_s: float
    worker_of: tuple[int, ...]
    path: tuple[tuple[int, ...], ...]
    sequence: tuple[int, ...]

    @property
    def cost(self) -> Cost:
        """Plans are ranked by their mean under jitter."""
        return self.jittered_s, self.step_s

    @property
    def routing(self) -> "Routing":
        import numpy as np

        from skein.plan.route.problem import Routing

        return Routing(
            worker_of=np.array(self.worker_of, dtype=np.int64),
            path=np.array(self.path, dtype=np.int64),
            sequence=np.array(self.sequence, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Orders that a search has begun with, by name: seconds of a step under jitter, the shortest first."""

    orders: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRefused:
    """There is no plan."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """This member has to compile the search first, which takes about a minute, once after an installation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """Routings that this member has looked at so far."""

    num_moves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A lower bound; a later one is no lower."""

    seconds: float
    binding: str
    parts: tuple[tuple[str, float], ...]


Message: TypeAlias = PlanFound | Started | MethodRefused | Compiling | Progressed | Bounded
_KINDS: dict[str, type[Message | Errand]] = {
    kind.__name__: kind
    for kind in (Errand, PlanFound, Started, MethodRefused, Compiling, Progressed, Bounded)
}


def plan_found(routing: "Routing", *, seed: int, step_s: float, jittered_s: float) -> PlanFound:
    """The message about a routing."""
    return PlanFound(
        seed=seed,
        step_s=step_s,
        jittered_s=jittered_s,
        worker_of=tuple(routing.worker_of.tolist()),
        path=tuple(map(tuple, routing.path.tolist())),
        sequence=tuple(routing.sequence.tolist()),
    )


def errand_of(line: str) -> Errand:
    """The errand in a line of `line_of`."""
    given = _given(line)
    assert isinstance(given, Errand)
    return replace(
        given,
        role=Role(given.role),
        objective=None if given.objective is None else Objective(given.objective),
    )


def line_of(message: Message | Errand) -> str:
    """The message as one line, without its end."""
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    return json.dumps({"kind": type(message).__name__, **values})


def message_of(line: str) -> Message:
    """The message in a line of `line_of`."""
    given = _given(line)
    assert not isinstance(given, Errand)
    return given


def _given(line: str) -> Message | Errand:
    document = cast("dict[str, object]", json.loads(line))
    kind = _KINDS[str(document.pop("kind"))]
    return kind(**{name: _frozen(value) for name, value in document.items()})  # type: ignore[arg-type]


def _frozen(value: object) -> object:
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list) else value
