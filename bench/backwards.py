"""Steps with split backwards beside whole ones, and beside what was planned: four real workers with emulated times.

    python -m bench.backwards [--steps 6] [--repeats 2] [--op 0.05] [--json]

Coordinator, workers, transport and training are the real ones; a forward is made to take `--op` seconds, a backward
twice as long, a hop nothing or as much as a forward. Eight microbatches, one chunk for each worker. Weight gradients
take the third of a backward that a first plan takes them for, or a half. Jobs take turns. Ends with one JSON line; exit
code 1 if a goal is missed.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from bench.emulated.cluster import EmulatedCluster, free_addresses
from bench.emulated.fleet import Links, op_times
from bench.emulated.job import make_job, write_tokens
from bench.plan import NUM_WARM_STEPS, Outcome, train
from bench.report import Row, finish, spread
from skein.config.job import JobSpec, ParallelSpec, PlanSpec, SkipSpec
from skein.plan.cut import cut
from skein.plan.load import stage_loads
from skein.plan.ops import WEIGHT_SHARE

NUM_WORKERS, NUM_MICROBATCHES = 4, 8
SHARES = (WEIGHT_SHARE, 1 / 2)
"""Of a backward, that weight gradients take."""
MOST_OF_WHOLE = 0.85
"""Where they take a half."""
LEAST, MOST = 0.9, 1.1
"""Measured over predicted."""

Backward = Literal["whole", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job on workers that are so many seconds from each other."""

    hop_s: float
    share: float
    backward: Backward
    outcome: Outcome


def job_of(name: str, tokens: Path, backward: Backward, *, steps: int) -> JobSpec:
    """Four stages in a line, and no other plan than the first."""
    drawn = make_job(
        name,
        tokens,
        method="search",
        num_workers=NUM_WORKERS,
        stages=NUM_WORKERS,
        microbatches=NUM_MICROBATCHES,
        skip_ratio=0.0,
        budget_s=2.0,
        steps=steps,
    )
    changes = {
        "parallel": ParallelSpec(stages=NUM_WORKERS),
        "skip": SkipSpec(),
        "plan": PlanSpec(backward=backward, budget_s=2.0, replan_if_off_by=1_000_000),
    }
    return JobSpec.model_validate(drawn.model_dump() | {k: v.model_dump() for k, v in changes.items()})


def runs(folder: Path, hop_s: float, share: float, *, op_s: float, steps: int, repeats: int) -> Iterator[Run]:
    """Start four workers, and let both ways take turns."""
    folder.mkdir(parents=True)
    tokens = write_tokens(folder / "tokens")
    rows = tuple(tuple(hop_s * (a != b) for b in range(NUM_WORKERS)) for a in range(NUM_WORKERS))
    links = Links(
        addresses=free_addresses(NUM_WORKERS),
        latency_s=rows,
        bytes_per_s=((1e9,) * NUM_WORKERS,) * NUM_WORKERS,
    )
    sample = job_of("sample", tokens, "whole", steps=1)
    middle = stage_loads(sample, cut(sample.layers, NUM_WORKERS, sample.parallel.layout))[1]
    speed = middle.flops / (3 * op_s)
    times = op_times(sample, speed)
    times = times.model_copy(update={"weight_s": tuple(share * x for x in times.backward_s)})
    with EmulatedCluster(folder, links) as cluster:
        cluster.start_fleet([times] * NUM_WORKERS, flops_per_s=speed, memory_bytes=1 << 30)
        with cluster.client() as client:
            for turn in range(repeats):
                for backward in get_args(Backward):
                    name = f"{backward}-{turn}"
                    job = job_of(name, tokens, backward, steps=steps + NUM_WARM_STEPS)
                    yield Run(hop_s=hop_s, share=share, backward=backward, outcome=train(client, job))


def rows_of(found: Sequence[Run]) -> Iterator[Row]:
    """Measured over predicted, where a plan knows all times, and split over whole."""
    for hop_s in dict.fromkeys(run.hop_s for run in found):
        at = [run for run in found if run.hop_s == hop_s]
        for backward in get_args(Backward):
            known = [x.outcome for x in at if x.backward == backward and x.share == WEIGHT_SHARE]
            ratio = median(x.step_s / x.predicted_s for x in known)
            yield Row(
                what=f"{backward} backwards, {hop_s:g} s from worker to worker: measured step",
                value=median(x.step_s for x in known),
                unit="s",
                against=f"{median(x.predicted_s for x in known):.3f} s predicted",
                ratio=ratio,
                goal=f"{LEAST} to {MOST}",
                holds=LEAST <= ratio <= MOST,
                spread=spread([x.step_s for x in known]),
            )
        for share in SHARES:
            split, whole = (
                [x.outcome.step_s for x in at if x.backward == backward and x.share == share]
                for backward in ("split", "whole")
            )
            ratios = [a / b for a, b in zip(split, whole, strict=True)]
            has_goal = share == max(SHARES)
            yield Row(
                what=f"split backwards, weights {share:.2f} of one, {hop_s:g} s from worker to worker: measured step",
                value=median(split),
                unit="s",
                against=f"whole ones: {median(whole):.3f} s",
                ratio=median(ratios),
                goal=f"<= {MOST_OF_WHOLE}" if has_goal else "none",
                holds=not has_goal or median(ratios) <= MOST_OF_WHOLE,
                spread=spread(ratios),
            )


def main() -> int:
    """Train on an emulated fleet, whole and split."""
    parser = argparse.ArgumentParser(prog="skein bench backwards", description=main.__doc__)
    parser.add_argument("--steps", type=int, default=6, help="counted, in each job")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--op", type=float, default=0.05, help="seconds of a forward")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args()
    found: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (hop_s, share) in enumerate(product((0.0, args.op), SHARES)):
            place = Path(folder) / str(number)
            for run in runs(place, hop_s, share, op_s=args.op, steps=args.steps, repeats=args.repeats):
                found.append(run)
                if not args.json:
                    told = f"{run.outcome.step_s:.3f} s, {run.outcome.predicted_s:.3f} s predicted"
                    print(f"{hop_s:g} s, weights {share:.2f}, {run.backward}: {told}", flush=True)
    return finish("backwards", rows_of(found))


if __name__ == "__main__":
    sys.exit(main())
