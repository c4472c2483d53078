"""Workers that contribute wrongly: how soon checks find them, and what is left of it in the loss.

    python -m bench.lying [--shape "line 2x2"] [--fraction 1] [--seeds 20] [--steps 60] [--clean-steps 200]

Simulated jobs on real numbers, driving the machines that run in coordinator and workers. One of the workers lies in one
of six ways from its fourth step on; another one for each seed, with chance of its own. Ends with one JSON line; exit
code 1 if liars of a kind were at work for more than 20 steps in more than one of 20 jobs, if the mean loss of the last
ten steps is off by more than 5 % of the clean one, or if anybody honest is quarantined.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from bench.report import Row, finish
from skein.protocol.log.history import JobHistory
from skein.sim.compute.lying import LieKind
from skein.sim.lying import lying_world
from skein.sim.scenario import curve_of, run_to_end
from skein.sim.shapes import shape_of
from skein.sim.world import World
from skein.types import WorkerId

MOST_STEPS = 20
MOST_OFF = 0.05
MISSED = 0.05
_SINCE = 4
_LAST = 10
_LIMIT_S = 100_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Outcome of a job: steps from the first lie to the quarantine, all if there was none; mean loss at its end."""

    steps: int
    loss: float
    num_honest: int
    """Honest workers that were quarantined."""


def tried(world: World, liar: WorkerId | None, num_steps: int) -> Found:
    """Run a job to its end."""
    run_to_end(world, limit_s=_LIMIT_S)
    job = _job(world)
    found = job.quarantined.get(liar) if liar is not None else None
    losses = [record.loss for record in curve_of(world.log)[-_LAST:]]
    return Found(
        steps=num_steps if found is None else found.step - _SINCE + 1,
        loss=fmean(losses),
        num_honest=len(job.quarantined.keys() - {liar}),
    )


def _job(world: World) -> JobHistory:
    assert world.coordinator is not None
    [job] = world.coordinator.history.jobs.values()
    return job


def rows_of(kind: LieKind, found: Sequence[Found], clean: float) -> list[Row]:
    """Figures of one kind of lie."""
    late = sum(x.steps > MOST_STEPS for x in found) / len(found)
    off = [abs(x.loss / clean - 1.0) for x in found]
    steps = sorted(x.steps for x in found)
    return [
        Row(
            what=f"{kind}: steps until quarantined, median (most {steps[-1]})",
            value=median(steps),
            unit="steps",
            against=f"{MOST_STEPS} steps",
            ratio=median(steps) / MOST_STEPS,
            goal=f"within {MOST_STEPS} in 19 of 20 jobs, nobody honest",
            holds=late <= MISSED and not any(x.num_honest for x in found),
            spread=(steps[-1] - steps[0]) / max(1.0, median(steps)),
        ),
        Row(
            what=f"{kind}: final loss, worst",
            value=clean * (1 + max(off)),
            unit="loss",
            against="the clean job's",
            ratio=1 + max(off),
            goal="within 5 %",
            holds=max(off) <= MOST_OFF,
            spread=max(off) - min(off),
        ),
    ]


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m bench.lying", description="How soon liars are found.")
    parser.add_argument("--shape", default="line 2x2")
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--clean-steps", type=int, default=200)
    args = parser.parse_args()
    shape = shape_of(f"{args.shape} checked {args.fraction}")
    calm = tried(lying_world(shape, steps=args.steps, seed=0), None, args.steps)
    clean = tried(lying_world(shape, steps=args.clean_steps, seed=1), None, args.clean_steps)
    rows = [
        Row(
            what=f"honest workers quarantined in {args.clean_steps} clean steps",
            value=clean.num_honest,
            unit="workers",
            against="0",
            ratio=clean.num_honest,
            goal="0",
            holds=clean.num_honest == 0,
            spread=0.0,
        )
    ]
    for kind in LieKind:
        found = []
        for seed in range(args.seeds):
            liar = WorkerId(f"w{seed % shape.num_workers:04d}")
            world = lying_world(shape, steps=args.steps, seed=seed, liar=liar, kind=kind, since=_SINCE)
            found.append(tried(world, liar, args.steps))
        rows += rows_of(kind, found, calm.loss)
    return finish("lying", rows, figures={"shape": shape.text})


if __name__ == "__main__":
    sys.exit(main())
