"""What losing 1, 2 or 5 of 20 workers costs in planning, in moved state and in step time.

    python -m bench.studies.replan

The fleet is that of `skein bench plan` (ten cities, six stages, a third left out), only planned, not emulated. Each
loss is drawn; the plan after it, which knows what survivors hold, is compared with one made from nothing with the whole
budget. The least that could be moved is what gives every stage as many holders as that plan has.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.emulated.fleet import memory_for, ten_cities
from bench.emulated.job import ACTIVATION_BYTES, write_tokens
from bench.plan import SLOTS, Shape, flops_per_s
from bench.report import Row, finish, spread
from skein.config.job import JobSpec
from skein.plan.load import stage_loads
from skein.plan.plan import Plan
from skein.plan.searched import make_searched_plan, searched_step_s
from skein.topology.fleet import Fleet, FleetWorker, Link, Profile
from skein.types import SiteId, WorkerId

NUM_WORKERS = 20
STEPS_LEFT = 1000
SCALE = 0.05
LOSSES = (1, 2, 5)


def fleet_of(job: JobSpec, scale: float) -> Fleet:
    """The fleet, all links measured."""
    names = [WorkerId(f"w{i:02}") for i in range(NUM_WORKERS)]
    links = ten_cities([""] * NUM_WORKERS, scale=scale, activation_bytes=ACTIVATION_BYTES)
    profile = Profile(
        device="cpu",
        device_name="planned",
        flops_per_s=flops_per_s(job, scale),
        memory_bytes=memory_for(job, SLOTS),
    )
    return Fleet(
        workers=tuple(
            FleetWorker(worker=name, site=SiteId(f"city{i % 10}"), profile=profile)
            for i, name in enumerate(names)
        ),
        links=tuple(
            Link(
                sender=sender,
                receiver=receiver,
                latency_s=links.latency_s[i][j],
                bytes_per_s=links.bytes_per_s[i][j],
            )
            for i, sender in enumerate(names)
            for j, receiver in enumerate(names)
            if i != j
        ),
    )


def without(fleet: Fleet, lost: Sequence[WorkerId]) -> Fleet:
    """The survivors and the links between them."""
    gone = set(lost)
    return Fleet(
        workers=tuple(x for x in fleet.workers if x.worker not in gone),
        links=tuple(x for x in fleet.links if not {x.sender, x.receiver} & gone),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss: how many, CPU seconds of the new plan, bytes moved, least bytes, steps of both plans in seconds."""

    num_lost: int
    cpu_s: float
    moved_bytes: int
    least_bytes: int
    step_s: float
    scratch_s: float


def lose(
    job: JobSpec, fleet: Fleet, before: Plan, num_lost: int, luck: random.Random, *, replan_s: float
) -> Loss:
    """Draw a loss, plan for it with and without what survivors hold."""
    lost = luck.sample([x.worker for x in fleet.workers], num_lost)
    after = without(fleet, lost)
    quick = job.model_copy(update={"plan": job.plan.model_copy(update={"budget_s": replan_s})})
    began_s = time.process_time()
    plan = make_searched_plan(quick, after, before, job.seed, steps_left=STEPS_LEFT)
    cpu_s = time.process_time() - began_s
    scratch = make_searched_plan(job, after, None, job.seed)
    assert isinstance(plan, Plan), plan
    assert isinstance(scratch, Plan), scratch
    state_bytes = {x.stage.index: x.state_bytes for x in stage_loads(job, plan.stages)}
    held = {x.chunk for x in before.chunks if x.chunk.worker not in lost}
    survivors = Counter(chunk.stage for chunk in held)
    wanted = Counter(x.chunk.stage for x in scratch.chunks)
    step_s, scratch_s = searched_step_s(job, after, plan), searched_step_s(job, after, scratch)
    assert step_s is not None
    assert scratch_s is not None
    return Loss(
        num_lost=num_lost,
        cpu_s=cpu_s,
        moved_bytes=sum(state_bytes[x.chunk.stage] for x in plan.chunks if x.chunk not in held),
        least_bytes=sum(max(0, wanted[s] - survivors[s]) * state_bytes[s] for s in wanted),
        step_s=step_s,
        scratch_s=scratch_s,
    )


def rows(losses: Sequence[Loss]) -> Iterator[Row]:
    """Three figures for each number of lost workers."""
    for number in sorted({x.num_lost for x in losses}):
        own = [x for x in losses if x.num_lost == number]
        cpu_s = [x.cpu_s for x in own]
        yield _row(
            f"{number} of 20 lost: planning",
            max(cpu_s),
            "s of CPU",
            "2 s",
            max(cpu_s) / 2,
            "<= 2 s",
            1.0,
            cpu_s,
        )
        ratios = [x.step_s / x.scratch_s for x in own]
        yield _row(
            f"{number} of 20 lost: step",
            median(ratios),
            "",
            "from nothing",
            median(ratios),
            "<= 1.05",
            1.05,
            ratios,
        )
        moved, least = sum(x.moved_bytes for x in own), sum(x.least_bytes for x in own)
        ratio = moved / least if least else float(moved > 0)
        against = f"least: {least} bytes in {len(own)} losses"
        yield _row(f"{number} of 20 lost: moved", moved, "bytes", against, ratio, "<= 1.2", 1.2, [1.0])


def _row(
    what: str,
    value: float,
    unit: str,
    against: str,
    ratio: float,
    goal: str,
    most: float,
    runs: Sequence[float],
) -> Row:
    return Row(
        what=what,
        value=value,
        unit=unit,
        against=against,
        ratio=ratio,
        goal=goal,
        holds=ratio <= most,
        spread=spread(runs),
    )


def main() -> int:
    """Plan, lose, plan again."""
    parser = argparse.ArgumentParser(prog="python -m bench.studies.replan", description=__doc__)
    parser.add_argument("--draws", type=int, default=5, help="losses of each size (default: 5)")
    parser.add_argument("--budget-s", type=float, default=10.0, help="of plans from nothing (default: 10)")
    parser.add_argument(
        "--replan-s",
        type=float,
        default=3.2,
        help="of plans after a loss (default: 3.2, here about 2 s of CPU)",
    )
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(Path(folder) / "tokens")
        shape = Shape(num_workers=NUM_WORKERS, scale=SCALE, budget_s=asked.budget_s)
        job = shape.job("replan", tokens, method="search", steps=STEPS_LEFT)
    fleet = fleet_of(job, SCALE)
    before = make_searched_plan(job, fleet, None, job.seed)
    assert isinstance(before, Plan), before
    losses = []
    for number in LOSSES:
        for draw in range(asked.draws):
            luck = random.Random(1000 * number + draw)
            found = lose(job, fleet, before, number, luck, replan_s=asked.replan_s)
            losses.append(found)
            if not asked.json:
                print(
                    f"{number} lost: {found.cpu_s:.1f} s of CPU, {found.moved_bytes} bytes moved (least "
                    f"{found.least_bytes}), a step {found.step_s:.2f} s, from nothing {found.scratch_s:.2f} s",
                    flush=True,
                )
    return finish("replan", rows(losses))


if __name__ == "__main__":
    sys.exit(main())
