"""A job on a fleet as a `Problem`: a plan's stages and seats, with the fleet's times, memory and links as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from skein.config.job import JobSpec
from skein.model.reduced import reduced_by_group
from skein.model.rows import RowCut, ShardScope
from skein.plan.changing.shards import is_near
from skein.plan.changing.silent import working
from skein.plan.clock.timing import op_times
from skein.plan.load import LEAST_SHARD_BYTES, StageLoad, spared_bytes, stage_loads, together_bytes
from skein.plan.paths import shares
from skein.plan.place import Pool
from skein.plan.plan import Infeasible, Plan
from skein.plan.route.problem import F64, I64, Problem, Reduction, SharedMemory
from skein.plan.route.room import are_placed
from skein.plan.route.start import first_paths
from skein.topology.fleet import Fleet


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posed:
    """The problem of improving `plan`, with its own answer: `worker_of` and `path` as in `Routing`.

    `even_slots` are the slots where the chunks of a worker share its memory equally; the problem may have others.
    """

    problem: Problem
    pool: Pool
    loads: tuple[StageLoad, ...]
    worker_of: I64
    path: I64
    even_slots: I64


def pose(job: JobSpec, fleet: Fleet, plan: Plan, pool: Pool, *, move_s: F64 | None = None) -> Posed:
    """`plan`'s stages and numbers of holders, silent ones apart, to be placed and routed anew on `fleet`.

    Args:
        job: what is trained.
        fleet: whose workers `pool` has, in the same order.
        plan: a legal plan of this job on this fleet.
        pool: the fleet as arrays.
        move_s: see `Problem`.
    """
    loads = stage_loads(job, plan.stages)
    plan = working(plan, set(pool.workers))
    is_loop = plan.layout.comes_back
    num_stages = len(plan.stages) - is_loop
    position = {worker: i for i, worker in enumerate(pool.workers)}
    holders = [[position[w] for w in plan.holders(plan.stages[s].index)] for s in range(num_stages)]
    worker_of = np.array([worker for held in holders for worker in held], np.int64)
    chunk_at = {
        (stage, worker): chunk
        for chunk, (stage, worker) in enumerate((s, w) for s, held in enumerate(holders) for w in held)
    }
    # The head of LOOP is no chunk of its own here: such paths end at their origin's.
    rows = [[chunk_at.get((hop.stage, position[hop.worker]), -1) for hop in path.hops] for path in plan.paths]
    if is_loop:
        rows = [[*row[:-1], row[0]] for row in rows]
    path = np.array(rows, np.int64)
    origins = np.bincount(path[:, 0], minlength=len(holders[0]))
    forward_s, backward_s, weight_s = op_times(fleet, loads, pool)
    most_held = int(np.bincount(worker_of).max())
    output_bytes = float(max((load.output_bytes for load in loads[:-1]), default=0))
    wire_s = output_bytes / pool.links.bytes_per_s
    memory = _memory(loads, num_stages, pool)
    even_slots = _even_slots(memory, most_held, job.batch.num_microbatches)
    problem = Problem(
        name=job.name,
        layout=plan.layout,
        stage_sizes=tuple(len(held) for held in holders),
        path_len=job.num_visited_stages,
        num_by_origin=tuple(int(count) for count in origins),
        max_swaps=job.skip.max_swaps,
        max_jump=job.skip.max_jump or len(plan.stages),
        forward_s=forward_s[:, :num_stages],
        backward_s=backward_s[:, :num_stages],
        loss_s=forward_s[:, -1] + backward_s[:, -1],
        weight_s=weight_s[:, :num_stages],
        transfer_s=pool.links.latency_s + wire_s,
        wire_s=wire_s,
        slots=even_slots,
        memory=memory,
        reduction=_reduction(job, plan, pool),
        move_s=move_s,
        chunks_per_worker=most_held,
        is_split=any(path.split for path in plan.paths),
    )
    problem = _with_places(problem, job, fleet, worker_of)
    return Posed(
        problem=problem, pool=pool, loads=loads, worker_of=worker_of, path=path, even_slots=even_slots
    )


def _with_places(problem: Problem, job: JobSpec, fleet: Fleet, worker_of: I64) -> Problem:
    """`problem` with the places that its job allows shards of the vocabulary, if they are there now."""
    vocabulary, (inputs, between, outputs) = job.parallel.vocabulary, job.parallel.runs
    if not outputs:
        return problem
    apart = () if vocabulary.rows is RowCut.SPEED else tuple(run for run in (inputs, outputs) if run)
    kept = replace(problem, apart=apart)
    if not are_placed(kept, worker_of):
        kept = problem
    if vocabulary.scope is ShardScope.SITE:
        near = is_near(fleet, worker_of[problem.stage_of == between[-1]].tolist())
        barred = np.zeros(problem.slots.shape, np.bool_)
        for stage in (*inputs, between[-1], *outputs):
            barred[:, stage] = ~near
        limited = replace(kept, barred=barred, slots=np.where(barred, 0, problem.slots))
        kept = limited if are_placed(limited, worker_of) else kept
    return kept


def resized(posed: Posed) -> Posed | None:
    """The same workers with holders in proportion to what a stage's visits take; None where that changes nothing.

    A stage that half of the microbatches leave out needs half as many holders. Only for workers of one chunk each.
    """
    problem = posed.problem
    if problem.num_chunks > problem.num_workers or problem.chunks_per_worker not in (None, 1):
        return None
    sizes = shares(problem.num_chunks, [float(x) for x in work_s(problem)])
    if sizes == problem.stage_sizes or sizes[0] > problem.num_microbatches:
        return None
    origins = shares(problem.num_microbatches, [1.0] * sizes[0])
    other = replace(problem, stage_sizes=sizes, num_by_origin=origins, move_s=None)
    paths = first_paths(other)
    if isinstance(paths, Infeasible):
        return None
    return replace(posed, problem=other, path=paths)


def work_s(problem: Problem) -> F64:
    """(num_stages,) seconds of a step that each stage's ops take on a worker of middling speed."""
    visit_s = problem.visit_s.mean(axis=0)
    seconds: F64 = visit_s * np.array(problem.visits_by_stage)
    if problem.layout.comes_back:
        seconds[0] += problem.loss_s.mean() * problem.num_microbatches
    return seconds


