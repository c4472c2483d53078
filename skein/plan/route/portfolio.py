"""Several solvers at one problem: who is sent next, what a slice brought, and which answer counts.

Rules of this file
- Whoever has processes only ships: local ones (`skein plan`) and tasks of Ray do what is told here.
- A member hands out whatever is better than what it had, as soon as it has it; so a process that dies, or a budget that
  ends, costs what would have been found later and nothing else.
- The least cost counts, of equal ones the first member's. So equal problems have equal answers while all members live.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from skein.plan.plan import Infeasible

_Slice_contra = TypeVar("_Slice_contra", contravariant=True)
_Answer_co = TypeVar("_Answer_co", covariant=True)
_Slice = TypeVar("_Slice")
_Answer = TypeVar("_Answer")
Cost = tuple[float, ...]


class Solver(Protocol[_Slice_contra, _Answer_co]):
    """Search for an answer, slice by slice: the balanced planner by seed, a search by moves, a bound by effort."""

    def __call__(self, slice_: _Slice_contra, /) -> "_Answer_co | Infeasible": ...


def improvements(
    solver: Solver[_Slice, _Answer], slices: Iterable[_Slice], cost: Callable[[_Answer], Cost]
) -> Iterator[_Answer]:
    """Answers that `solver` finds in these slices, each better than all before; ends early where none can be found."""
    from skein.plan.plan import Infeasible  # who only ships starts without numpy

    least: Cost | None = None
    for slice_ in slices:
        found = solver(slice_)
        if isinstance(found, Infeasible):
            return
        if least is None or cost(found) < least:
            least = cost(found)
            yield found


class Role(StrEnum):
    """Work of a member: look for plans, or prove bounds."""

    PLAN = "plan"
    BOUND = "bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Turn of a member: its role, and the seed of its draws."""

    role: Role
    seed: int


@dataclass(slots=True, kw_only=True)
class Portfolio(Generic[_Answer]):
    """Searches of several seeds side by side, and a bound once they have found something, if one is wanted."""

    seeds: tuple[int, ...]
    wants_bound: bool = False
    best: _Answer | None = None
    _least: tuple[Cost, int] | None = None
    _num_sent: int = 0

    def turns(self) -> tuple[Turn, ...]:
        """Turns to be sent now, beside those that were: members are numbered in this order."""
        wanted = [Turn(role=Role.PLAN, seed=seed) for seed in self.seeds]
        if self.wants_bound and self.best is not None:
            wanted.append(Turn(role=Role.BOUND, seed=self.seeds[0]))
        new, self._num_sent = tuple(wanted[self._num_sent :]), len(wanted)
        return new

    def take(self, number: int, cost: Cost, answer: _Answer) -> bool:
        """Take what member `number` found; whether it is the best so far."""
        if self._least is not None and (cost, number) >= self._least:
            return False
        self.best, self._least = answer, (cost, number)
        return True
