"""Problems to be replanned: towns of workers, a first routing, and changes of the fleet drawn by Hypothesis."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from skein.plan.replan.before import LOST, Before
from skein.plan.replan.routing import Moving
from skein.plan.route.evaluate import ordered
from skein.plan.route.problem import F64, I64, Problem, Reduction, Routing
from skein.plan.route.rounds import slices
from skein.plan.route.search import Search
from skein.plan.route.start import first_paths
from skein.types import Layout

NUM_MOVES = 3_000
"""Enough for every part of replanning to run."""


def problem(
    sizes: Sequence[int],
    *,
    num_workers: int | None = None,
    layout: Layout = Layout.LOOP,
    path_len: int | None = None,
    num_microbatches: int = 8,
    slots: int = 3,
    far_s: float = 2.0,
    grad_bytes: float = 1e6,
    chunks_per_worker: int | None = 1,
) -> Problem:
    """Equal workers, in turn in two towns; a transfer takes 0.1 s inside one and `far_s` between."""
    count = num_workers or sum(sizes)
    town = np.arange(count) % 2
    transfer_s = np.where(town[:, None] == town[None, :], 0.1, far_s)
    np.fill_diagonal(transfer_s, 0.0)
    bytes_per_s = np.where(town[:, None] == town[None, :], 1e8, 1e6)
    np.fill_diagonal(bytes_per_s, np.inf)
    shape = (count, len(sizes))
    origins = np.bincount(np.arange(num_microbatches) % sizes[0], minlength=sizes[0])
    return Problem(
        name="towns",
        layout=layout,
        stage_sizes=tuple(sizes),
        path_len=path_len or len(sizes),
        num_by_origin=tuple(int(x) for x in origins),
        max_swaps=1,
        max_jump=4,
        forward_s=np.full(shape, 1.0),
        backward_s=np.full(shape, 2.0),
        loss_s=np.full(count, 0.5),
        transfer_s=transfer_s,
        wire_s=0.5 * transfer_s,
        slots=np.full(shape, slots),
        reduction=Reduction(
            num_bytes=np.full(len(sizes), grad_bytes), latency_s=0.1 * transfer_s, bytes_per_s=bytes_per_s
        ),
        chunks_per_worker=chunks_per_worker,
    )


def routed(of: Problem) -> Routing:
    """Workers in order, and whatever order of ops comes first."""
    paths = first_paths(of)
    assert isinstance(paths, np.ndarray), paths
    found = ordered(of, np.resize(np.arange(of.num_workers), of.num_chunks).astype(np.int64), paths)
    assert found is not None
    return found


def searched(of: Problem) -> Routing:
    """A routing that is hard to better."""
    search = Search(of, seed=0)
    for slice_ in slices(40_000, search.problem.num_ops):
        search.run(slice_)
    assert search.best is not None
    return search.best.routing


def holders(of: Problem, routing: Routing, stage: int) -> list[int]:
    """Who holds a stage, sorted."""
    return sorted(routing.worker_of[of.stage_of == stage].tolist())


def without(of: Problem, *lost: int) -> list[int]:
    """All workers but these."""
    return [worker for worker in range(of.num_workers) if worker not in lost]


def some(of: Problem, workers: Sequence[int]) -> Problem:
    """The problem of these workers only, in this order."""
    at = np.array(workers)
    square = np.ix_(at, at)
    reduction = of.reduction
    assert reduction is not None
    return replace(
        of,
        forward_s=of.forward_s[at],
        backward_s=of.backward_s[at],
        loss_s=of.loss_s[at],
        transfer_s=of.transfer_s[square],
        wire_s=of.wire_s[square],
        slots=of.slots[at],
        reduction=replace(
            reduction, latency_s=reduction.latency_s[square], bytes_per_s=reduction.bytes_per_s[square]
        ),
    )


def before_of(of: Problem, routing: Routing, workers: Sequence[int]) -> Before:
    """What `routing` is to the fleet that has only these of its workers."""
    number = {worker: i for i, worker in enumerate(workers)}
    now: I64 = np.array([number.get(int(worker), LOST) for worker in routing.worker_of], np.int64)
    return Before(stage_sizes=of.stage_sizes, worker_of=now, path=routing.path, sequence=routing.sequence)


def moving(
    now: Problem, *, state_bytes: float = 1e6, steps_left: int | None = None, most_chunks: int | None = None
) -> Moving:
    """Every stage as big, and a second to fetch it."""
    shape = (now.num_workers, now.num_stages)
    fetch_s: F64 = np.ones(shape)
    return Moving(
        state_bytes=np.full(now.num_stages, state_bytes) * (1 + np.arange(now.num_stages)),
        fetch_s=fetch_s,
        steps_left=steps_left,
        most_chunks=now.num_workers if most_chunks is None else most_chunks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A routing, and who of its workers is left; the problem may have workers that had no chunk."""

    problem: Problem
    routing: Routing
    left: tuple[int, ...]

    @property
    def now(self) -> Problem:
        return some(self.problem, self.left)

    @property
    def before(self) -> Before:
        return before_of(self.problem, self.routing, self.left)


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """Losses of up to half of the workers, and up to two idle ones."""
    layout = draw(st.sampled_from(Layout))
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    idle = draw(st.integers(0, 2))
    of = problem(
        sizes,
        num_workers=sum(sizes) + idle,
        layout=layout,
        path_len=draw(st.integers(2, len(sizes))),
        num_microbatches=draw(st.integers(max(4, sizes[0]), 8)),
        slots=draw(st.integers(1, 3)),
        far_s=draw(st.sampled_from([0.1, 2.0])),
    )
    least = max(len(sizes), (of.num_workers + 1) // 2)
    left = draw(
        st.lists(st.integers(0, of.num_workers - 1), min_size=least, max_size=of.num_workers, unique=True)
    )
    return Change(problem=of, routing=routed(of), left=tuple(sorted(left)))
