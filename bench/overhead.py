"""Tokens per second of two stages on two worker processes, beside one plain torch process with two threads.

The same between certificates beside it in the clear.

    python -m bench.overhead [--runs 3] [--steps 6] [--certificates] [--json]

Same machine, model and batch; all take turns, the clear and the secure way in another order each time. The torch
process may take 4 or 16 samples at once: whichever is faster counts. `--certificates` leaves it away, and takes a
quarter of the batch, so that there are more turns in the time. Ends with one JSON line; exit code 1 if the goal is
missed.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.cluster import Cluster, running
from bench.report import Row, finish, speed_row, spread
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, CheckpointSpec, EvaluationSpec, JobSpec, ParallelSpec
from skein.model.families.llama import LlamaModel
from skein.types import JobState
from skein.wire.views import StepFinished

GOAL = 0.8
SECURE_GOAL = 0.95
"""Certificates may cost a twentieth of a step."""
SAMPLES, SECURE_SAMPLES = 32, 8
"""Of a step: beside a torch process, and where only the clear and the secure way are compared."""
NUM_WARM_STEPS = 2
"""At the start of each run, not counted on either side."""
_ALONE = """
import json, sys
import torch
from bench.reference import run_reference
from skein.config.job import JobSpec
torch.set_num_threads(2)
job = JobSpec.model_validate_json(sys.stdin.read())
steps = run_reference(job, job.total_steps, microbatches_at_once=int(sys.argv[1]))
print(json.dumps([step.seconds for step in steps]))
"""


def make_job(name: str, *, steps: int, samples: int = 32) -> JobSpec:
    """11 million parameters, so many sequences of 256 bytes in each step."""
    text = TextSource(path=sysconfig.get_path("stdlib"), glob="*.py")
    return JobSpec(
        name=name,
        model=LlamaModel(preset="llama-10m"),
        data=DataSpec(sources=(text,), sequence_tokens=256),
        batch=BatchSpec(samples=samples, microbatch_samples=2),
        parallel=ParallelSpec(stages=2, replicas=1),
        budget=BudgetSpec(steps=steps),
        evaluation=EvaluationSpec(every_steps=0, samples=4),
        checkpoint=CheckpointSpec(every_steps=0),
    )


def through_skein(cluster: Cluster, job: JobSpec) -> float:
    """Tokens per second from the first counted commit to the last."""
    with cluster.client() as client:
        submitted = client.submit(job)
        commits = [
            (e.wall_s, e.body.record.num_tokens)
            for e in submitted.events()
            if isinstance(e.body, StepFinished)
        ]
        assert submitted.status().state is JobState.FINISHED, submitted.status().reason
    counted = commits[NUM_WARM_STEPS - 1 :]
    return sum(tokens for _, tokens in counted[1:]) / (counted[-1][0] - counted[0][0])


def alone(job: JobSpec, microbatches_at_once: int) -> float:
    """Tokens per second of one process."""
    ran = subprocess.run(
        [sys.executable, "-c", _ALONE, str(microbatches_at_once)],
        input=job.model_dump_json(),
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds: list[float] = json.loads(ran.stdout)[NUM_WARM_STEPS:]
    return job.batch.samples * job.data.sequence_tokens * len(seconds) / sum(seconds)


def main() -> int:
    """Take turns, print the medians' ratio."""
    parser = argparse.ArgumentParser(prog="skein bench overhead", description=main.__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="counted, in each run")
    parser.add_argument(
        "--certificates", action="store_true", help="only what they cost, with a smaller batch"
    )
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args()
    skein: list[float] = []
    secure: list[float] = []
    torch: dict[int, list[float]] = {} if args.certificates else {2: [], 8: []}
    samples = SECURE_SAMPLES if args.certificates else SAMPLES
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "clear", 2) as cluster,
        running(Path(folder) / "secure", 2, has_certificates=True) as between_certificates,
    ):
        for run in range(args.runs):
            job = make_job(f"overhead-{run}", steps=args.steps + NUM_WARM_STEPS, samples=samples)
            ways = [(skein, cluster), (secure, between_certificates)]
            # Whatever drifts while they take turns is against each as often.
            for measured, fleet in ways if run % 2 == 0 else reversed(ways):
                measured.append(through_skein(fleet, job))
            for together, found in torch.items():
                found.append(alone(job, together))
            if not args.json:
                alongside = "".join(f", torch {found[-1]:.0f}" for found in torch.values())
                text = f"skein {skein[-1]:.0f} tokens/s, certificates {secure[-1]:.0f}{alongside}"
                print(f"run {run}: {text}", flush=True)
    if args.certificates:
        return finish("overhead", [secure_row(skein, secure)])
    # The faster way of each turn: it may be another one every time.
    best_of = [max(turn) for turn in zip(*torch.values(), strict=True)]
    ratio = median(skein) / median(best_of)
    row = Row(
        what="2 stages x 1 replica on 2 workers of 1 thread, llama-10m, sequence 256, batch 32 x 256",
        value=median(skein),
        unit="tokens/s",
        against=f"one torch process, 2 threads: {median(best_of):.0f} tokens/s",
        ratio=ratio,
        goal=f">= {GOAL}",
        holds=ratio >= GOAL,
        spread=max(spread(skein), spread(best_of)),
    )
    return finish("overhead", [row, secure_row(skein, secure)])


def secure_row(clear: Sequence[float], secure: Sequence[float]) -> Row:
    """What certificates cost: each run beside the one in the clear before it."""
    return speed_row(
        "the same between certificates", secure, clear, against="in the clear", least=SECURE_GOAL
    )


if __name__ == "__main__":
    sys.exit(main())
