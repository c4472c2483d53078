"""Combining what members sent so that one of them, broken or lying, cannot move everybody far.

Rules of this file
- Gates come first and are always on: what is not finite, or far longer than is usual, does not count.
- A result has the scale of the weighted sum: all weights together, times the rule's mean. What a refused member
  would have weighed goes to the others in proportion (mean), or to oneself (a row of neighbours).
- With fewer parts than a rule wants, for members come and go, it guards against as many bad ones as so few allow.
  Whether a job has enough members to begin with is checked when it is submitted.
- A part may be one shard of what its member sent, and carries the norm of the whole. Rules that need more than that
  want whole contributions: `compares_vectors` of their spec.
- Sums run over the parts in their order, in their dtype, a product and an addition at a time; norms are float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median, median_low
from typing import assert_never

import torch
from torch import Tensor

from skein.config.robust import CentredClip, Krum, NormClip, NoRobust, RobustSpec, TrimmedMean
from skein.numeric.gradients import is_finite, squared_norm, sum_in_order

NORM_LIMIT = 10.0
"""Contributions longer than so many times the median are not noise: honest ones differ by what a warm-up changes."""
_STATED = 1.0 + 1e-3  # a whole norm may be stated in float32, and its shard decoded from a coarser wire
_PIECE = 2**18  # elements sorted at a time: bounds the memory, changes no result


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A member's contribution, or one shard of it, as a vector; `norm` is that of the whole contribution.

    A member that states a smaller norm than it has is caught by any shard that is longer; one that states a larger is
    only clipped the more.
    """

    values: Tensor
    weight: float
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPart:
    """Part that does not count, by its place among the parts, and the reason."""

    part: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """Combined vector, and whose part has no share in it."""

    values: Tensor
    refused: tuple[RefusedPart, ...] = ()


Combiner = Callable[[Sequence[Part]], Combined]


def part_of(vector: Tensor, weight: float) -> Part:
    """A whole contribution with its own norm."""
    return Part(values=vector, weight=weight, norm=math.sqrt(squared_norm(vector)))


# --- gates ---


def gates(
    parts: Sequence[Part], *, limit: float = NORM_LIMIT, usual: float | None = None
) -> tuple[RefusedPart, ...]:
    """Parts that are refused: not finite, longer than they say, or longer than `limit` times the `usual` norm.

    Usual is the median of the finite norms above zero, so that idle members make nobody unusual, unless given: whoever
    combines for itself knows its own. Of two members neither is unusual, for there is no telling which; nor is one that
    has half of all weight, among newcomers who had no time to go as far.

    >>> sent = [part_of(torch.tensor([x]), 1.0) for x in (1.0, -2.0, 1e9, torch.nan)]
    >>> [(x.part, x.reason) for x in gates(sent)]
    [(2, 'norm 1e+09 is more than 10 times the usual 2'), (3, 'not finite')]
    """
    reasons = [_reason_alone(part) for part in parts]
    if usual is None:
        usual = _usual([part for part, reason in zip(parts, reasons, strict=True) if not reason])
    for index, part in enumerate(parts):
        if not reasons[index] and part.norm > limit * usual > 0:
            reasons[index] = f"norm {part.norm:.3g} is more than {limit:g} times the usual {usual:.3g}"
    return tuple(RefusedPart(part=index, reason=reason) for index, reason in enumerate(reasons) if reason)


def _usual(parts: Sequence[Part]) -> float:
    """The median norm by number of members or by weight, whichever is more; 0 if all are zero."""
    moving = sorted((part.norm, part.weight) for part in parts if part.norm > 0)
    if not moving:
        return 0.0
    half = (
        sum(weight for _, weight in moving) / 2 * (1.0 - 1e-9)
    )  # equal weights are to give the lower median
    reached = accumulate(weight for _, weight in moving)
    by_weight = next(norm for (norm, _), weight in zip(moving, reached, strict=True) if weight >= half)
    return max(median(norm for norm, _ in moving), by_weight)


