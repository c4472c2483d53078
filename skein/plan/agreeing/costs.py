"""Costs of one exchange by rule: bytes that all its workers send together, seconds until all have the result.

Rules of this file
- A *circle* is the holders of one stage, or of what two stages share. Circles exchange side by side.
- Every pattern that sums a vector of B bytes over W workers and hands the sum out sends 2 (W - 1) B in total: as ring,
  as tree or directly. They differ in seconds alone.
- Bytes are of tensors with their scales, as `skein.plan.agreeing.payload` counts them.

Source: papers named at each rule in skein.numeric.aggregate, for what is sent; `skein.plan.agreeing.exchange`, for
how long that takes.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import assert_never

import numpy as np

from skein.config.job import JobSpec
from skein.config.robust import NoRobust
from skein.config.rule import GraphName, Mixes, PatternName, Reach, Signs, Spreads, Sums
from skein.plan.agreeing.broadcast import BroadcastProblem
from skein.plan.agreeing.exchange import exchange_s, pattern_called
from skein.plan.agreeing.payload import payload_bytes, sign_bytes
from skein.plan.load import num_shards
from skein.topology.consensus import choose, round_s
from skein.topology.graphs import Mixing, graph_of
from skein.topology.links import LinkMatrices
from skein.types import SiteId

_MOST_DRAWN = 16
"""Rounds of a drawn graph of which an average is taken."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Circle:
    """Workers that exchange `num_parameters` numbers of `num_tensors` tensors with each other.

    `sites` and `links` are those of the workers, in order of members; None where nobody knows who they will be.
    """

    num_parameters: int
    num_tensors: int
    num_workers: int
    sites: tuple[SiteId, ...] | None = None
    links: LinkMatrices | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of exchange: how often a step has it, what all send in it, and how long it takes if links are known."""

    per_step: float
    num_bytes: float
    seconds: float | None


def kinds_of(job: JobSpec, circle: Circle) -> Iterator[Kind]:
    """The kinds of exchange that a circle has under the job's rule; the one that it is about comes last."""
    word = job.word_bytes
    for sent in job.aggregation.sendings(job):
        match sent:
            case Sums():
                yield _summed(circle, sent, word)
            case Signs():
                yield _signs(circle, word, sent)
            case Spreads():
                yield _spread(circle, sent, word)
            case Mixes():
                yield _mixed(sent, circle, word)
            case _:
                assert_never(sent)


# --- sums ---


def reduced_bytes(circle: Circle) -> float:
    """Bytes that all workers of a circle send together for a plain sum in float32."""
    return _summed(circle, Sums(per_step=1.0, wire="fp32"), 4).num_bytes


def _summed(circle: Circle, sent: Sums, word: int) -> Kind:
    """A sum of everybody's vector, handed out to everybody.

    What is rounded, or combined by more than a sum, goes to the shards' owners directly; a combiner that compares
    whole vectors makes one worker the owner of all.
    """
    num_parameters = -(-circle.num_parameters // sent.num_pieces)
    shards = 1 if sent.robust.compares_vectors else num_shards(word * num_parameters, circle.num_workers)
    shard_bytes = payload_bytes(sent.wire, -(-num_parameters // shards), word_bytes=word)
    is_plain = sent.wire == "fp32" and isinstance(sent.robust, NoRobust)
    vector_bytes = shards * shard_bytes
    return Kind(
        per_step=sent.per_step,
        num_bytes=2 * (circle.num_workers - 1) * vector_bytes,
        seconds=_sum_s(circle, sent.pattern if is_plain else "direct", shards, vector_bytes),
    )


def _signs(circle: Circle, word: int, sent: Signs) -> Kind:
    """The same with a bit for each number; every part of a shard has all scales of its sender."""
    shards = num_shards(word * circle.num_parameters, circle.num_workers)
    num_scales = circle.num_tensors if sent.is_by_tensor else 1
    shard_bytes = sign_bytes(-(-circle.num_parameters // shards), num_scales, word_bytes=word)
    vector_bytes = shards * shard_bytes
    return Kind(
        per_step=sent.per_step,
        num_bytes=2 * (circle.num_workers - 1) * vector_bytes,
        seconds=_sum_s(circle, "direct", shards, vector_bytes),
    )


def _sum_s(circle: Circle, way: PatternName, shards: int, vector_bytes: int) -> float | None:
    links = circle.links
    if links is None or circle.num_workers < 2:
        return None
    among = links.latency_s, links.bytes_per_s
    return exchange_s(pattern_called(way, shards, vector_bytes, *among), shards, vector_bytes, *among)


# --- leaders and neighbours ---


def _spread(circle: Circle, sent: Spreads, word: int) -> Kind:
    """A leader's parameters to those that it leads: within sites, or to all; as if the first of them led.

    Where sites are not known all workers count as one site, which is the most that there can be to send.
    """
    vector_bytes = word * circle.num_parameters
    groups: Counter[SiteId | None] = Counter([None] * circle.num_workers)
    if sent.reach is Reach.GROUP:
        groups = Counter(circle.sites or (SiteId(""),) * circle.num_workers)
    is_known = sent.reach is Reach.ALL or circle.sites
    times = [_spread_s(circle, vector_bytes, site) for site in groups] if is_known else [None]
    return Kind(
        per_step=sent.per_step,
        num_bytes=sum(size - 1 for size in groups.values()) * vector_bytes,
        seconds=None if None in times else max(x for x in times if x is not None),
    )


def _spread_s(circle: Circle, vector_bytes: int, site: SiteId | None) -> float | None:
    """Seconds until all of a site, or all there are, have a vector of the first of them."""
    links = circle.links
    if links is None:
        return None
    sites = circle.sites or ()
    places = [i for i in range(circle.num_workers) if site is None or sites[i] == site]
    if len(places) < 2:
        return 0.0
    pairs = np.ix_(places, places)
    problem = BroadcastProblem(
        leader=0,
        latency_s=links.latency_s[pairs],
        bytes_per_s=links.bytes_per_s[pairs],
        num_bytes=vector_bytes,
    )
    return problem.seconds(problem.tree())


def _mixed(sent: Mixes, circle: Circle, word: int) -> Kind:
    """Each neighbour gets the same vectors; a graph that changes counts by the mean of its rounds."""
    num_ratios = circle.num_tensors if sent.has_ratios else 0
    vector_bytes = word * (sent.num_vectors * circle.num_parameters + num_ratios)
    rounds = _rounds(sent.graph, circle, vector_bytes)
    edges = [int((mixing.rows > 0).sum() - (mixing.rows.diagonal() > 0).sum()) for mixing in rounds]
    times = None
    if circle.links is not None:
        times = fmean(round_s(circle.links, (x.rows > 0).T, num_bytes=vector_bytes) for x in rounds)
    return Kind(per_step=sent.per_step, num_bytes=fmean(edges) * vector_bytes, seconds=times)


def _rounds(name: GraphName, circle: Circle, vector_bytes: int) -> list[Mixing]:
    """The rounds of one period; of a drawn graph some."""
    if name == "measured" and circle.links is not None and circle.num_workers > 2:
        return [choose(circle.links, num_bytes=vector_bytes).mixing]
    graph = graph_of("ring" if name == "measured" else name, circle.num_workers)
    return [graph.at(round_, seed=0) for round_ in range(graph.period or _MOST_DRAWN)]
