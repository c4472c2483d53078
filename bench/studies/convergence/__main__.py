"""What leaving stages out does to learning: the same small language model, trained with 0, 25, 33 and 50 % left out.

    python -m bench.studies.convergence [--steps N] [--seeds 0,1] [--folder DIR] [--record FILE] [--plots DIR] [--json]
    python -m bench.studies.convergence --again FILE [--step-s 0=136.6,0.33=63.3] [--record FILE] [--plots DIR] [--json]

Twelve stages of one layer, the first with the embedding; eleven microbatches per step of the standard library's own
source. Equal data, order and initial weights for all. A folder keeps what was done, so that an interrupted run goes on.
The second form trains nothing and takes a saved record. Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file, save_file

from bench.reference import run_reference
from bench.report import Row, finish, spread
from bench.studies.convergence.curves import (
    Journal,
    Kind,
    Record,
    RunRecord,
    Told,
    load,
    perplexity,
    run_record,
    save,
)
from bench.studies.convergence.pictures import draw
from bench.studies.convergence.skipping import MAX_JUMP, SkippingTraining, Stages, even_paths
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import (
    BatchSpec,
    BudgetSpec,
    CheckpointSpec,
    EvaluationSpec,
    JobSpec,
    ParallelSpec,
    SkipSpec,
)
from skein.config.optimizer import AdamWSpec
from skein.errors import UserError
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.types import Layout

NUM_STAGES = 12
"""The least of which a quarter, a third and a half are whole numbers."""
LEFT_OUT = (0, 3, 4, 6)
NUM_MICROBATCHES = NUM_STAGES - 1
"""The least with which all stages that may be left out are visited equally often, whatever the ratio."""
EVALUATE_EVERY = 100
NUM_COMPARED_STEPS = 10
GOAL = 1e-5
"""Float32 sums in another order; tests/e2e/test_parity.py asks the same of the services."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training, kept in this folder."""

    job: JobSpec
    folder: Path

    @property
    def num_left_out(self) -> int:
        """Stages that each microbatch leaves out."""
        return self.job.parallel.stages - self.job.num_visited_stages

    @property
    def stem(self) -> str:
        """Names the files of this run and of no other."""
        return f"{self.num_left_out}-{self.job.seed}-{self.job.content_hash()[:12]}"


