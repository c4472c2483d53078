"""`python -m skein.sim`: simulate jobs on made-up fleets, with faults if asked, and say what came of them.

With `--shape` each seed draws a schedule of faults over a whole small job, and its loss curve must be the undisturbed
one; otherwise one job of the given size runs.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial

from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, CheckpointSpec, EvaluationSpec, JobSpec, ParallelSpec
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.protocol.worker.worker_io import WorkerEvent
from skein.sim.faults import draw_faults, schedule_faults
from skein.sim.judging.invariants import Violated
from skein.sim.processes.worker import SimWorker
from skein.sim.scenario import (
    FEW_STEPS,
    FleetShape,
    disturbed,
    judge,
    judge_lasting,
    make_world,
    num_steps_of,
    run_to_end,
)
from skein.sim.shapes import (
    ARRAYS,
    GUARDED,
    MESHES,
    PIPELINES,
    SEVERAL,
    SHAPES,
    SWEEPS,
    SimShape,
    shape_of,
)
from skein.sim.transcript import small_life
from skein.sim.world import World

_EVENT_CHARACTERS = 160


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
    """Run one seed or several; exit 1 if one violates an invariant, and tell that one."""
    parser = argparse.ArgumentParser(prog="skein sim", description=main.__doc__)
    parser.add_argument(
        "--shape",
        help="`loop 3x2 tied skip 1/3 on 4`, `any`: seeds walk over two dozen, `several`: over such of several jobs, "
        "`pipelines`: over such with chunks, split backwards, shards and tied ends, `guarded`: over such with "
        "quotas and relays, `arrays`: over such of arrays of trials, `sweeps`: over such of sweeps, `meshes`: over "
        "such on meshes",
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=0, help="0: as many as the workers allow")
    parser.add_argument("--microbatches", type=int, default=0, help="0: two per replica")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--faults", type=int, help="with --shape 8, else 0")
    parser.add_argument("--layers", type=int, default=0, help="decoder blocks; 0: enough for the stages")
    parser.add_argument("--hidden", type=int, default=128, help="features")
    parser.add_argument(
        "--rule", help="an aggregation rule, or `all`: each seed strikes once, amid an exchange"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many, counting up from --seed")
    parser.add_argument("--processes", type=int, default=1, help="that share the seeds of --shape")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the coordinator's lines")
    parser.add_argument("--trace", action="store_true", help="print every event of every worker, too")
    parser.add_argument("--transcript", action="store_true", help="print a small life, event by event")
    args = parser.parse_args()
    if args.transcript:
        print("\n".join(small_life().page))
        return 0
    if args.rule is not None:
        return _judge_strikes(args)
    if args.shape is not None:
        return _judge_seeds(args)
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
        horizon_s = args.steps * 0.5
        schedule_faults(
            world, draw_faults(args.workers, num_faults=args.faults or 0, horizon_s=horizon_s, seed=seed)
        )
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


# --- drawn schedules over whole jobs ---


class TracedWorld(World):
    """Prints every event that a worker handles, and its own lines as they come."""

    _num_told = 0

    def _handle(self, worker: SimWorker, event: WorkerEvent) -> None:
        for line in self.lines[self._num_told :]:
            print(line)
        self._num_told = len(self.lines)
        machine = worker.machine
        place = f"e{machine.epoch} g{machine.generation} v{machine.version}"
        print(f"{self.clock.now:.4f} {machine.identity.worker} {place} {event!r:.{_EVENT_CHARACTERS}}")
        super()._handle(worker, event)


def shape_by_text(seed: int, text: str) -> SimShape:
    """The shape that a seed is judged on; `any`, `several` and so on have seeds walk over known ones."""
    known = {
        "any": SHAPES,
        "several": SEVERAL,
        "pipelines": PIPELINES,
        "guarded": GUARDED,
        "arrays": ARRAYS,
        "sweeps": SWEEPS,
        "meshes": MESHES,
    }.get(text)
    return shape_of(text) if known is None else known[seed % len(known)]


def told_of(seed: int, *, shape: str, num_faults: int, is_traced: bool = False) -> tuple[str, str]:
    """Outcome of one seed (empty if it violates no invariant), and the story."""
    of = shape_by_text(seed, shape)
    new_world = TracedWorld if is_traced else World
    steps = num_steps_of(seed)
    world = disturbed(of, seed=seed, num_faults=num_faults, new_world=new_world, steps=steps)
    judged = judge if steps == FEW_STEPS else judge_lasting
    again = f"--shape '{of.text}' --faults {num_faults} --seed {seed} --trace"
    return _violation(partial(judged, of, world), again, f"seed={seed}"), "\n".join(world.lines)


def strike_told(seed: int, *, rule: str) -> tuple[str, str]:
    """Outcome of a strike amid an exchange (empty if it violates no invariant), and the story."""
    # Real tensors want torch, which whoever only plans need not have.
    from skein.sim.moments import judge_struck, struck

    world = struck(rule, seed)
    violation = _violation(
        partial(judge_struck, world), f"--rule {rule} --seed {seed}", f"{rule} seed={seed}"
    )
    return violation, "\n".join(world.lines)


def _violation(judged: Callable[[], object], again: str, about: str) -> str:
    """Violation, with the command that repeats it; empty if there is none."""
    try:
        judged()
    except Exception as error:  # noqa: BLE001 - whatever breaks is what is looked for
        return f"{about} violated: {error!r:.2000}\nreproduce: python -m skein.sim {again}"
    return ""


def _judge_seeds(args: argparse.Namespace) -> int:
    num_faults = 8 if args.faults is None else args.faults
    if not _are_kept(partial(told_of, shape=args.shape, num_faults=num_faults, is_traced=args.trace), args):
        return 1
    print(f"{args.seeds} seeds from {args.seed} on, {args.shape}, {num_faults} faults each: no violation")
    return 0


def _judge_strikes(args: argparse.Namespace) -> int:
    from skein.sim.moments import STRUCK

    for rule in STRUCK if args.rule == "all" else (args.rule,):
        began = time.perf_counter()
        if not _are_kept(partial(strike_told, rule=rule), args):
            return 1
        seconds = time.perf_counter() - began
        print(f"{rule}: {args.seeds} seeds from {args.seed} on, {seconds:.0f} s: no violation", flush=True)
    return 0


def _are_kept(one: "partial[tuple[str, str]]", args: argparse.Namespace) -> bool:
    """Whether no seed violates anything; the first that does is told."""
    began = time.perf_counter()
    for count, (violation, story) in enumerate(_told(one, args), start=1):
        if args.verbose:
            print(story)
        if violation:
            print("\n".join(story.splitlines()[-40:]))
            print(violation)
            return False
        if count % max(1, args.seeds // 20) == 0 and args.seeds > 1:
            print(f"{count} of {args.seeds} seeds, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return True


def _told(one: "partial[tuple[str, str]]", args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """In the order of the seeds, so that the first that fails is the same in every run."""
    seeds = range(args.seed, args.seed + args.seeds)
    if args.processes == 1:
        yield from map(one, seeds)
        return
    with ExitStack() as undo:
        pool = ProcessPoolExecutor(args.processes)
        # Also if whoever asked has seen enough. What is not waited for would be woken by an interpreter that ends.
        undo.callback(pool.shutdown, cancel_futures=True)
        yield from pool.map(one, seeds, chunksize=4)


if __name__ == "__main__":
    sys.exit(main())
