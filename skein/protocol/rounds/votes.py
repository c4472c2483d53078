"""Outcome of the votes on one group: the result that most agree on, and who said something else.

Rules of this file
- More than half of the voters make a result. The others are outvoted: that is their own fault, and nobody else's.
- Where nobody has a majority nobody is believed, and nobody can be told apart from who lied.
- Where each has a result of its own (gossip) there is nothing to agree on but whether it is finite. One that is not
  would spread, so the step is skipped; when most are finite, the others are to blame.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose, isfinite

from skein.numeric.sketch import Sketch, distance
from skein.plan.plan import Group
from skein.protocol.messages.reports import Vote
from skein.types import WorkerId

SAME_NORM = 1e-6
"""Norms of one result, by different devices, are nearer to each other than this; they are sums in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """`result` stands for all votes; None: there is no majority. `outvoted` said something else."""

    result: Vote | None
    outvoted: tuple[WorkerId, ...]


def ruling(group: Group, votes: Mapping[WorkerId, Vote], *, is_common: bool) -> Ruling:
    """Ruling on the votes of all workers of `group`; with `is_common` they are to have the same result."""
    if not is_common:
        return _of_own_results(group, votes)
    camps: list[list[WorkerId]] = []
    for worker in group.workers:
        camp = next((camp for camp in camps if _agree(votes[camp[0]], votes[worker])), None)
        if camp is None:
            camps.append([worker])
        else:
            camp.append(worker)
    largest = max(camps, key=len)
    if 2 * len(largest) <= len(group.workers):
        return Ruling(result=None, outvoted=())
    outvoted = tuple(worker for worker in group.workers if worker not in largest)
    return Ruling(result=votes[largest[0]], outvoted=outvoted)


def _of_own_results(group: Group, votes: Mapping[WorkerId, Vote]) -> Ruling:
    spoilt = tuple(worker for worker in group.workers if not votes[worker].is_finite)
    result = replace(votes[group.workers[0]], digest="", is_finite=not spoilt)
    return Ruling(result=result, outvoted=spoilt if 2 * len(spoilt) < len(group.workers) else ())


def _agree(one: Vote, other: Vote) -> bool:
    if (one.digest, one.is_finite) != (other.digest, other.is_finite):
        return False
    norms = one.squared_norm, other.squared_norm
    return isclose(*norms, rel_tol=SAME_NORM) or not any(map(isfinite, norms))


def votes_text(group: Group, votes: Mapping[WorkerId, Vote]) -> str:
    """Votes of the workers of a group, in words."""
    return ", ".join(
        f"{worker} has {votes[worker].digest[:8] or 'no digest'} of squared norm {votes[worker].squared_norm:.6g}"
        f"{'' if votes[worker].is_finite else ', not finite'}"
        for worker in group.workers
    )


def largest_camp(told: Mapping[WorkerId, Sketch]) -> list[WorkerId]:
    """The most workers whose sketches are the same as one's, sorted; of equally many those of the first."""
    camps = ([x for x in sorted(told) if distance(told[x], told[one]) <= SAME_NORM] for one in sorted(told))
    return max(camps, key=len)
