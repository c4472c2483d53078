"""Alternates and groups: the parts of a plan that follow from its chunks alone."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from skein.config.job import JobSpec
from skein.model.reduced import reduced_by_group
from skein.plan.agreeing.exchange import Row
from skein.plan.agreeing.rounds import rows_of
from skein.plan.clock.timing import pattern_of
from skein.plan.load import num_shards
from skein.plan.place import Pool
from skein.plan.plan import Alternates, Group
from skein.topology.consensus import choose
from skein.topology.links import LinkMatrices
from skein.types import ChunkRef, GroupId, StageSpec, WorkerId

_MAX_ALTERNATES = 8
"""Most alternates of a chunk. A stage of a large fleet has hundreds of holders, and nobody tries them all."""


def alternates_of(chunks: Sequence[ChunkRef], pool: Pool) -> Iterator[Alternates]:
    """For each chunk the nearest others of its stage, by the round trip of a boundary tensor."""
    position = {worker: i for i, worker in enumerate(pool.workers)}
    holders: defaultdict[int, list[ChunkRef]] = defaultdict(list)
    for chunk in sorted(chunks):
        holders[chunk.stage].append(chunk)
    for chunk in chunks:
        held = holders[chunk.stage]
        away_s = pool.round_trip_s[position[chunk.worker], [position[x.worker] for x in held]]
        nearest = (held[i] for i in np.argsort(away_s, kind="stable") if held[i] != chunk)
        yield Alternates(chunk=chunk, others=tuple(islice(nearest, _MAX_ALTERNATES)))


def groups_of(
    job: JobSpec,
    stages: Sequence[StageSpec],
    chunks: Sequence[ChunkRef],
    pool: Pool,
) -> Iterator[tuple[Group, int]]:
    """A plan's groups, each with its bytes."""

    def group(name: GroupId, members: tuple[ChunkRef, ...], num_bytes: int) -> Group:
        workers = tuple(dict.fromkeys(member.worker for member in members))
        shards = num_shards(num_bytes, len(workers))
        pattern = pattern_of(job.aggregation, workers, shards, num_bytes, pool)
        weights = _measured_weights(job, workers, num_bytes, pool)
        return Group(group=name, members=members, num_shards=shards, pattern=pattern, weights=weights)

    for name, reduced in reduced_by_group(job.model, tuple(stages)).items():
        num_bytes = reduced.num_parameters * job.word_bytes
        members = tuple(chunk for stage in reduced.stages for chunk in chunks if chunk.stage == stage)
        yield group(name, members, num_bytes), num_bytes


def _measured_weights(
    job: JobSpec, workers: Sequence[WorkerId], num_bytes: int, pool: Pool
) -> tuple[Row, ...]:
    """Rows of gossip over a graph that the links choose; none for any other job."""
    mixed = job.aggregation.neighbourhood
    if mixed is None or mixed.graph != "measured":
        return ()
    at = np.ix_(*([pool.workers.index(worker) for worker in workers],) * 2)
    links = LinkMatrices(
        latency_s=pool.links.latency_s[at],
        bytes_per_s=pool.links.bytes_per_s[at],
        crosses_sites=pool.links.crosses_sites[at],
    )
    return rows_of(choose(links, num_bytes=num_bytes).mixing)
