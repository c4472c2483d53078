"""What deaths cost Skein, torchft and plain checkpoint-restart: same model, data, batch, machine and schedule of kills.

    python -m bench.studies.chaos_compare [--workers 6] [--steps 120] [--kill-every 15] [--seed 0]
        [--checkpoint-every 5]
                                  [--folder DIR] [--json]

Each trains once in peace and once while its processes are killed, and come back a few seconds later, at the times drawn
from the seed (`bench.chaosing`). Skein has its workers in stages of two replicas, the others a whole model in each.
torchft comes from PyPI into an environment of its own; where it cannot be had, the line says why. Ends with one JSON
line; exit code 1 if a goal is missed.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.chaosing.blows import Blow, Rhythm, draw_blows
from bench.chaosing.cluster import ChaosCluster, running_behind_wires
from bench.chaosing.job import MICROBATCH_SAMPLES, NUM_REPLICAS, make_job
from bench.chaosing.nemesis import Nemesis
from bench.chaosing.watch import finish_in_peace, give_up_at, wait_for_step, watched
from bench.report import Row, finish
from bench.studies.chaos_compare.fleet import Fleet, Program
from bench.studies.chaos_compare.told import NUM_SMOOTHED, Applied, Curve
from bench.studies.chaos_compare.torchft import NotToBeHad, lighthouse, make_environment, version
from client.api import Job
from skein.config.job import JobSpec
from skein.errors import UserError
from skein.protocol.log.records import Incident, Record, RolledBack, StepCommitted
from skein.types import JobId, JobState

MICROBATCHES_PER_WORKER = 5
LASTS_S = 1800.0
"""For so long kills are planned; trainings are over before."""
AT_SHARE = 0.8
"""The loss to reach is that of the undisturbed job after this share of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What all are given."""

    num_workers: int
    steps: int
    kill_every_s: float
    seed: int
    checkpoint_every_steps: int

    def job(self, name: str) -> JobSpec:
        """The same job under any name."""
        num_microbatches = MICROBATCHES_PER_WORKER * self.num_workers
        return make_job(
            name,
            num_workers=self.num_workers,
            steps=self.steps,
            seed=self.seed,
            num_microbatches=num_microbatches,
        )

    @property
    def blows(self) -> tuple[Blow, ...]:
        """Kills alone."""
        rhythm = Rhythm(kill_s=self.kill_every_s, freeze_s=0.0, cut_s=0.0, coordinator_s=0.0)
        names = tuple(f"w{index}" for index in range(self.num_workers))
        return draw_blows(names, rhythm, lasts_s=LASTS_S, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One contestant: in peace and struck."""

    name: str
    calm: Curve
    struck: Curve


# --- Skein ---


def with_skein(contest: Contest, folder: Path) -> Trained:
    """On one cluster, in peace first."""
    with running_behind_wires(folder, contest.num_workers) as cluster, cluster.client() as client:
        calm = client.submit(contest.job("calm"))
        finish_in_peace(cluster, calm)
        struck = client.submit(contest.job("struck"))
        _strike(contest, cluster, struck)
    records = cluster.read_log()
    return Trained(
        name="skein",
        calm=curve_of_log(records, JobId(calm.id)),
        struck=curve_of_log(records, JobId(struck.id)),
    )


def _strike(contest: Contest, cluster: ChaosCluster, job: Job) -> None:
    wait_for_step(job, 0)
    with watched(job) as is_over:
        until_s = give_up_at(LASTS_S)
        _ = Nemesis(cluster, contest.blows, is_over=is_over, give_up_at=until_s, tell=lambda _: None).run()
    status = job.status()
    assert status.state is JobState.FINISHED, status.reason


def curve_of_log(records: Sequence[Record], job: JobId) -> Curve:
    """What the run log says of a job: of a step that was made again, the last time counts."""
    by_step: dict[int, Applied] = {}
    before, num_repeated = 0, 0
    for record in records:
        match record:
            case StepCommitted() if record.job == job:
                made = record.record
                num_samples = made.samples_after - before
                before = made.samples_after
                num_repeated += by_step[made.step].num_samples if made.step in by_step else 0
                by_step[made.step] = Applied(
                    step=made.step, at_s=record.wall_s, num_samples=num_samples, loss=made.loss
                )
            case RolledBack() if record.job == job:
                kept = [step.num_samples for step in by_step.values() if step.step < record.to_version]
                before = sum(kept)
            case Incident() if record.job == job:
                num_repeated += record.num_samples_repeated
            case _:
                pass
    applied = tuple(by_step[step] for step in sorted(by_step))
    return Curve(applied=applied, num_computed=sum(step.num_samples for step in applied) + num_repeated)


# --- the others ---


def with_restarts(contest: Contest, folder: Path) -> Trained:
    """Plain data parallelism; a death ends all, and all begin again at the newest checkpoint."""
    program = Program(
        python=Path(sys.executable), module="bench.studies.chaos_compare.restarted", restarts_together=True
    )
    return Trained(
        name="checkpoint-restart",
        calm=_train(contest, program, folder / "calm", blows=(), meeting=None),
        struck=_train(contest, program, folder / "struck", blows=contest.blows, meeting=None),
    )


