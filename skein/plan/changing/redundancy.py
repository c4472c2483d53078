"""Holders that a job asks for and a plan has not: of which stage, what a death then costs, and who has no room."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from skein.config.job import JobSpec
from skein.plan.load import StageLoad, stage_loads, together_bytes
from skein.plan.plan import Plan
from skein.topology.fleet import Fleet
from skein.types import StageIndex, WorkerId
from skein.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A worker that does not hold a stage because so many bytes of memory are missing for it."""

    worker: WorkerId
    missing_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A stage with fewer holders than the job asks for.

    If all of them die the job goes back by up to `num_steps`.
    """

    stage: StageIndex
    num_holders: int
    num_asked: int
    num_steps: int
    left_out: tuple[LeftOut, ...] = ()

    @property
    def words(self) -> str:
        """For people.

        >>> Shortfall(stage=StageIndex(0), num_holders=1, num_asked=2, num_steps=20).words
        'stage 0 has 1 holder of 2 asked: a death costs up to 20 steps'
        """
        one = self.num_holders == 1
        holders = f"{self.num_holders} holder{'' if one else 's'} of {self.num_asked} asked"
        deaths = "a death costs" if one else f"{self.num_holders} deaths at once cost"
        steps = f"{self.num_steps} step{'' if self.num_steps == 1 else 's'}"
        room = f" ({_told(self.left_out)})" if self.left_out else ""
        return f"stage {self.stage} has {holders}{room}: {deaths} up to {steps}"


_MOST_NAMED = 3


def _told(left_out: Sequence[LeftOut]) -> str:
    named = [f"{x.worker} lacks {format_bytes(x.missing_bytes)} of memory" for x in left_out[:_MOST_NAMED]]
    more = len(left_out) - len(named)
    return ", ".join(named) + (f" and {more} more lack some too" if more else "")


def num_missing(plan: Plan, asked: int) -> int:
    """Holders that stages lack, together."""
    return sum(max(0, asked - len(plan.holders(stage.index))) for stage in plan.stages)


def shortfalls(plan: Plan, job: JobSpec, fleet: Fleet) -> tuple[Shortfall, ...]:
    """Stages of `plan` with fewer holders than `job` asks for, by index; in `LOOP` the head counts as the first one.

    Args:
        plan: of this job.
        job: what is trained.
        fleet: workers that may be given work; those without room for a stage are named.
    """
    asked = job.parallel.replicas
    if not num_missing(plan, asked):
        return ()
    loads = stage_loads(job, plan.stages)
    is_loop = plan.layout.comes_back
    found = []
    for stage in plan.stages[: len(plan.stages) - is_loop]:
        num_holders = len(plan.holders(stage.index))
        if num_holders < asked:
            found.append(
                Shortfall(
                    stage=stage.index,
                    num_holders=num_holders,
                    num_asked=asked,
                    num_steps=_num_steps(plan, job, fleet),
                    left_out=_left_out(plan, fleet, loads, stage.index),
                )
            )
    return tuple(found)


def _num_steps(plan: Plan, job: JobSpec, fleet: Fleet) -> int:
    """Steps that a job goes back at most that has lost all holders of a stage: to a copy elsewhere or a checkpoint."""
    steps, saved = job.total_steps, job.checkpoint.every_steps
    workers = {worker.worker for worker in fleet.workers}
    has_elsewhere = all(workers.difference(plan.holders(stage.index)) for stage in plan.stages)
    copied = job.backup.every_steps if has_elsewhere else 0
    return min(every for every in (steps, saved, copied) if every)


def _left_out(plan: Plan, fleet: Fleet, loads: Sequence[StageLoad], stage: StageIndex) -> tuple[LeftOut, ...]:
    """Workers that cannot hold `stage` beside what they hold."""
    wanted = [stage, plan.stages[-1].index] if plan.layout.comes_back and stage == 0 else [stage]
    held: defaultdict[WorkerId, list[StageIndex]] = defaultdict(list)
    for x in plan.chunks:
        held[x.chunk.worker].append(x.chunk.stage)
    holders = set(plan.holders(stage))
    found = []
    for worker in fleet.workers:
        together = [loads[at] for at in (*wanted, *held[worker.worker])]
        missing = together_bytes(together, [1] * len(together)) - worker.profile.memory_bytes
        if worker.worker not in holders and missing > 0:
            found.append(LeftOut(worker=worker.worker, missing_bytes=missing))
    return tuple(found)