def _reason_alone(part: Part) -> str:
    """Reason to refuse a part whatever the others are; empty if there is none."""
    if not (math.isfinite(part.norm) and is_finite(part.values)):
        return "not finite"
    own = math.sqrt(squared_norm(part.values))
    return f"norm {own:.3g} is more than the stated {part.norm:.3g}" if own > part.norm * _STATED else ""


def row_without(
    row: Sequence[tuple[int, float]], refused: Sequence[RefusedPart], *, me: int
) -> tuple[tuple[int, float], ...]:
    """A row of neighbours' weights with those of refused parts put on oneself, so that it still sums to what it did.

    >>> row_without([(0, 0.5), (1, 0.25), (2, 0.25)], [RefusedPart(part=2, reason="not finite")], me=0)
    ((0, 0.75), (1, 0.25))
    """
    out = {refusal.part for refusal in refused}
    lost = sum(weight for index, (member, weight) in enumerate(row) if index in out and member != me)
    kept = [pair for index, pair in enumerate(row) if index not in out or pair[0] == me]
    return tuple((member, weight + lost if member == me else weight) for member, weight in kept)


# --- choice of a rule ---


def combiner_of(spec: RobustSpec, *, centre: Tensor | None = None) -> Combiner:
    """The rule as a function of the parts in order of the members, behind the gates.

    `centre` is the last mean, for rules that use it, on the scale of one contribution. If nobody's part counts, the
    result is zero.

    >>> sent = [part_of(torch.tensor([x]), 0.25) for x in (1.0, 2.0, 3.0, 1e9)]
    >>> combiner_of(NoRobust())(sent).values.tolist()
    [2.0]
    """
    return partial(_combined, spec, centre)


def _combined(spec: RobustSpec, centre: Tensor | None, parts: Sequence[Part]) -> Combined:
    refused = gates(parts)
    out = {refusal.part for refusal in refused}
    admitted = [part for index, part in enumerate(parts) if index not in out]
    total, left = (sum(part.weight for part in some) for some in (parts, admitted))
    if left <= 0:
        return Combined(values=torch.zeros_like(parts[0].values), refused=refused)
    values = _by_rule(spec, admitted, centre, num_refused=len(refused))
    return Combined(values=values.mul_(total / left) if refused else values, refused=refused)