def with_torchft(contest: Contest, folder: Path) -> Trained:
    """torchft, each worker a replica group.

    Raises:
        NotToBeHad: it cannot be installed here, or does not run.
    """
    python = make_environment(folder / "environment")
    program = Program(
        python=python, module="bench.studies.chaos_compare.torchft_replica", restarts_together=False
    )
    with lighthouse(python, folder / "calm.log") as meeting:
        calm = _train(contest, program, folder / "calm", blows=(), meeting=meeting)
    with lighthouse(python, folder / "struck.log") as meeting:
        struck = _train(contest, program, folder / "struck", blows=contest.blows, meeting=meeting)
    return Trained(name=f"torchft {version(python)}", calm=calm, struck=struck)


def _train(
    contest: Contest, program: Program, folder: Path, *, blows: Sequence[Blow], meeting: str | None
) -> Curve:
    fleet = Fleet(
        program,
        contest.job("compared"),
        num_replicas=contest.num_workers,
        folder=folder,
        meeting=meeting,
        checkpoint_every_steps=contest.checkpoint_every_steps,
    )
    with fleet:
        return fleet.train(blows)


# --- rows ---


def rows_of(contest: Contest, ours: Trained, others: Sequence[Trained]) -> list[Row]:
    """For each contestant: samples lost, samples computed in vain, and when it reaches the loss."""
    loss = loss_at(ours.calm, AT_SHARE)
    ours_s = ours.struck.reaches_s(loss)
    return [
        row for one in (ours, *others) for row in _rows_of(contest, one, loss, ours_s, is_ours=one is ours)
    ]


def loss_at(curve: Curve, share: float) -> float:
    """The smoothed loss after this share of the steps, a little above: equal curves differ in the last digits."""
    smoothed = curve.smoothed()
    index = round(share * len(curve.applied)) - NUM_SMOOTHED
    return (math.floor(smoothed[min(max(index, 0), len(smoothed) - 1)] * 1000) + 1) / 1000


def _rows_of(
    contest: Contest, trained: Trained, loss: float, ours_s: float | None, *, is_ours: bool
) -> list[Row]:
    step_samples = MICROBATCHES_PER_WORKER * MICROBATCH_SAMPLES * contest.num_workers
    num_used = len(trained.struck.applied) * step_samples
    counts = (
        ("samples that no update has seen", trained.struck.num_lost(step_samples)),
        ("samples computed in vain", trained.struck.num_repeated),
    )
    return [
        *(_count_row(f"{trained.name}: {what}", count, num_used, is_ours=is_ours) for what, count in counts),
        _time_row(trained, loss, ours_s, is_ours=is_ours),
    ]


def _count_row(what: str, count: int, num_used: int, *, is_ours: bool) -> Row:
    is_asked = is_ours and "no update" in what
    return Row(
        what=what,
        value=count,
        unit="samples",
        against=f"{num_used} of the steps that were made",
        ratio=count / num_used,
        goal="0" if is_asked else "none: shown",
        holds=not is_asked or count == 0,
        spread=0.0,
    )


def _time_row(trained: Trained, loss: float, ours_s: float | None, *, is_ours: bool) -> Row:
    calm_s, struck_s = trained.calm.reaches_s(loss), trained.struck.reaches_s(loss)
    taken_s = trained.struck.lasted_s if struck_s is None else struck_s
    calm = "not reached" if calm_s is None else f"{calm_s:.1f} s"
    return Row(
        what=f"{trained.name}: seconds under kills to a loss of {loss:.4f} nats/byte",
        value=taken_s,
        unit="s" if struck_s is not None else "s, and not reached",
        against=f"itself in peace: {calm}",
        ratio=taken_s / ours_s if ours_s else 0.0,
        goal="reached" if is_ours else "none: shown; the ratio is to Skein's",
        holds=struck_s is not None or not is_ours,
        spread=0.0,
    )


def main() -> int:
    """Let each train in peace and under kills."""
    args = _arguments()
    if error := _wrong(args):
        print(f"error: {error}", file=sys.stderr)
        return 2
    contest = Contest(
        num_workers=args.workers,
        steps=args.steps,
        kill_every_s=args.kill_every,
        seed=args.seed,
        checkpoint_every_steps=args.checkpoint_every,
    )
    why_not = None
    with tempfile.TemporaryDirectory() as passing:
        folder = args.folder or Path(passing)
        ours = with_skein(contest, folder / "skein")
        others = [with_restarts(contest, folder / "restarts")]
        try:
            others.append(with_torchft(contest, folder / "torchft"))
        except NotToBeHad as error:
            why_not = str(error)
    rows = rows_of(contest, ours, others)
    if not args.json:
        for row in rows:
            print(f"{row.what}: {row.value:g} {row.unit} ({row.against})")
    figures = {"seed": contest.seed, "steps": contest.steps, "torchft_missing": why_not}
    return finish("chaos-compare", rows, figures=figures)


def _wrong(args: argparse.Namespace) -> UserError | None:
    if args.workers < NUM_REPLICAS or args.workers % NUM_REPLICAS:
        return UserError("--workers", args.workers, f"give a multiple of {NUM_REPLICAS}")
    if args.steps < 2 * NUM_SMOOTHED:
        return UserError("--steps", args.steps, f"give at least {2 * NUM_SMOOTHED}, for losses are smoothed")
    return None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.chaos_compare", description=main.__doc__)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--kill-every", type=float, default=15.0, help="seconds between SIGKILLs")
    parser.add_argument("--seed", type=int, default=0, help="of the kills and of the job")
    parser.add_argument("--checkpoint-every", type=int, default=5, help="steps, of checkpoint-restart")
    parser.add_argument("--folder", type=Path, help="keeps logs and what was told")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
