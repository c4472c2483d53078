"""Numbers of a step, made from its votes: what each group's sums are weighed with, clipping included.

Rules of this file
- A stage's gradient is a sum over the microbatches that visited it, so it is divided by their tokens and no others.
- One walker has one norm over all its stages and one clip. Many walkers have one of each for every walker; then a
  weight has the clip in it, and a walker that is not finite has weight 0.
- Before a compressed exchange the common norm is not known, for nobody has the sum: each chunk is clipped by its own.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, inf, isfinite, sqrt

from skein.numeric.sums import exact_sum
from skein.plan.agreeing.rounds import StepGroups
from skein.protocol.messages.array_rounds import ArrayRound
from skein.protocol.messages.reports import StageDone, Vote
from skein.types import ChunkRef, GroupId, MicrobatchId

_TINY = 1e-6
"""Keeps a norm of zero from dividing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Outcome of a step. `reason`: why it is to be skipped, empty if it is not. `clip` is common to all groups."""

    reason: str
    loss: float
    num_tokens: int
    gradient_norm: float
    clip: float
    weights: Mapping[GroupId, float]
    num_tokens_by_group: Mapping[GroupId, int]


def weigh(
    groups: StepGroups,
    votes: Sequence[Vote],
    visitors: Mapping[GroupId, int],
    *,
    loss_sum: float,
    num_tokens: int,
    clip_norm: float | None,
) -> Numbers:
    """The numbers of a step whose reductions are voted on.

    Args:
        groups: of the step.
        votes: one for each reduced group, that stands for all; none for those of late walkers.
        visitors: valid tokens by which each of these groups divides: where several chunks share a stage's gradient,
            those of all of them.
        loss_sum: nats over all microbatches.
        num_tokens: valid tokens of all microbatches.
        clip_norm: above which a mean gradient is scaled down; None: never.
    """
    by_group = {vote.group: vote for vote in votes}
    sharing = groups.num_sharing or (1,) * len(groups.reduced)
    # A mean over so many chunks is to be the stage's gradient, so each has so many times its share of it.
    times = {group.group: n for group, n in zip(groups.reduced, sharing, strict=True)}
    spoilt = [v.group for v in votes if not v.is_finite or not 0.0 <= v.squared_norm < inf]
    weights: dict[GroupId, float] = {}
    norms: list[float] = []
    clip = 1.0
    for unit in groups.units:
        own = [by_group[group] for group in unit if group in by_group]
        if len(own) < len(unit):
            continue  # A late walker's.
        norm = inf if set(unit) & set(spoilt) else _norm(own, visitors, times, num_tokens)
        factor = 0.0 if norm == inf else clip_of(norm, clip_norm)
        norms.append(norm)
        if groups.has_one_norm:
            clip, factor = factor, 1.0
        for group in unit:
            weights[group] = factor * times[group] / visitors[group] if visitors[group] else 0.0
    finite = [norm for norm in norms if norm < inf]
    reason = ""
    if not num_tokens:
        reason = "no valid token in the batch"
    elif not isfinite(loss_sum) and not groups.may_lose_some:
        reason = "loss not finite"
    elif spoilt and not (groups.may_lose_some and finite):
        reason = "gradient not finite in " + ", ".join(sorted(map(str, spoilt)))
    elif not finite or (len(finite) < len(norms) and not groups.may_lose_some):
        reason = "gradient norm not finite"
    return Numbers(
        reason=reason,
        loss=loss_sum * (1.0 / num_tokens) if num_tokens else 0.0,
        num_tokens=num_tokens,
        gradient_norm=_typical(finite),
        clip=1.0 if reason else clip,
        weights=weights,
        # Who makes no step has learned nothing.
        num_tokens_by_group={group: n if weights.get(group) else 0 for group, n in visitors.items()},
    )


def weigh_array(array: ArrayRound, votes: Sequence[Vote]) -> Numbers:
    """Numbers of a round of an array: its rows have decided on their steps, and what these came to is taken."""
    norms = [x.gradient_norm for x in array.rows if not x.retired and x.gradient_norm < inf]
    return Numbers(
        reason="",
        loss=array.loss,
        num_tokens=array.num_tokens,
        # Squares of what a row tells of may be beyond what a float holds.
        gradient_norm=hypot(*norms) / sqrt(len(norms)) if norms else 0.0,
        clip=1.0,
        weights={vote.group: 1.0 for vote in votes},
        num_tokens_by_group={vote.group: array.num_tokens for vote in votes},
    )


def _norm(
    votes: Sequence[Vote], visitors: Mapping[GroupId, int], times: Mapping[GroupId, int], num_tokens: int
) -> float:
    """Norm of the mean gradient of groups that are clipped together; infinite if it is beyond what a float holds."""
    # The common weight stays outside: where nothing is skipped, the sum is that of the plain squares.
    squared = exact_sum(
        v.squared_norm * (num_tokens * times[v.group] / visitors[v.group]) ** 2
        for v in votes
        if visitors[v.group]
    )
    if not squared < inf:
        return inf
    return sqrt(squared) * (1.0 / num_tokens) if num_tokens else 0.0


def _typical(norms: Sequence[float]) -> float:
    """The norm, or the root of the mean square of several; 0 of none."""
    if len(norms) < 2:
        return norms[0] if norms else 0.0
    return sqrt(exact_sum(norm**2 for norm in norms) / len(norms))


def clip_of(norm: float, clip_norm: float | None) -> float:
    """The factor that brings a norm down to `clip_norm`; 1 for a smaller one."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + _TINY))


def visitors_of(
    done: Iterable[StageDone],
    chunks_by_group: Mapping[GroupId, Collection[ChunkRef]],
    expected: Mapping[ChunkRef, tuple[MicrobatchId, ...]],
) -> dict[GroupId, int]:
    """Valid tokens of the microbatches that visited each group's chunks, as told where losses are."""
    tokens: Counter[MicrobatchId] = Counter()
    for report in done:
        if report.tokens:
            tokens.update(dict(zip(report.ledger.microbatches, report.tokens, strict=True)))
    return {
        group: sum(tokens[m] for m in {m for chunk in chunks for m in expected[chunk]})
        for group, chunks in chunks_by_group.items()
    }


def loss_sum_of(done: Sequence[StageDone], *, may_lose_some: bool) -> float:
    """Nats of all microbatches; of walkers that may be lost, the others stand in for one whose loss is not finite."""
    told = [d for d in done if d.tokens]
    fit = [d for d in told if isfinite(d.loss_sum)] if may_lose_some else told
    fit = fit or told
    num_fit, num_told = (sum(sum(d.tokens) for d in some) for some in (fit, told))
    total = exact_sum(d.loss_sum for d in fit)
    return total if len(fit) == len(told) or not num_fit else total * (num_told / num_fit)
