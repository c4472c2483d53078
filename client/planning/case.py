"""Case to plan, as a user gave it: the problem, what its workers are called, and what looks wrong with it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from client.planning.files.instance import activation_bytes_of, locations_of, problem_of, remarks
from client.planning.messages import NoPlan, Objective
from skein.config.explain import Words
from skein.config.job import JobSpec
from skein.errors import UserError
from skein.plan.changing.clauses import Clause
from skein.plan.changing.leeway import is_settled
from skein.plan.changing.shards import shard_stages
from skein.plan.load import spared_bytes, together_bytes
from skein.plan.mesh.room import FullestDevice, fullest_devices
from skein.plan.plan import ChunkPlan, Infeasible, Plan
from skein.plan.route.problem import Problem, Routing
from skein.topology.doubts import LinkDoubt, questioned_links
from skein.topology.fleet import Fleet
from skein.types import ChunkRef, StageIndex, StageSpec

if TYPE_CHECKING:
    from client.planning.estimates import Estimate
    from skein.plan.route.job_problem import Posed

_FLEET_KEYS = ("fleet", "job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that a chunk of each stage takes, by itself and for each microbatch it holds, and what workers have.

    `spared_bytes`: what two stages take less on one worker than on two, where that is anything.
    """

    fixed_bytes: tuple[int, ...]
    slot_bytes: tuple[int, ...]
    worker_bytes: tuple[int, ...]
    spared_bytes: Mapping[tuple[int, int], int]

    def held_bytes(self, stages: Sequence[int], held: Sequence[int]) -> int:
        """Memory of a worker that holds so many microbatches at chunks of these stages."""
        spared = sum(num for pair, num in self.spared_bytes.items() if set(pair) <= {*stages})
        needed = sum(self.fixed_bytes[s] + n * self.slot_bytes[s] for s, n in zip(stages, held, strict=True))
        return needed - spared


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownProblem:
    """A problem and what people know about it.

    `problem` has aggregation wherever it is known; `searched` is what a method is given. `names` are unique.
    `boundary_bytes` is what one boundary tensor weighs, None if nobody said; `start` a routing that is known already;
    `cost_among` tells what the job's aggregation costs among these holders of its stages; `shards` are stages that hold
    rows of a vocabulary in shards; `settled` says how what the job left open was settled, and rather than what.
    """

    problem: Problem
    objective: Objective
    names: tuple[str, ...]
    boundary_bytes: int | None
    remarks: tuple[str, ...]
    doubts: tuple[LinkDoubt, ...]
    memory: Memory | None = None
    start: Routing | None = None
    cost_among: "Callable[[Sequence[Sequence[int]]], Estimate] | None" = None
    shards: tuple[int, ...] = ()
    settled: str = ""
    fullest: "Callable[[Mapping[int, Mapping[int, int]]], Mapping[int, FullestDevice]] | None" = None
    """Memory of the fullest device of each mesh, by the microbatches that each worker holds at each stage."""

    @property
    def searched(self) -> Problem:
        return self.problem if self.objective is Objective.STEP else without_reduction(self.problem)


def without_reduction(problem: Problem) -> Problem:
    """`problem` up to the last backward only."""
    return replace(problem, reduction=None)


def case_of(
    text: str, *, origin: str, objective: Objective | None = None, budget_s: float | None = None
) -> KnownProblem:
    """The case in the text of an instance file, or of a file with a fleet and a job.

    Args:
        text: JSON or YAML; what begins with a brace is JSON.
        origin: where it is from, for people.
        objective: None: what the file's kind implies. An instance counts as its own format does, up to the last
            backward; a fleet's job counts the whole step.
        budget_s: of the search that follows, of which a part settles what a job leaves open; None: the job's.

    Raises:
        UserError: something is wrong with it.
        NoPlan: it makes sense, and nothing fits.
    """
    if not text.lstrip().startswith("{"):
        return _fleet_case(text, origin, objective or Objective.STEP, budget_s)
    document = _json(text, origin)
    if any(key in document for key in _FLEET_KEYS):
        return _fleet_case(text, origin, objective or Objective.STEP, budget_s)
    return _instance_case(document, objective or Objective.MAKESPAN)


def _instance_case(document: Mapping[str, object], objective: Objective) -> KnownProblem:
    problem, places = problem_of(document), locations_of(document)
    numbers = [str(worker) for worker in range(problem.num_workers)]
    names = numbers if places is None else [f"{n} {place}" for n, place in zip(numbers, places, strict=True)]
    return KnownProblem(
        problem=problem,
        objective=objective,
        names=tuple(names),
        boundary_bytes=activation_bytes_of(document),
        remarks=remarks(document),
        doubts=questioned_links(problem.transfer_s, places),
    )


def _json(text: str, origin: str) -> Mapping[str, object]:
    try:
        document: object = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{origin} line {error.lineno} column {error.colno}"
        raise UserError(where, Words("not JSON"), f"{error.msg}: give one JSON object") from error
    except RecursionError as error:
        raise UserError(origin, Words("not an instance"), "is nested too deeply") from error
    assert isinstance(document, dict), "it begins with a brace"
    return document


