"""A plan explained: everything that `skein plan` says about it, as values."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from client.planning.account import (
    CriticalWay,
    critical_way,
    holders_of,
    reduction_bytes,
    transfer_counts,
    visited,
)
from client.planning.case import KnownProblem, without_reduction
from client.planning.estimates import Estimate
from client.planning.members import PortfolioStanding
from client.planning.messages import SEARCH, Bounded, Objective, PlanFound
from skein.plan.mesh.room import FullestDevice
from skein.plan.route.evaluate import timeline
from skein.plan.route.problem import Problem, Routing, Timeline
from skein.plan.route.room import peak_held
from skein.topology.doubts import LinkDoubt

_MARGIN = 1e-9
_MUCH = 0.1
"""Share of the makespan that aggregation may add unmentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRow:
    """Way of one microbatch, and when its last backward ends."""

    microbatch: int
    workers: tuple[str, ...]
    stages: tuple[int, ...]
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetRow:
    """Number of microbatches that visit these stages, in this order."""

    stages: tuple[int, ...]
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The planned step and what it is made of.

    `makespan_s` ends with the last backward, `exposed_s` is what aggregation adds. `compute_s`, `transfer_s`,
    `queued_s` (waiting for a busy link) and `reduction_s` are those of the critical way and sum to the objective. The
    rest names who is on it longest, and where forwards had to wait for a slot.
    """

    step_s: float
    makespan_s: float
    exposed_s: float
    jittered_mean_s: float
    compute_s: float
    transfer_s: float
    queued_s: float
    reduction_s: float
    reduced_stage: int | None
    compute_s_by_worker: Mapping[str, float]
    transfer_s_by_link: Mapping[str, float]
    slot_waits_by_worker: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """Stages, memory and work of a worker.

    `held` microbatches at most, of its `slots`; `held_bytes` with parameters and all, of its `memory_bytes`, None where
    nobody said; `busy_s` at work in a step. Of a mesh the fullest of `num_devices` needs `device_bytes` of its
    `device_room_bytes`; no stage is shared by more than `num_used_devices`.
    """

    worker: str
    stages: tuple[int, ...]
    held: int
    slots: int
    held_bytes: int | None
    memory_bytes: int | None
    busy_s: float
    num_devices: int = 1
    num_used_devices: int = 1
    device_bytes: int | None = None
    device_room_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """Traffic of a link in a step."""

    sender: str
    receiver: str
    num_tensors: int
    tensor_bytes: int | None
    reduction_bytes: int
    tensors_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRow:
    """No plan is faster than `seconds`; `gap` is how far above it this one is, as a share of it."""

    seconds: float
    binding: str
    gap: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRow:
    """An order that the search began with, by its name in docs/schedules.md, and a step of it under jitter."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEffort:
    """Effort of finding the plan."""

    seconds: float
    first_plan_s: float | None
    num_moves: int
    moves_per_s: float
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of it. `started` has the shortest first; `settled` says how what the job left open was settled."""

    instance: str
    method: str
    seed: int
    objective: Objective
    num_workers: int
    num_stages: int
    path_len: int
    num_microbatches: int
    placement: tuple[tuple[str, ...], ...]
    subsets: tuple[SubsetRow, ...]
    paths: tuple[PathRow, ...]
    parts: StepParts
    bound: BoundRow | None
    workers: tuple[WorkerRow, ...]
    links: tuple[LinkRow, ...]
    aggregation: Estimate | None
    warnings: tuple[str, ...]
    effort: SearchEffort
    started: tuple[StartRow, ...] = ()
    settled: str = ""


def report(case: KnownProblem, standing: PortfolioStanding, plan: PlanFound, effort: SearchEffort) -> Report:
    """The report on `plan`."""
    problem = case.problem
    routing = plan.routing
    times = timeline(problem, routing)
    bound = None if standing.bound is None else _bound(standing.bound, plan.step_s)
    holders = [holders_of(problem, routing, stage) for stage in range(problem.num_stages)]
    return Report(
        instance=problem.name,
        method=SEARCH,
        seed=plan.seed,
        objective=case.objective,
        num_workers=problem.num_workers,
        num_stages=problem.num_stages,
        path_len=problem.path_len,
        num_microbatches=problem.num_microbatches,
        placement=tuple(_named(case, held) for held in holders),
        subsets=_subsets(problem, routing),
        paths=_paths(case, problem, routing, times),
        parts=_parts(case, problem, plan, times),
        bound=bound,
        workers=_workers(case, problem, routing),
        links=_links(case, problem, routing),
        aggregation=None if case.cost_among is None else case.cost_among(holders),
        warnings=(
            *case.remarks,
            *_doubts(case, problem, routing),
            *_left_out(case, times),
            *standing.losses,
        ),
        effort=effort,
        started=tuple(StartRow(name=name, seconds=seconds) for name, seconds in standing.started),
        settled=case.settled,
    )


def _left_out(case: KnownProblem, times: Timeline) -> tuple[str, ...]:
    """Says so where a plan was made for its makespan and aggregation then takes long."""
    exposed_s = times.step_s - times.makespan_s
    if case.objective is Objective.STEP or exposed_s <= _MUCH * times.makespan_s:
        return ()
    return (
        f"aggregation, which was not planned for, adds {exposed_s:,.3g} s: --objective step plans for it",
    )


def _named(case: KnownProblem, workers: Sequence[int]) -> tuple[str, ...]:
    return tuple(case.names[worker] for worker in workers)


def _subsets(problem: Problem, routing: Routing) -> tuple[SubsetRow, ...]:
    counts = Counter(map(tuple, problem.stage_of[visited(problem, routing)].tolist()))
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return tuple(SubsetRow(stages=stages, num_microbatches=count) for stages, count in ranked)


def _paths(case: KnownProblem, problem: Problem, routing: Routing, times: Timeline) -> tuple[PathRow, ...]:
    return tuple(
        PathRow(
            microbatch=microbatch,
            workers=_named(case, routing.worker_of[way].tolist()),
            stages=tuple(problem.stage_of[way].tolist()),
            end_s=float(times.end_s[microbatch]),
        )
        for microbatch, way in enumerate(visited(problem, routing))
    )


def _parts(case: KnownProblem, problem: Problem, plan: PlanFound, times: Timeline) -> StepParts:
    routing = plan.routing
    is_step = case.objective is Objective.STEP
    judged = problem if is_step else without_reduction(problem)
    way = critical_way(judged, routing, times if is_step else timeline(judged, routing))
    names = case.names
    return StepParts(
        step_s=times.step_s,
        makespan_s=times.makespan_s,
        exposed_s=times.step_s - times.makespan_s,
        jittered_mean_s=plan.jittered_s,
        compute_s=way.compute_s,
        transfer_s=way.transfer_s,
        queued_s=way.queued_s,
        reduction_s=way.reduction_s,
        reduced_stage=way.reduced_stage,
        compute_s_by_worker={names[w]: x for w, x in way.compute_s_by_worker().items()},
        transfer_s_by_link={
            f"{names[sender]} -> {names[receiver]}": x
            for (sender, receiver), x in way.transfer_s_by_link().items()
        },
        slot_waits_by_worker=_slot_waits(case, routing, way),
    )


def _slot_waits(case: KnownProblem, routing: Routing, way: CriticalWay) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for chunk, count in way.num_slot_waits_by_chunk().items():
        counts[case.names[int(routing.worker_of[chunk])]] += count
    return dict(counts.most_common())


def _bound(bound: Bounded, predicted_s: float) -> BoundRow:
    return BoundRow(
        seconds=bound.seconds,
        binding=bound.binding,
        gap=predicted_s / bound.seconds - 1 if bound.seconds > 0 else float("inf"),
        parts=dict(bound.parts),
    )


def _workers(case: KnownProblem, problem: Problem, routing: Routing) -> tuple[WorkerRow, ...]:
    peak, busy_s = peak_held(problem, routing), _busy_s(problem, routing)
    memory, fullest = case.memory, _fullest(case, problem, routing)
    rows = []
    for worker, name in enumerate(case.names):
        chunks = np.flatnonzero(routing.worker_of == worker)
        stages, device = problem.stage_of[chunks], fullest.get(worker)
        rows.append(
            WorkerRow(
                worker=name,
                stages=tuple(stages.tolist()),
                held=int(peak[chunks].sum()),
                slots=int(problem.slots[worker, stages].sum()),
                held_bytes=None
                if memory is None
                else memory.held_bytes(stages.tolist(), peak[chunks].tolist()),
                memory_bytes=None if memory is None else memory.worker_bytes[worker],
                busy_s=busy_s[worker],
                num_devices=1 if device is None else device.num_devices,
                num_used_devices=1 if device is None else device.num_used,
                device_bytes=None if device is None else device.needed_bytes,
                device_room_bytes=None if device is None else device.room_bytes,
            )
        )
    return tuple(rows)


def _fullest(case: KnownProblem, problem: Problem, routing: Routing) -> Mapping[int, FullestDevice]:
    """The fullest device of each mesh, by the place of its worker."""
    if case.fullest is None:
        return {}
    held: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for chunk, num in enumerate(peak_held(problem, routing).tolist()):
        held[int(routing.worker_of[chunk])][int(problem.stage_of[chunk])] = int(num)
    return case.fullest(held)


def _busy_s(problem: Problem, routing: Routing) -> list[float]:
    busy_s = np.zeros(problem.num_workers)
    hops = routing.path[:, : problem.num_hops].ravel()
    workers, stages = routing.worker_of[hops], problem.stage_of[hops]
    np.add.at(busy_s, workers, problem.visit_s[workers, stages])
    losses = routing.worker_of[routing.path[:, problem.num_hops]]
    np.add.at(busy_s, losses, problem.loss_s[losses])
    return [float(x) for x in busy_s]


def _links(case: KnownProblem, problem: Problem, routing: Routing) -> tuple[LinkRow, ...]:
    """Links that carry something, those longest at tensors first; of equal ones, those with most bytes."""
    counts, reduced = transfer_counts(problem, routing), reduction_bytes(problem, routing)
    tensors_s = counts * problem.transfer_s
    senders, receivers = np.nonzero((counts > 0) | (reduced > 0))
    rows = [
        LinkRow(
            sender=case.names[sender],
            receiver=case.names[receiver],
            num_tensors=int(counts[sender, receiver]),
            tensor_bytes=None
            if case.boundary_bytes is None
            else int(counts[sender, receiver]) * case.boundary_bytes,
            reduction_bytes=round(reduced[sender, receiver]),
            tensors_s=float(tensors_s[sender, receiver]),
        )
        for sender, receiver in zip(senders.tolist(), receivers.tolist(), strict=True)
    ]
    return tuple(
        sorted(rows, key=lambda row: (-row.tensors_s, -(row.tensor_bytes or 0) - row.reduction_bytes))
    )


def _doubts(case: KnownProblem, problem: Problem, routing: Routing) -> tuple[str, ...]:
    """Questioned links, those of one pair of names together, and whether the plan uses any."""
    counts, reduced = transfer_counts(problem, routing), reduction_bytes(problem, routing)
    pairs: dict[tuple[int, int], list[LinkDoubt]] = {}
    for doubt in case.doubts:
        ends = min(doubt.sender, doubt.receiver), max(doubt.sender, doubt.receiver)
        pairs.setdefault(ends, []).append(doubt)
    told = []
    for (one, other), doubts in list(pairs.items())[:_MAX_DOUBTS]:
        worst = doubts[0]
        num_tensors = sum(int(counts[x.sender, x.receiver]) for x in doubts)
        aggregates = any(reduced[x.sender, x.receiver] > 0 for x in doubts)
        told.append(
            f"link {case.names[one]} - {case.names[other]} takes {worst.seconds:.3g} s, {worst.factor:.0f} times the "
            f"usual {worst.usual_s:.3g} s of {worst.like}: measure it again; {_use(num_tensors, aggregates=aggregates)}"
        )
    if len(pairs) > _MAX_DOUBTS:
        told.append(f"links of {len(pairs) - _MAX_DOUBTS} more pairs of workers are as slow")
    return tuple(told)


def _use(num_tensors: int, *, aggregates: bool) -> str:
    """Use that a plan makes of a link."""
    uses = [f"sends {num_tensors} tensors over it"] * (num_tensors > 0) + ["aggregates over it"] * aggregates
    return f"this plan {' and '.join(uses) or 'avoids it'}"


_MAX_DOUBTS = 5
"""Pairs of workers whose link is questioned in words."""