def _memory(loads: Sequence[StageLoad], num_stages: int, pool: Pool) -> SharedMemory:
    fixed_bytes = [load.fixed_bytes for load in loads[:num_stages]]
    if num_stages < len(loads):
        fixed_bytes[0] = together_bytes([loads[0], loads[-1]], [0, 1])  # the head of LOOP
    return SharedMemory(
        memory_bytes=pool.memory_bytes.astype(np.int64),
        fixed_bytes=np.array(fixed_bytes, np.int64),
        slot_bytes=np.array([max(1, load.slot_bytes) for load in loads[:num_stages]], np.int64),
        spared_bytes=spared_bytes(loads[:num_stages]),
    )


def _even_slots(memory: SharedMemory, most_held: int, most: int) -> I64:
    """Slots by worker and stage, where as many chunks as the fullest worker holds share each memory equally."""
    share_bytes = memory.memory_bytes[:, None] // most_held
    slots: I64 = np.clip((share_bytes - memory.fixed_bytes) // memory.slot_bytes, 0, most)
    return slots


def _reduction(job: JobSpec, plan: Plan, pool: Pool) -> Reduction:
    own, shared_bytes, firsts = [0.0] * len(plan.stages), [], set[int]()
    for reduced in reduced_by_group(job.model, plan.stages).values():
        num_bytes = float(reduced.num_parameters * job.word_bytes)
        if len(reduced.stages) == 1:
            own[reduced.stages[0]] += num_bytes
        else:
            shared_bytes.append(num_bytes)
            firsts.add(reduced.stages[0])
    # Blocks of one stage that several others hold go over its links together.
    is_paired = len(firsts) == len(shared_bytes) > 1
    shared = max(shared_bytes) if is_paired else sum(shared_bytes)
    if plan.layout.comes_back:
        # Both ends are at the same workers.
        own[0] += own.pop() + shared
        shared = 0.0
    return Reduction(
        num_bytes=np.array(own),
        latency_s=pool.links.latency_s,
        bytes_per_s=pool.links.bytes_per_s,
        tied_bytes=shared,
        num_tied=len(firsts) if is_paired else 1,
        least_shard_bytes=float(LEAST_SHARD_BYTES),
    )
