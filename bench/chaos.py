"""Kills, freezes and cuts on real processes while they train; judged by the log and by the same job left in peace.

    python -m bench.chaos [--workers 6] [--seconds 600] [--kill-every 15] [--freeze-every 60] [--cut-every 60]
                          [--coordinator-every 60] [--seed 0] [--steps N] [--precision fp32] [--folder DIR] [--json]

One coordinator, two replicas of each stage, workers of one thread, all on this machine; every connection goes through a
relay that can be cut. The job is first trained in peace, then again under blows drawn from the seed (`bench.chaosing`).
A period of 0 leaves that kind of blow out. Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.chaosing.blows import Rhythm, Strike, draw_blows, save_strikes
from bench.chaosing.cluster import ChaosCluster, running_behind_wires
from bench.chaosing.job import MICROBATCH_SAMPLES, NUM_REPLICAS, SEQUENCE_TOKENS, make_job
from bench.chaosing.judge import Verdict, judge
from bench.chaosing.meter import Meter
from bench.chaosing.nemesis import Nemesis
from bench.chaosing.rows import REL_LOSS, crashed_row, figures_of, rows_of
from bench.chaosing.watch import finish_in_peace, give_up_at, wait_for_step, watched
from bench.report import finish
from client.api import Client, Job
from skein.config.job import JobSpec
from skein.errors import UserError
from skein.protocol.log.records import Record
from skein.types import JobId, Precision
from skein.wire.views import StepFinished

NUM_TRIAL_STEPS, NUM_WARM_STEPS = 12, 4
"""Of the job that tells how many steps fill the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """What is to be done."""

    num_workers: int
    seconds: float
    rhythm: Rhythm
    seed: int
    steps: int | None
    precision: Precision

    def job(self, name: str, steps: int) -> JobSpec:
        """The same job under any name."""
        return make_job(
            name, num_workers=self.num_workers, steps=steps, seed=self.seed, precision=self.precision
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was recorded, what was struck, which jobs are which, and what other programs took of the machine.

    `num_crashed`: workers that ended although nobody had killed them.
    """

    records: tuple[Record, ...]
    strikes: tuple[Strike, ...]
    job: JobId
    undisturbed: JobId
    num_crashed: int
    others_cores: float
    others_cores_undisturbed: float


def carry_out(chaos: Chaos, folder: Path, *, is_quiet: bool) -> Outcome:
    """The job in peace, then the job under blows, on one cluster."""

    def tell(line: str) -> None:
        if not is_quiet:
            print(line, flush=True)

    with running_behind_wires(folder, chaos.num_workers) as cluster, cluster.client() as client:
        steps = chaos.steps or _steps_for(chaos, cluster, client)
        tell(f"{steps} steps, first in peace")
        with Meter() as calm_meter:
            calm = client.submit(chaos.job("undisturbed", steps))
            finish_in_peace(cluster, calm)
        with Meter() as meter:
            job = client.submit(chaos.job("disturbed", steps))
            strikes, num_crashed = _disturb(chaos, cluster, job, tell)
        save_strikes(strikes, folder / "strikes.json")
        tell(f"struck {len(strikes)} times")
    return Outcome(
        records=cluster.read_log(),
        strikes=strikes,
        job=JobId(job.id),
        undisturbed=JobId(calm.id),
        num_crashed=num_crashed,
        others_cores=meter.others_cores,
        others_cores_undisturbed=calm_meter.others_cores,
    )


def _steps_for(chaos: Chaos, cluster: ChaosCluster, client: Client) -> int:
    """As many steps as fill the time when nothing goes wrong."""
    trial = client.submit(chaos.job("trial", NUM_TRIAL_STEPS))
    finish_in_peace(cluster, trial)
    times = [event.wall_s for event in trial.history() if isinstance(event.body, StepFinished)]
    step_s = median(after - before for before, after in pairwise(times[NUM_WARM_STEPS:]))
    return max(2 * NUM_TRIAL_STEPS, round(chaos.seconds / step_s))


def _disturb(
    chaos: Chaos, cluster: ChaosCluster, job: Job, tell: Callable[[str], None]
) -> tuple[tuple[Strike, ...], int]:
    """Blows from the first committed steps on, then the rest of the job in peace; and how many workers just ended."""
    wait_for_step(job, NUM_WARM_STEPS)
    blows = draw_blows(cluster.names, chaos.rhythm, lasts_s=chaos.seconds, seed=chaos.seed)
    with watched(job) as is_over:
        nemesis = Nemesis(cluster, blows, is_over=is_over, give_up_at=give_up_at(chaos.seconds), tell=tell)
        return nemesis.run(), len(nemesis.crashed)


def judged(chaos: Chaos, outcome: Outcome) -> Verdict:
    """The outcome's figures."""
    return judge(
        outcome.records,
        outcome.strikes,
        job=outcome.job,
        undisturbed=outcome.undisturbed,
        num_workers=chaos.num_workers,
        microbatch_tokens=MICROBATCH_SAMPLES * SEQUENCE_TOKENS,
        max_rel_loss_diff=REL_LOSS,
    )


def main() -> int:
    """Train in peace, train under blows, and compare."""
    args = _arguments()
    try:
        chaos = _chaos(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as passing:
        folder = args.folder or Path(passing)
        outcome = carry_out(chaos, folder, is_quiet=args.json)
    verdict = judged(chaos, outcome)
    figures = {
        "seed": chaos.seed,
        **figures_of(verdict),
        "others_cores": outcome.others_cores,
        "others_cores_undisturbed": outcome.others_cores_undisturbed,
    }
    rows = [*rows_of(verdict), crashed_row(outcome.num_crashed)]
    return finish("chaos", rows, figures=figures)


def _chaos(args: argparse.Namespace) -> Chaos:
    if args.workers < NUM_REPLICAS or args.workers % NUM_REPLICAS:
        raise UserError(
            "--workers", args.workers, f"give a multiple of {NUM_REPLICAS}, the replicas of a stage"
        )
    if args.seconds <= 0:
        raise UserError("--seconds", args.seconds, "give more than 0")
    rhythm = Rhythm(
        kill_s=args.kill_every,
        freeze_s=args.freeze_every,
        cut_s=args.cut_every,
        coordinator_s=args.coordinator_every,
    )
    return Chaos(
        num_workers=args.workers,
        seconds=args.seconds,
        rhythm=rhythm,
        seed=args.seed,
        steps=args.steps,
        precision=args.precision,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="skein bench chaos", description=main.__doc__)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=600.0, help="for which there are blows")
    parser.add_argument("--kill-every", type=float, default=15.0, help="seconds between SIGKILLs to workers")
    parser.add_argument("--freeze-every", type=float, default=60.0, help="between SIGSTOPs to workers")
    parser.add_argument("--cut-every", type=float, default=60.0, help="between cuts of a link")
    parser.add_argument("--coordinator-every", type=float, default=60.0, help="between its SIGKILLs")
    parser.add_argument("--seed", type=int, default=0, help="of the blows and of the job")
    parser.add_argument("--steps", type=int, help="of the job; by default what fills the seconds in peace")
    parser.add_argument("--precision", type=Precision, default=Precision.FP32, choices=list(Precision))
    parser.add_argument("--folder", type=Path, help="keeps logs, run log and strikes")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
