"""Cost of a job's aggregation per step, on a fleet that is known or on none: the line that users read.

Rules of this file
- Bytes are those sent, averaged over workers and over the whole job, warm-up included: what one sends another
  receives. Seconds are those of the slowest circle, if nothing overlaps with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skein.config.job import JobSpec
from skein.model.reduced import reduced_by_group
from skein.plan.agreeing.costs import Circle, Kind, kinds_of, reduced_bytes
from skein.plan.cut import cut
from skein.plan.plan import Plan
from skein.topology.fleet import Fleet
from skein.topology.links import LinkMatrices, link_cost_s
from skein.types import GroupId, StageSpec, WorkerId
from skein.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Cost of aggregation, per worker. `step_s` is None where the links are not known.

    `exchange_bytes` are those of one exchange, the rarest where a rule has two kinds; `plain_bytes` those that a step
    of all-reduce in float32 would take, and `step_s` is what exchanges take of a step if nothing overlaps with them.
    """

    rule: str
    num_workers: int
    settings: tuple[str, ...]
    """Values that the rule was settled to, where they may differ from the job file."""
    has_warmup: bool
    step_bytes: float
    exchange_bytes: float
    exchanges_per_step: float
    plain_bytes: float
    step_s: float | None

    @property
    def ratio(self) -> float:
        """Ratio of the bytes of all-reduce in float32 to those of a step here; infinite where nothing is sent."""
        return self.plain_bytes / self.step_bytes if self.step_bytes else float("inf")

    @property
    def words(self) -> str:
        """All of it in one line."""
        if not self.step_bytes:
            return f"{self._named}: nothing to send, every stage has one holder"
        took = "" if self.step_s is None else f", about {self.step_s:.3g} s if nothing overlaps"
        sent = f"{self._named}: each worker sends {format_bytes(self.step_bytes)} a step{self._exchange}"
        return f"{sent}, {_compared(self.ratio)}{took}"

    @property
    def _named(self) -> str:
        return f"{self.rule} ({', '.join(self.settings)})" if self.settings else self.rule

    @property
    def _exchange(self) -> str:
        """Size of one exchange, which a step's average hides; "" if every step has one."""
        if self.exchanges_per_step == 1:
            return ""
        one = format_bytes(self.exchange_bytes)
        if self.has_warmup:
            return f" on average, {one} after the warm-up"
        return f" ({one} every {1 / self.exchanges_per_step:.3g} steps)"


def estimate(job: JobSpec, circles: Sequence[Circle], *, num_workers: int) -> Estimate:
    """Cost of the aggregation of `job` among these circles, of so many workers in all."""
    kinds = [list(kinds_of(job, circle)) for circle in circles if circle.num_workers > 1]
    plain = sum(map(reduced_bytes, circles))
    return Estimate(
        rule=job.aggregation.rule,
        num_workers=num_workers,
        settings=job.aggregation.settings,
        has_warmup=job.aggregation.has_warmup,
        step_bytes=sum(kind.per_step * kind.num_bytes for found in kinds for kind in found) / num_workers,
        exchange_bytes=sum(found[-1].num_bytes for found in kinds) / num_workers,
        exchanges_per_step=max((found[-1].per_step for found in kinds), default=0.0),
        plain_bytes=plain / num_workers,
        step_s=_slowest_s(kinds),
    )


def _slowest_s(kinds: Sequence[Sequence[Kind]]) -> float | None:
    """Seconds per step of the slowest circle, as all exchange side by side; None if any is not known."""
    slowest_s = 0.0
    for found in kinds:
        circle_s = 0.0
        for kind in found:
            if kind.seconds is None:
                return None
            circle_s += kind.per_step * kind.seconds
        slowest_s = max(slowest_s, circle_s)
    return slowest_s


def estimate_of_job(job: JobSpec) -> Estimate:
    """Cost of the aggregation of `job` on a fleet that nobody knows yet: bytes alone.

    Raises:
        UserError: the model cannot be cut into so many stages.
    """
    stages = cut(job.layers, job.parallel.num_stages, job.parallel.layout)
    circles = list(_circles(job, stages).values())
    return estimate(job, circles, num_workers=job.parallel.stages * job.parallel.replicas)


def estimate_of_plan(job: JobSpec, fleet: Fleet, plan: Plan) -> Estimate:
    """Cost of the aggregation of `job` among the holders that `plan` names, over the links of `fleet`."""
    return estimate_of_holders(job, fleet, plan.stages, [plan.holders(stage.index) for stage in plan.stages])


def estimate_of_holders(
    job: JobSpec, fleet: Fleet, stages: Sequence[StageSpec], holders: Sequence[Sequence[WorkerId]]
) -> Estimate:
    """Cost of the aggregation of `job` among these holders of each of `stages`, over the links of `fleet`."""
    position = {worker.worker: i for i, worker in enumerate(fleet.workers)}
    links, asked = link_cost_s(fleet), _circles(job, stages)
    circles = []
    for group, reduced in reduced_by_group(job.model, tuple(stages)).items():
        members = dict.fromkeys(worker for stage in reduced.stages for worker in holders[stage])
        places = [position[worker] for worker in members]
        sites = tuple(fleet.workers[i].site for i in places)
        among = _among(links, places)
        circles.append(replace(asked[group], num_workers=len(places), sites=sites, links=among))
    return estimate(job, circles, num_workers=len({worker for held in holders for worker in held}))


def _circles(job: JobSpec, stages: Sequence[StageSpec]) -> Mapping[GroupId, Circle]:
    """Circles of as many workers as the job asks for, by the names that plans give to groups."""
    num_bodies = len(stages) - job.parallel.layout.num_head_stages
    return {
        group: Circle(
            num_parameters=reduced.num_parameters,
            num_tensors=reduced.num_tensors,
            # A head of its own is where the first stage is.
            num_workers=len({stage % num_bodies for stage in reduced.stages}) * job.parallel.replicas,
        )
        for group, reduced in reduced_by_group(job.model, tuple(stages)).items()
    }


def _among(links: LinkMatrices, places: Sequence[int]) -> LinkMatrices:
    pairs = np.ix_(places, places)
    return LinkMatrices(
        latency_s=links.latency_s[pairs],
        bytes_per_s=links.bytes_per_s[pairs],
        crosses_sites=links.crosses_sites[pairs],
    )


def _compared(ratio: float) -> str:
    """Comparison of a step to one of plain all-reduce, in words.

    >>> _compared(1.0), _compared(31.9), _compared(0.5)
    ('as much as all-reduce in fp32', '31.9 times less than all-reduce in fp32', '2 times more than all-reduce in fp32')
    """
    if abs(ratio - 1) < 0.005:
        return "as much as all-reduce in fp32"
    times, which = (ratio, "less") if ratio > 1 else (1 / ratio, "more")
    return f"{times:.3g} times {which} than all-reduce in fp32"
