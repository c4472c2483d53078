"""What a member of a portfolio is asked. Imports nothing heavy: members start while this process is still loading."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from skein.errors import SkeinError

SEARCH = "search"
"""What plan files and reports say of how a plan was found."""


class Objective(StrEnum):
    """What is made short: the step with its aggregation, or the time until the last backward ends."""

    STEP = "step"
    MAKESPAN = "makespan"


class NoPlan(SkeinError):
    """There is none, or none was found in time; the text says why."""


class Role(StrEnum):
    """What a member does: look for plans, or prove bounds."""

    PLAN = "plan"
    BOUND = "bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What a member is asked.

    Args:
        role: what to do.
        objective: None: as the case implies.
        seed: of all draws.
        budget_s: seconds from the member's start.
        num_rounds: search so many rounds of fixed size instead, whatever time they take.
        cutoff_s: for `BOUND`: a known plan's seconds; None if there is none yet.
    """

    role: Role
    objective: Objective | None
    seed: int = 0
    budget_s: float = 10.0
    num_rounds: int | None = None
    cutoff_s: float | None = None


def errand_argument(errand: Errand) -> str:
    """The errand as the one argument of a member."""
    return json.dumps(asdict(errand))


def errand_of(argument: str) -> Errand:
    """The errand in an argument of `errand_argument`."""
    given = json.loads(argument)
    objective = given["objective"]
    return Errand(
        role=Role(given["role"]),
        objective=None if objective is None else Objective(objective),
        seed=given["seed"],
        budget_s=given["budget_s"],
        num_rounds=given["num_rounds"],
        cutoff_s=given["cutoff_s"],
    )
