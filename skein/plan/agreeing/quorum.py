"""Deadline at which a round of walkers closes without its late ones, and the weight of each of the others.

Rules of this file
- Seconds are counted from the beginning of a round. The wait follows from how far apart walkers came in the last
  last rounds; of one that was left out it is known that it took longer than its round was open. So a walker that is
  always late is waited for from then on, and noise that grows makes the wait longer.
- A walker is late once it has taken twice as long as the quorum, at least.
- Pure functions of what arrived: a coordinator, its simulation and a replay of its log close equal rounds.

Source: the quorum, grace window and weights by tokens are those of Decoupled DiLoCo; the rule for how long is ours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NUM_REMEMBERED = 64
"""Past rounds that say what is usual: enough for what happens rarely, few enough to follow a fleet that changes."""
NUM_PROVEN = 4
"""Rounds without which nobody knows how far apart walkers come: all are waited for."""
_ROUNDS_PER_EXCEPTION = 32
"""Rounds of which one may be an exception, such as a walker that stood still: its wait does not count."""
_LEAST_WAIT = 1.0
"""Least wait as a share of the time until the quorum: a walker not even half as fast is late, whatever is usual."""
_ROUNDING = 1e-9

Arrivals = Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """The `share` of the walkers without which no round is closed, and how many times the usual wait it waits then."""

    share: float
    grace: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share: {self.share}: give a number above 0 and at most 1")
        if self.grace < 1:
            raise ValueError(f"grace: {self.grace}: give a number of at least 1")

    def needed(self, num_members: int) -> int:
        """Number of members that make a quorum: at least one.

        >>> Quorum(share=0.5, grace=3.0).needed(5)
        3
        """
        return max(1, math.ceil(self.share * num_members - _ROUNDING))

    def usual_wait_s(self, history: Sequence[Arrivals]) -> float | None:
        """The longest that passed from the quorum to the last report, but for exceptions; None: too few rounds.

        Of n rounds alike the next one takes longer than all of them with a chance of 1 / (n + 1), however its times
        are distributed; what `grace` times that does not cover is rare.

        Args:
            history: by round, the last at the end: when each report came, in any order; of a walker that was left
                out, when it was.

        >>> Quorum(share=0.5, grace=3.0).usual_wait_s([[10.0, 11.0, 15.0, 13.0]] + [[10.0, 10.0]] * 3)
        4.0
        """
        waits = sorted(self._wait_s(arrived) for arrived in history[-NUM_REMEMBERED:] if arrived)
        if len(waits) < NUM_PROVEN:
            return None
        return waits[-1 - len(waits) // _ROUNDS_PER_EXCEPTION]

    def deadline(self, arrived_s: Arrivals, history: Sequence[Arrivals], *, num_members: int) -> float | None:
        """Seconds at which the round closes if nothing more arrives; None: not before all are there.

        Without a quorum, and as long as too few rounds have shown what is usual, all are waited for; a dead worker
        is no member for long.

        >>> quorum = Quorum(share=0.5, grace=3.0)
        >>> quorum.deadline([10.0, 10.5], [[10.0, 10.0, 11.0, 14.0]] * 4, num_members=4)
        22.5
        >>> quorum.deadline([10.0], [[10.0, 10.0, 11.0, 14.0]] * 4, num_members=4) is None
        True
        """
        if len(arrived_s) < self.needed(num_members):
            return None
        if len(arrived_s) >= num_members:
            return max(arrived_s)
        usual = self.usual_wait_s(history)
        if usual is None:
            return None
        quorum_s = sorted(arrived_s)[self.needed(num_members) - 1]
        return quorum_s + max(self.grace * usual, _LEAST_WAIT * quorum_s)

    def _wait_s(self, arrived_s: Arrivals) -> float:
        ordered = sorted(arrived_s)
        return ordered[-1] - ordered[self.needed(len(ordered)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager:
    """A round that waits for nobody: walkers done within `share` of the time of the first end their step together."""

    share: float = 0.1

    def deadline(self, arrived_s: Arrivals, history: Sequence[Arrivals], *, num_members: int) -> float | None:
        """Seconds at which the round closes if nothing more arrives; None: no walker is done. The past does not matter.

        >>> Eager().deadline([10.0, 10.5], [], num_members=4)
        11.0
        """
        if not arrived_s:
            return None
        return max(arrived_s) if len(arrived_s) >= num_members else min(arrived_s) * (1 + self.share)


def token_weights(tokens_by_member: Mapping[int, int]) -> tuple[tuple[int, float], ...]:
    """Each member's share of the tokens, by member; equal shares if nobody has any.

    Raises:
        ValueError: there is no member, or one has fewer than none.

    >>> token_weights({2: 0, 0: 300, 1: 100}), token_weights({0: 0, 1: 0})
    (((0, 0.75), (1, 0.25), (2, 0.0)), ((0, 0.5), (1, 0.5)))
    """
    if not tokens_by_member or min(tokens_by_member.values()) < 0:
        raise ValueError(f"tokens by member: {dict(tokens_by_member)}: give each member none or more")
    total = sum(tokens_by_member.values())
    if not total:
        return tuple((member, 1.0 / len(tokens_by_member)) for member in sorted(tokens_by_member))
    return tuple((member, tokens_by_member[member] / total) for member in sorted(tokens_by_member))