def make_job(*, steps: int, seed: int, num_left_out: int = 0) -> JobSpec:
    """0.55 million parameters in twelve layers of width 64, windows of 64 bytes, 2,816 bytes per step."""
    shape = LlamaShape(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=NUM_STAGES,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    text = TextSource(path=sysconfig.get_path("stdlib"), glob="*.py")
    return JobSpec(
        name="convergence",
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(text,), sequence_tokens=64),
        batch=BatchSpec(samples=4 * NUM_MICROBATCHES, microbatch_samples=4),
        parallel=ParallelSpec(stages=NUM_STAGES, layout=Layout.LOOP),
        skip=SkipSpec(ratio=num_left_out / NUM_STAGES, max_jump=MAX_JUMP),
        optimizer=AdamWSpec(learning_rate=5e-3, warmup_steps=min(100, steps // 10)),
        budget=BudgetSpec(steps=steps),
        # A short run shows that it works, and is not worth minutes of evaluation.
        evaluation=EvaluationSpec(samples=512 if steps >= 1000 else 64),
        checkpoint=CheckpointSpec(every_steps=0),
        seed=seed,
    )


def leave_out_paths() -> tuple[Stages, ...]:
    """Through what every trained model is asked: for each ratio, each stage left out equally often."""
    return tuple(
        path for left_out in LEFT_OUT[1:] for path in even_paths(NUM_STAGES, left_out, NUM_MICROBATCHES)
    )


def carry_out(run: Run) -> tuple[Told, ...]:
    """Trains what is left to train, and tells everything, from the first step on."""
    journal = Journal(run.folder / f"{run.stem}.jsonl")
    try:
        told = journal.read()
        if sum(t.kind is Kind.LEFT_OUT for t in told) < len(leave_out_paths()):
            training = SkippingTraining(run.job)
            try:
                _train(run, training, journal)
                _ask(run, training, journal)
            finally:
                training.close()
        return journal.read()
    finally:
        journal.close()


def _train(run: Run, training: SkippingTraining, journal: Journal) -> None:
    kept = run.folder / f"{run.stem}.safetensors"
    state = load_file(kept) if kept.exists() else None
    if state is not None:
        training.load_state(state)
    begin = 0 if state is None else int(state["step"])
    steps = run.job.total_steps
    for step in range(begin, steps):
        if step == 0:
            journal.tell(Told(kind=Kind.VALIDATION, num_updates=0, loss=training.evaluate()))
        journal.tell(Told(kind=Kind.STEP, num_updates=step, loss=training.step(step).loss))
        if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == steps:
            journal.tell(Told(kind=Kind.VALIDATION, num_updates=step + 1, loss=training.evaluate()))
            unfinished = kept.with_suffix(".unfinished")
            save_file(training.copy_state(), unfinished)
            unfinished.replace(kept)


def _ask(run: Run, training: SkippingTraining, journal: Journal) -> None:
    for stages in leave_out_paths():
        loss = training.evaluate(stages)
        journal.tell(Told(kind=Kind.LEFT_OUT, num_updates=run.job.total_steps, loss=loss, stages=stages))


def farthest_from_reference(run: Run, told: Sequence[Told]) -> float:
    """The greatest relative difference of a loss from plain torch, over the first steps."""
    losses = [t.loss for t in sorted(told, key=lambda t: t.num_updates) if t.kind is Kind.STEP]
    steps = run_reference(run.job, min(NUM_COMPARED_STEPS, run.job.total_steps))
    # Only as many as plain torch was asked for.
    return max(abs(ours - step.loss) / step.loss for ours, step in zip(losses, steps, strict=False))


def step_seconds(text: str) -> dict[int, float]:
    """`RATIO=SECONDS,...` as seconds per step by the number of stages left out.

    Raises:
        UserError: not of that form, or a ratio that is no share of the stages.

    >>> step_seconds("0=136.6,0.33=63.3")
    {0: 136.6, 4: 63.3}
    """
    return {
        _left_out(ratio): _number(seconds) for ratio, seconds in map(_halves, filter(None, text.split(",")))
    }


def _halves(part: str) -> tuple[str, str]:
    ratio, _, seconds = part.partition("=")
    return ratio, seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UserError(
            "--step-s", text, "give RATIO=SECONDS, separated by commas: 0=136.6,0.33=63.3"
        ) from error


def _left_out(ratio: str) -> int:
    stages = _number(ratio) * NUM_STAGES
    # 0.33 is meant to be a third: within a twentieth of a stage of 4 of 12.
    if round(stages) not in LEFT_OUT or abs(stages - round(stages)) > 0.05:
        raise UserError("--step-s", ratio, "give one of the ratios 0, 0.25, 0.33 and 0.5")
    return round(stages)


def rows_of(record: Record) -> list[Row]:
    """The figures of a record: where each ratio ends, and what each bears at inference."""
    ends = [
        _end_row(record, f"{record.percent(left_out)} % left out", record.runs_with(left_out))
        for left_out in record.trained_with
    ]
    half = [_end_row(record, "0 % left out, half the steps", record.half)] if record.half else []
    return [*ends, *half] + [
        _bears_row(record, trained_with, asked)
        for asked in LEFT_OUT[1:]
        for trained_with in record.trained_with
    ]


def _end_row(record: Record, what: str, runs: Sequence[RunRecord]) -> Row:
    ends = [run.validation[-1][1] for run in runs]
    begins = [run.validation[0][1] for run in runs]
    plain = fmean(run.validation[-1][1] for run in record.runs_with(0))
    return Row(
        what=f"{what}: validation loss of the whole model after {runs[0].validation[-1][0]} steps",
        value=fmean(ends),
        unit="nats/byte",
        against=f"0 %: {plain:.4f}",
        ratio=fmean(ends) / plain,
        goal="below the loss before training",
        holds=max(ends) < min(begins),
        spread=spread(ends),
    )


def _bears_row(record: Record, trained_with: int, asked: int) -> Row:
    found = [perplexity(loss) for run in record.runs_with(trained_with) for loss in _asked(run, asked)]
    whole = fmean(perplexity(run.validation[-1][1]) for run in record.runs_with(trained_with))
    return Row(
        what=f"trained with {record.percent(trained_with)} % left out, asked with {record.percent(asked)} %",
        value=fmean(found),
        unit="perplexity/byte",
        against=f"asked with all stages: {whole:.3f}",
        ratio=fmean(found) / whole,
        goal="none: shown",
        holds=True,
        spread=spread(found),
    )


def _asked(run: RunRecord, num_left_out: int) -> tuple[float, ...]:
    return next(part.losses for part in run.leave_outs if part.num_left_out == num_left_out)


def _reference_row(distance: float) -> Row:
    return Row(
        what=f"0 % left out: loss of the first {NUM_COMPARED_STEPS} steps, greatest relative distance",
        value=distance,
        unit="",
        against="plain torch, no paths",
        ratio=distance / GOAL,
        goal=f"<= {GOAL:g}",
        holds=distance <= GOAL,
        spread=0.0,
    )


def _trained(steps: int, seeds: Sequence[int], folder: Path, *, is_quiet: bool) -> tuple[Record, float]:
    """All runs, and how far those with nothing left out are from plain torch."""
    runs, half, farthest = [], [], 0.0
    for seed in seeds:
        for left_out in LEFT_OUT:
            run = Run(job=make_job(steps=steps, seed=seed, num_left_out=left_out), folder=folder)
            told = carry_out(run)
            if left_out == 0:
                farthest = max(farthest, farthest_from_reference(run, told))
            runs.append(_kept(run, told, is_quiet=is_quiet))
        run = Run(job=make_job(steps=max(1, steps // 2), seed=seed), folder=folder)
        half.append(_kept(run, carry_out(run), is_quiet=is_quiet))
    record = Record(num_stages=NUM_STAGES, num_steps=steps, step_s={}, runs=tuple(runs), half=tuple(half))
    return record, farthest


def _kept(run: Run, told: Sequence[Told], *, is_quiet: bool) -> RunRecord:
    steps, seed, left_out = run.job.total_steps, run.job.seed, run.num_left_out
    kept = run_record(told, num_left_out=left_out, seed=seed, num_stages=NUM_STAGES, num_steps=steps)
    if not is_quiet:
        loss = kept.validation[-1][1]
        print(f"seed {seed}, {left_out} of {NUM_STAGES} left out, {steps} steps: {loss:.4f} nats/byte")
    return kept


def main() -> int:
    """Train with each share of the stages left out, or take the runs of a record, and say what became of it."""
    args = _arguments()
    torch.set_num_threads(1)
    try:
        step_s = step_seconds(args.step_s)
        record, rows = _made(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record = replace(record, step_s=step_s or record.step_s)
    if args.record is not None:
        save(record, args.record)
    if args.plots is not None:
        draw(record, args.plots)
    return finish("convergence", rows + rows_of(record))


def _made(args: argparse.Namespace) -> tuple[Record, list[Row]]:
    if args.again is not None:
        return load(args.again), []
    with tempfile.TemporaryDirectory() as passing:
        folder = args.folder or Path(passing)
        record, farthest = _trained(args.steps, args.seeds, folder, is_quiet=args.json)
    return record, [_reference_row(farthest)]


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.convergence", description=main.__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=_seeds, default=(0,), help="separated by commas")
    parser.add_argument("--folder", type=Path, help="keeps the runs; interrupted ones are gone on with")
    parser.add_argument("--again", type=Path, help="train nothing, take the runs of this record")
    parser.add_argument(
        "--step-s", default="", help="seconds per step on a fleet, by ratio: 0=136.6,0.33=63.3"
    )
    parser.add_argument("--record", type=Path, help="write all curves into this file")
    parser.add_argument("--plots", type=Path, help="draw pictures into this folder")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
