"""`python -m skein.sim`: simulate a job on a made-up fleet, with faults if asked, and say what came of it."""

import argparse
import sys
import time
from functools import partial

from skein.config.job import (
    BatchSpec,
    BudgetSpec,
    CheckpointSpec,
    DataSpec,
    EvaluationSpec,
    JobSpec,
    LlamaModel,
    LlamaShape,
    ParallelSpec,
    TextSource,
)
from skein.sim.invariants import Violated
from skein.sim.scenario import FleetShape, draw_faults, make_world, run_to_end


def make_job(
    *, stages: int, replicas: int, microbatches: int, steps: int, layers: int, hidden: int
) -> JobSpec:
    """A job of the given shape on made-up text."""
    shape = LlamaShape(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers)
    return JobSpec(
        name="sim",
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(TextSource(path="/simulated"),), sequence_tokens=256),
        batch=BatchSpec(samples=4 * microbatches, microbatch_samples=4),
        parallel=ParallelSpec(stages=stages, replicas=replicas),
        budget=BudgetSpec(steps=steps),
        evaluation=EvaluationSpec(every_steps=max(1, steps // 4), samples=4 * microbatches),
        checkpoint=CheckpointSpec(every_steps=max(1, steps // 10)),
    )


def main() -> int:
    """Run one seed or several; exit 1 at the first that violates an invariant."""
    parser = argparse.ArgumentParser(prog="python -m skein.sim", description=main.__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=0, help="0: as many as the workers allow")
    parser.add_argument("--microbatches", type=int, default=0, help="0: two per replica")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--layers", type=int, default=0, help="decoder blocks; 0: enough for the stages")
    parser.add_argument("--hidden", type=int, default=128, help="features")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many, counting up from --seed")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the coordinator's lines")
    args = parser.parse_args()
    replicas = args.replicas or max(1, args.workers // args.stages)
    job = make_job(
        stages=args.stages,
        replicas=replicas,
        microbatches=args.microbatches or 2 * replicas,
        steps=args.steps,
        layers=args.layers or 2 * args.stages,
        hidden=args.hidden,
    )
    fleet = FleetShape(num_workers=args.workers)
    for seed in range(args.seed, args.seed + args.seeds):
        began = time.perf_counter()
        world = make_world(job, fleet, seed=seed)
        for at, _, fault in draw_faults(fleet, num_faults=args.faults, horizon_s=args.steps * 0.5, seed=seed):
            world.clock.at(at, partial(fault, world))
        try:
            outcome = run_to_end(world, limit_s=3600.0)
        except (Violated, AssertionError) as violation:
            print("\n".join(world.lines[-40:]))
            print(f"seed={seed} violated: {violation}")
            return 1
        if args.verbose:
            print("\n".join(world.lines))
        done = next(iter(outcome.history.jobs.values()))
        print(
            f"seed={seed} {outcome.state.value} steps={done.version} simulated_s={outcome.seconds:.1f} "
            f"events={outcome.num_events} generations={outcome.history.generation} "
            f"rollbacks={len(done.rollbacks)} replay=equal wall_s={time.perf_counter() - began:.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
