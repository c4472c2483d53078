"""What every aggregation rule has in common: how many walkers, and when who exchanges what."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Wire = Literal["fp32", "bf16", "int8", "int4", "int2"]
PatternName = Literal["auto", "direct", "ring", "tree"]


class Walkers(StrEnum):
    """How many trajectories of parameters a job has: one for all replicas, or one for each."""

    ONE = "one"
    MANY = "many"

    @property
    def have_equal_holders(self) -> bool:
        """Whether holders of a stage are equal, so that any may give its state, save it or do another's part."""
        return self is Walkers.ONE

    @property
    def are_lines(self) -> bool:
        """Whether each walker is a line of holders of its own, with microbatches and files that are no other's."""
        return self is Walkers.MANY

    @property
    def sum_every_step(self) -> bool:
        """Whether gradients of all holders are summed in every step, unless an exchange ends it."""
        return self is Walkers.ONE


class Reach(StrEnum):
    """Who takes part in an exchange: every walker, those of one group (a site), or each with its neighbours."""

    ALL = "all"
    GROUP = "group"
    NEIGHBOURS = "neighbours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """An exchange at the end of a step: the how-manieth of its kind (from 0), which fragment, who takes part.

    `overlap_steps` steps later the result is applied; 0: in the same.
    """

    round: int
    fragment: int = 0
    reach: Reach = Reach.ALL
    overlap_steps: int = 0