def _fleet_case(text: str, origin: str, objective: Objective, budget_s: float | None) -> KnownProblem:
    """A job on a fleet: stages are cut and held as the balanced planner would, and its paths are a first routing."""
    from client.planning.estimates import estimate_of_holders
    from client.planning.files.fleetfile import parse_fleet_file
    from skein.plan.balanced import pool_of
    from skein.plan.route.evaluate import ordered
    from skein.plan.route.job_problem import pose

    given = parse_fleet_file(text, origin=origin)
    fleet = given.fleet
    job, plan, why = _settled(given.job, fleet, given.job.plan.budget_s if budget_s is None else budget_s)
    fleet, unused = _timed(fleet, plan.stages)
    posed = pose(job, fleet, plan, pool_of(job, fleet))
    sites = tuple(str(worker.site) for worker in fleet.workers)

    def cost_among(holders: Sequence[Sequence[int]]) -> "Estimate":
        by_stage = [[fleet.workers[worker].worker for worker in held] for held in holders]
        everywhere = [*by_stage, by_stage[0]] if plan.layout.comes_back else by_stage
        return estimate_of_holders(job, fleet, plan.stages, everywhere)

    def fullest(held: Mapping[int, Mapping[int, int]]) -> Mapping[int, FullestDevice]:
        chunks = [
            ChunkPlan(
                chunk=ChunkRef(stage=StageIndex(stage), worker=fleet.workers[worker].worker),
                slots=max(1, slots),
            )
            for worker, stages in held.items()
            for stage, slots in stages.items()
        ]
        places = {x.worker: place for place, x in enumerate(fleet.workers)}
        found = fullest_devices(job, fleet, plan.stages, chunks)
        return {places[x.worker]: x for x in found}

    return KnownProblem(
        problem=posed.problem if job.aggregation.walkers.sum_every_step else without_reduction(posed.problem),
        objective=objective,
        names=tuple(str(worker.worker) for worker in fleet.workers),
        boundary_bytes=max((load.output_bytes for load in posed.loads[:-1]), default=0),
        remarks=(*_unknown(given.num_unknown_links), *unused, *_walking(job)),
        doubts=questioned_links(posed.problem.transfer_s, sites),
        memory=_memory(posed, [worker.profile.memory_bytes for worker in fleet.workers]),
        start=ordered(posed.problem, posed.worker_of, posed.path),
        cost_among=cost_among,
        shards=tuple(sorted(shard_stages(job.model, plan.stages))),
        settled="; ".join(map(str, why)),
        fullest=fullest,
    )


def _settled(job: JobSpec, fleet: Fleet, budget_s: float) -> tuple[JobSpec, Plan, Sequence[Clause]]:
    """The job with nothing left open, a plan of it, and why it is that way.

    Raises:
        NoPlan: nothing fits.
    """
    if is_settled(job):
        from skein.plan.balanced import make_balanced_plan

        plan = make_balanced_plan(job, fleet, None, seed=job.seed)
        if isinstance(plan, Infeasible):
            raise NoPlan(plan.reason)
        return job, plan, ()
    # Only here: machine code takes long to load, and searches have to begin before it is known how stages are cut.
    from skein.plan.searched import settled_for_search

    found = settled_for_search(job, fleet, job.seed, budget_s=budget_s)
    if isinstance(found, Infeasible):
        raise NoPlan(found.reason)
    return found.job, found.plan, found.why


def _timed(fleet: Fleet, stages: Sequence[StageSpec]) -> tuple[Fleet, tuple[str, ...]]:
    """`fleet` with the stage times that are of these stages, and a remark about the others."""
    stage_at = {(stage.first, stage.stop): stage for stage in stages}
    used, others = [], set()
    for time in fleet.stage_times:
        stage = stage_at.get((time.stage.first, time.stage.stop))
        if stage is None:
            others.add((time.stage.first, time.stage.stop))
        else:
            used.append(replace(time, stage=stage))
    cuts = ", ".join(f"{first} to {stop}" for first, stop in sorted(others))
    where = ", ".join(f"{stage.first} to {stage.stop}" for stage in stages)
    unused = (f"stage times of layers {cuts} are not used: stages are layers {where}",) if others else ()
    return replace(fleet, stage_times=tuple(used)), unused


def _walking(job: JobSpec) -> tuple[str, ...]:
    """Remark where each replica is a walker: exchanges are not a sum in every step, and ways are given."""
    if job.aggregation.walkers.sum_every_step:
        return ()
    rule = job.aggregation.rule
    return (
        f"with {rule} the step here has no exchange, see aggregation for that; a coordinator keeps "
        "microbatches within their walker, so its steps may take longer",
    )


def _unknown(num_links: int) -> tuple[str, ...]:
    if not num_links:
        return ()
    return (f"{num_links} links between workers are not given: each counts as the median of its kind",)


def _memory(posed: "Posed", worker_bytes: Sequence[int]) -> Memory:
    """In LOOP the head lies with the first stage, and needs room for one microbatch at a time."""
    loads, num_stages = posed.loads, posed.problem.num_stages
    fixed = [load.fixed_bytes for load in loads[:num_stages]]
    if num_stages < len(loads):
        fixed[0] = together_bytes([loads[0], loads[-1]], [0, 1])
    elif num_stages > 1:
        fixed[-1] += loads[-1].slot_bytes  # LINE's last stage runs one microbatch from forward to backward
    return Memory(
        fixed_bytes=tuple(fixed),
        slot_bytes=tuple(load.slot_bytes for load in loads[:num_stages]),
        worker_bytes=tuple(worker_bytes),
        spared_bytes=spared_bytes(loads[:num_stages]),
    )