def _by_rule(spec: RobustSpec, parts: Sequence[Part], centre: Tensor | None, *, num_refused: int) -> Tensor:
    """The rule among those admitted; each one refused is one bad member less to reckon with."""
    match spec:
        case NoRobust():
            return weighted_sum(parts)
        case NormClip():
            return norm_clipped(parts, times=spec.times)
        case TrimmedMean():
            most = (len(parts) - 1) // 2
            return trimmed_mean(parts, trimmed=min(most, max(0, spec.trimmed - num_refused)))
        case Krum():
            most = max(0, (len(parts) - 3) // 2)
            return krum(parts, bad=min(most, max(0, spec.bad - num_refused)), chosen=spec.chosen)
        case CentredClip():
            return centred_clip(parts, radius=spec.radius, rounds=spec.rounds, centre=centre)
    assert_never(spec)


# --- rules ---


def weighted_sum(parts: Sequence[Part]) -> Tensor:
    """Sum of weight * values; the weighted mean where weights sum to 1."""
    return sum_in_order([part.values * part.weight for part in parts])


def norm_clipped(parts: Sequence[Part], *, times: float) -> Tensor:
    """The weighted sum after every contribution longer than `times` the median norm was scaled down to that length.

    The median is the lower one of an even number, so that of two members a long one cannot hide behind itself.

    Source: the median-norm clipping of SparseLoCo's contributions, on whole contributions instead of blocks.
    """
    longest = times * median_low([part.norm for part in parts])
    scales = [part.weight * _shrink(part.norm, longest) for part in parts]
    return sum_in_order([part.values * scale for part, scale in zip(parts, scales, strict=True)])


def trimmed_mean(parts: Sequence[Part], *, trimmed: int) -> Tensor:
    """All weights together times each coordinate's mean without its `trimmed` largest and smallest values.

    Members count alike: there is no telling whose weight a coordinate has lost.

    Raises:
        ValueError: nothing would be left.
    """
    if len(parts) <= 2 * trimmed:
        raise ValueError(f"{len(parts)} parts cannot lose {trimmed} on either side")
    share = sum(part.weight for part in parts) / (len(parts) - 2 * trimmed)
    out = torch.empty_like(parts[0].values)
    columns = zip(*(torch.split(part.values, _PIECE) for part in parts), strict=True)
    for piece, column in zip(torch.split(out, _PIECE), columns, strict=True):
        ordered = torch.stack(column).sort(dim=0).values
        piece.copy_(sum_in_order(ordered[trimmed : len(parts) - trimmed].unbind()).mul_(share))
    return out


def krum(parts: Sequence[Part], *, bad: int, chosen: int) -> Tensor:
    """All weights together times the weighted mean of the `chosen` members nearest to their neighbours.

    A member's score is the sum of its n - bad - 2 smallest squared distances to others; ties go to the first. Weights
    count in the mean and not in the choice. Fewer than 3 members have no such neighbours: all are taken.

    Source: Blanchard et al., "Machine Learning with Adversaries" (2017); of several chosen the mean is taken.
    """
    num_near = len(parts) - bad - 2
    if num_near < 1:
        return weighted_sum(parts)
    scores = [sum(sorted(row)[:num_near]) for row in _distances(parts)]
    # Of more than n - bad - 2, one could be bad.
    best = sorted(sorted(range(len(parts)), key=lambda i: (scores[i], i))[: min(chosen, num_near)])
    total, taken = sum(part.weight for part in parts), sum(parts[i].weight for i in best)
    if taken <= 0:
        return sum_in_order([parts[i].values for i in best]).mul_(total / len(best))
    return weighted_sum([parts[i] for i in best]).mul_(total / taken)


def _distances(parts: Sequence[Part]) -> list[list[float]]:
    """Squared distances of each to all others, itself left out."""
    n = len(parts)
    pairs = {
        (i, j): squared_norm(parts[i].values - parts[j].values) for i in range(n) for j in range(i + 1, n)
    }
    return [[pairs[min(i, j), max(i, j)] for j in range(n) if j != i] for i in range(n)]


def centred_clip(parts: Sequence[Part], *, radius: float, rounds: int, centre: Tensor | None) -> Tensor:
    """All weights together times what some rounds of clipped steps from `centre` (zero if None) come to.

    Each round moves the centre by the weighted mean of the differences from it, those longer than `radius` times their
    lower median norm scaled down to that.

    Source: Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust Optimization" (2021), their radius
    given by the members instead of a constant.
    """
    total = sum(part.weight for part in parts)
    at = torch.zeros_like(parts[0].values) if centre is None else centre.clone()
    for _ in range(rounds):
        apart = [part_of(part.values - at, part.weight / total) for part in parts]
        at.add_(norm_clipped(apart, times=radius))
    return at.mul_(total)


def clipped_gossip(own: Tensor, parts: Sequence[Part], *, radius: float) -> Combined:
    """own + sum of weight * (values - own), differences longer than `radius` times their lower median scaled down.

    Args:
        own: what this member itself has sent; whoever is refused at the gates leaves its weight here.
        parts: those of the neighbours, without oneself, weighted by this member's row.

    Source: He, Karimireddy and Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip" (2022), their radius
    given by the neighbours instead of what is known of the honest ones.
    """
    refused = gates(parts, usual=math.sqrt(squared_norm(own)))
    out = {refusal.part for refusal in refused}
    apart = [part_of(part.values - own, part.weight) for index, part in enumerate(parts) if index not in out]
    return Combined(values=own + norm_clipped(apart, times=radius) if apart else own.clone(), refused=refused)


def _shrink(norm: float, longest: float) -> float:
    """Factor that takes a vector of this norm down to the longest allowed; 1 for shorter ones."""
    return 1.0 if norm <= longest else longest / norm
