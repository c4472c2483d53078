"""Memory and steps of four workers whose model's vocabulary is cut into shards, beside a whole one.

    python -m bench.vocabulary [--steps 6] [--json]

A decoder of 8 blocks of 256 features and 65,536 tokens, AdamW, 8 microbatches of one sample of 256 tokens: each matrix
over the vocabulary is as large as 20 blocks. New workers for each way; what counts is the most that a worker's process
ever held. Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from bench.cluster import running
from bench.report import Row, finish, spread
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, CheckpointSpec, EvaluationSpec, JobSpec, ParallelSpec
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.rows import RowCut, VocabularySpec, VocabularySplit
from skein.types import JobState
from skein.wire.views import StepFinished

NUM_WORKERS, NUM_WARM_STEPS = 4, 2
MOST_OF_WHOLE = 0.6
"""Of the fullest worker's memory."""
MOST_SPREAD = 0.05
"""Of workers' memory with both ends cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Most bytes that each worker held, and seconds of each counted step."""

    peaks_bytes: tuple[int, ...]
    steps_s: tuple[float, ...]


def make_job(split: VocabularySplit, *, steps: int) -> JobSpec:
    """The decoder, with its vocabulary cut so, on the standard library's source."""
    shape = LlamaShape(
        vocab_size=65_536,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    text = TextSource(path=sysconfig.get_path("stdlib"), glob="*.py")
    return JobSpec(
        name=f"vocabulary-{split.value}",
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(text,), sequence_tokens=256),
        batch=BatchSpec(samples=8, microbatch_samples=1),
        parallel=ParallelSpec(stages=NUM_WORKERS, vocabulary=VocabularySpec(split=split, rows=RowCut.EVEN)),
        budget=BudgetSpec(steps=steps),
        evaluation=EvaluationSpec(every_steps=0, samples=4),
        checkpoint=CheckpointSpec(every_steps=0),
    )


def run(split: VocabularySplit, folder: Path, *, steps: int) -> Ran:
    """Train through new workers."""
    with running(folder / split.value, NUM_WORKERS) as cluster, cluster.client() as client:
        submitted = client.submit(make_job(split, steps=steps + NUM_WARM_STEPS))
        commits_s = [e.wall_s for e in submitted.events() if isinstance(e.body, StepFinished)]
        peaks_bytes = tuple(_peak_bytes(process.pid) for process in cluster.workers.values())
        assert submitted.status().state is JobState.FINISHED, submitted.status().reason
    counted_s = commits_s[NUM_WARM_STEPS - 1 :]
    steps_s = (later - earlier for earlier, later in pairwise(counted_s))
    return Ran(peaks_bytes=peaks_bytes, steps_s=tuple(steps_s))


def _peak_bytes(pid: int) -> int:
    """Most memory that a process has held.

    Source: proc_pid_status(5), VmHWM.
    """
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return next(int(line[1]) << 10 for line in lines if line[0] == "VmHWM:")


def main() -> int:
    """Run each way once, print what each holds and takes."""
    parser = argparse.ArgumentParser(prog="skein bench vocabulary", description=main.__doc__)
    parser.add_argument("--steps", type=int, default=6, help="counted, of each way")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args()
    ran: dict[VocabularySplit, Ran] = {}
    with tempfile.TemporaryDirectory() as folder:
        for split in (VocabularySplit.OFF, VocabularySplit.OUTPUT, VocabularySplit.BOTH):
            ran[split] = run(split, Path(folder), steps=args.steps)
            if not args.json:
                held = ", ".join(f"{x / 2**20:.0f}" for x in ran[split].peaks_bytes)
                print(f"{split.value}: {held} MiB, {median(ran[split].steps_s):.2f} s a step", flush=True)
    whole, cut = ran[VocabularySplit.OFF], ran[VocabularySplit.BOTH]
    fullest, least = max(whole.peaks_bytes), max(cut.peaks_bytes)
    uneven = (max(cut.peaks_bytes) - min(cut.peaks_bytes)) / fmean(cut.peaks_bytes)
    what = f"{NUM_WORKERS} workers, 8 blocks of 256 features, 65,536 tokens, AdamW"
    rows = [
        Row(
            what=f"fullest worker, {what}",
            value=least / 2**20,
            unit="MiB",
            against=f"whole ends: {fullest / 2**20:.0f} MiB",
            ratio=least / fullest,
            goal=f"<= {MOST_OF_WHOLE}",
            holds=least <= MOST_OF_WHOLE * fullest,
            spread=uneven,
        ),
        Row(
            what=f"workers' memory, most less least over the mean, {what}",
            value=uneven,
            unit="",
            against="equal",
            ratio=uneven,
            goal=f"<= {MOST_SPREAD}",
            holds=uneven <= MOST_SPREAD,
            spread=uneven,
        ),
        Row(
            what=f"step on two cores, {what}",
            value=median(cut.steps_s),
            unit="s",
            against=f"whole ends: {median(whole.steps_s):.2f} s",
            ratio=median(cut.steps_s) / median(whole.steps_s),
            goal="none: four workers share two cores",
            holds=True,
            spread=max(spread(cut.steps_s), spread(whole.steps_s)),
        ),
    ]
    return finish("vocabulary", rows)


if __name__ == "__main__":
    sys.exit(main())
