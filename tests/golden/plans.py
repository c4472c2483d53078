"""Plans at a fixed seed and number of moves: of drawn jobs and fleets, and after workers left or came."""

from collections.abc import Iterator

from skein import rng
from skein.config.job import JobSpec, PlanSpec
from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Infeasible, Plan
from skein.plan.searched import make_searched_plan
from skein.protocol.log.records import PlanAdopted
from skein.sim.shapes import shape_of
from skein.topology.fleet import Fleet, FleetWorker, Link, Profile
from skein.types import Generation, JobId, SiteId, WorkerId
from skein.wire.codec import RECORD

SHAPES = (
    "line 2x2",
    "line 3x2 tied",
    "loop 3x2",
    "loop 4x2 tied skip 1/2",
    "line 4x2 skip 1/4",
    "line 4x4",
    "loop 5x3",
    "line 6x2 ring",
    "line 2x4 tree",
    "line 2x3 by diloco",
)
BUDGET_S = 0.02
"""What the search's moves are counted from."""


def job_of(text: str) -> JobSpec:
    """A small job of this shape, with a budget for its plan."""
    shape = shape_of(text)
    return shape.job(steps=8).model_copy(update={"plan": PlanSpec(budget_s=BUDGET_S)})


def fleet_of(num_workers: int, seed: int, *, but: int = 0) -> Fleet:
    """Workers of unequal speeds in three sites with unequal links between them; without the first `but`."""
    draw = rng.stream(seed, "golden fleet")
    names = [WorkerId(f"w{index:02d}") for index in range(num_workers)]
    workers = tuple(
        FleetWorker(
            worker=name,
            site=SiteId(f"s{index % 3}"),
            profile=Profile(
                device="cpu",
                device_name="drawn",
                flops_per_s=float(draw.integers(4, 13)) * 1e8,
                memory_bytes=2**30,
            ),
        )
        for index, name in enumerate(names)
    )
    links = tuple(
        Link(
            sender=sender,
            receiver=receiver,
            latency_s=float(draw.integers(1, 80)) / 1024,
            bytes_per_s=float(draw.integers(1, 100)) * 1e6,
        )
        for sender in names
        for receiver in names
        if sender != receiver
    )
    left = frozenset(names[but:])
    return Fleet(
        workers=tuple(x for x in workers if x.worker in left),
        links=tuple(x for x in links if x.sender in left and x.receiver in left),
    )


def plans() -> Iterator[tuple[str, Plan | Infeasible]]:
    """Each plan by what it is of."""
    for number, text in enumerate(SHAPES):
        job, num_workers = job_of(text), shape_of(text).num_workers
        fleet = fleet_of(num_workers + 1, number)
        yield f"{text}, balanced", make_balanced_plan(job, fleet, None, number)
        found = make_searched_plan(job, fleet, None, number)
        yield f"{text}, searched", found
        if isinstance(found, Plan):
            left = fleet_of(num_workers + 1, number, but=1)
            yield f"{text}, after a loss", make_searched_plan(job, left, found, number, steps_left=100)
            more = fleet_of(num_workers + 2, number)
            yield f"{text}, after a join", make_searched_plan(job, more, found, number, steps_left=100)


def payload(plan: Plan | Infeasible) -> bytes:
    """What a run log would hold of it."""
    if isinstance(plan, Infeasible):
        return str(plan.reason).encode()
    return RECORD.to_bytes(PlanAdopted(job=JobId("golden"), generation=Generation(1), plan=plan))
