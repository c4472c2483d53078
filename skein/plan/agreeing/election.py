"""Election of the walker that leads, its claim, and the followers that check that.

Rules of this file
- All walkers are scored on equal samples, drawn anew for every election: whoever trains on the easiest data would
  else lead for ever, and nobody could tell whether a score is true.
- A claim names the parameters by digest before anybody gets them, so that they cannot be chosen afterwards.
- Everything is a pure function of seed, step and claims: coordinator, workers and a replay of the log agree.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Generic, TypeVar

from skein import rng
from skein.data.order import permuted
from skein.types import Step, WorkerId

Who = TypeVar("Who", int, WorkerId)
"""A walker, by place or by name."""

TOLERANCE = 1e-3
"""Share of a loss by which two devices may differ: bfloat16 rounds at 4e-3 an element, means far less."""
_LEAST = 1e-6
"""Losses nearer to zero than this are rounding; they differ by shares of this."""
_DRAWN = 2.0**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Generic[Who]):
    """A walker's word on itself: its mean loss on the probe (nats) and the digest of the parameters it has.

    Both are those that `step` began with.
    """

    walker: Who
    step: Step
    score: float
    digest: str


def scores_of(claims: Iterable[Claim[Who]], step: Step) -> dict[Who, tuple[float, str]]:
    """Score and digest by walker, of the claims about `step`; of several by one walker the first holds."""
    found: dict[Who, tuple[float, str]] = {}
    for claim in claims:
        if claim.step == step:
            found.setdefault(claim.walker, (claim.score, claim.digest))
    return found


def elect(scores: Mapping[Who, tuple[float, str]], blacklisted: AbstractSet[Who] = frozenset()) -> Who | None:
    """The walker with the lowest score; ties go to the least id. None if nobody has a finite score.

    Args:
        scores: (score, digest) by walker: of a group for its leader, of all for the leader of all.
        blacklisted: who claimed what was not true; does not lead.

    >>> elect({2: (0.5, "b"), 0: (0.5, "a"), 1: (float("nan"), "c"), 3: (0.1, "d")}, {3})
    0
    """
    fit = [(score, who) for who, (score, _) in scores.items() if math.isfinite(score)]
    return min((pair for pair in fit if pair[1] not in blacklisted), default=(0.0, None))[1]


def bears_out(claim: Claim[Who], score: float) -> bool:
    """Whether a follower's score of the parameters it received, on the same probe, is the claimed one."""
    is_near = abs(score - claim.score) <= TOLERANCE * max(abs(score), _LEAST)
    return math.isfinite(score) and is_near


def rechecking(seed: int, round_: int, followers: Collection[Who], *, ratio: float) -> tuple[Who, ...]:
    """The followers that check the leader's claim in this round, sorted: each with probability `ratio`.

    At least one does wherever the ratio is above zero, so that no lie stays unseen.

    >>> rechecking(0, 3, [1, 2, 3], ratio=1.0), rechecking(0, 3, [1, 2, 3], ratio=0.0)
    ((1, 2, 3), ())
    """
    if ratio <= 0 or not followers:
        return ()
    drawn = sorted((rng.key(seed, "recheck", round_, who) / _DRAWN, who) for who in followers)
    return tuple(sorted(who for at, (draw, who) in enumerate(drawn) if draw < ratio or at == 0))


def is_refuted(is_true_by_follower: Mapping[Who, bool], *, num_followers: int) -> bool:
    """Whether a leader has lied: more than half of all followers have to say so.

    So neither a leader nor an accuser is believed alone; a follower that is the only one is.

    >>> [is_refuted(found, num_followers=3) for found in ({1: True}, {1: False}, {1: False, 2: False})]
    [False, False, True]
    """
    return 2 * sum(not is_true for is_true in is_true_by_follower.values()) > num_followers


def probe_positions(seed: int, round_: int, *, num_samples: int, num_validation: int) -> tuple[int, ...]:
    """Positions of the validation set that all walkers are scored on in this round: sorted, none twice.

    All of them if there are no more than `num_samples`.

    Raises:
        ValueError: the validation set is empty.
    """
    if num_validation < 1:
        raise ValueError("scores need a validation set, and it is empty")
    drawn = permuted(
        range(min(num_samples, num_validation)), size=num_validation, key=rng.key(seed, "probe", round_)
    )
    return tuple(sorted(drawn.tolist()))
