"""Memory that workers take beside what their plans foretell, for every kind of rule, wire type and optimizer.

    skein bench memory [--only CASE ...] [--json]

Two workers, each with a whole decoder of 29 million parameters in float32 and small activations, on this machine.
Measured is the most that a worker's process ever held, less what it held once it had trained a decoder of a few
thousand parameters: the interpreter, libraries and their code. New workers for each case. Ends with one JSON line; exit
code 1 if a ratio is not within 0.85 to 1.15.
"""

import argparse
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import Cluster
from bench.report import Row, finish
from client.api import Client
from skein.config.aggregation import AggregationSpec, AllReduce, DiLoCo, Gossip, Lsgd, OneBitAdam, OneBitLamb
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, CheckpointSpec, EvaluationSpec, JobSpec, ParallelSpec
from skein.config.optimizer import AdadeltaSpec, AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.types import JobState

LEAST, MOST = 0.85, 1.15
NUM_WORKERS, NUM_STEPS = 2, 6
_LAMB = LambSpec(name="lamb", warmup_steps=1)
_FROZEN_LAMB = LambSpec(name="lamb", warmup_steps=1, bias_correction=False)
_ADAM = AdamWSpec(warmup_steps=1)
_SGD = SgdSpec(name="sgd", momentum=0.9, warmup_steps=1)

Case = tuple[AggregationSpec, OptimizerSpec]
CASES: Mapping[str, Case] = {
    "fp32": (AllReduce(), _ADAM),
    "bf16": (AllReduce(wire="bf16"), _ADAM),
    "int8": (AllReduce(wire="int8"), _ADAM),
    "sgd": (AllReduce(), _SGD),
    "adadelta": (AllReduce(), AdadeltaSpec(name="adadelta", warmup_steps=1)),
    "lamb": (AllReduce(), _LAMB),
    "one-bit-adam": (OneBitAdam(rule="one_bit_adam", warmup_steps=3), _ADAM),
    "one-bit-lamb": (OneBitLamb(rule="one_bit_lamb", warmup_steps=3, ratio_beta=0.5), _FROZEN_LAMB),
    "diloco": (DiLoCo(rule="diloco", local_steps=2), _ADAM),
    "diloco-fp32": (DiLoCo(rule="diloco", local_steps=2, wire="fp32"), _ADAM),
    "gossip": (Gossip(rule="gossip"), _SGD),
    "gossip-adam": (Gossip(rule="gossip"), _ADAM),
    "lsgd": (Lsgd(rule="lsgd", local_every_steps=1, global_every_steps=2, probe_samples=2), _ADAM),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes that the fullest worker took, and that its plan foretold."""

    measured_bytes: int
    foretold_bytes: int

    @property
    def ratio(self) -> float:
        return self.measured_bytes / self.foretold_bytes


def make_job(case: Case, name: str, *, width: int) -> JobSpec:
    """The decoder on the standard library's source, on one worker each."""
    rule, optimizer = case
    shape = LlamaShape(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=9,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    text = TextSource(path=sysconfig.get_path("stdlib"), glob="*.py")
    return JobSpec(
        name=f"memory-{name}",
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(text,), sequence_tokens=16, validation_ratio=0.02),
        batch=BatchSpec(samples=4, microbatch_samples=1),
        parallel=ParallelSpec(stages=1, replicas=NUM_WORKERS),
        optimizer=optimizer,
        aggregation=rule,
        budget=BudgetSpec(steps=NUM_STEPS),
        evaluation=EvaluationSpec(every_steps=0, samples=4),
        checkpoint=CheckpointSpec(every_steps=0),
    )


def measure(cluster: Cluster, client: Client, name: str) -> Measured:
    """Train through new workers, first the small decoder."""
    workers = [f"{name}-{index}" for index in range(NUM_WORKERS)]
    for worker in workers:
        cluster.start_worker(worker)
    cluster.wait_for_workers(NUM_WORKERS)
    pids = [cluster.workers[worker].pid for worker in workers]
    _train(client, make_job(CASES[name], name, width=16))
    bare = [_status_bytes(pid, "VmRSS:") for pid in pids]
    foretold_bytes = _train(client, make_job(CASES[name], name, width=512))
    peaks = [_status_bytes(pid, "VmHWM:") for pid in pids]
    for worker in workers:
        cluster.kill_worker(worker)
    taken = max(peak - before for peak, before in zip(peaks, bare, strict=True))
    return Measured(measured_bytes=taken, foretold_bytes=foretold_bytes)


def _train(client: Client, job: JobSpec) -> int:
    """Train to the end; bytes that the plan foretells of the fullest worker."""
    submitted = client.submit(job)
    foretold_bytes = 0
    for _ in submitted.events():
        uses = submitted.status().uses
        foretold_bytes = max([foretold_bytes, *(use.fixed_bytes + use.planned_bytes for use in uses)])
    status = submitted.status()
    assert status.state is JobState.FINISHED, status.reason
    return foretold_bytes


def _status_bytes(pid: int, field: str) -> int:
    """Memory of a process. Source: proc_pid_status(5)."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return next(int(line[1]) << 10 for line in lines if line[0] == field)


def main() -> int:
    """Run each case once, print what workers take beside what was foretold."""
    parser = argparse.ArgumentParser(prog="skein bench memory", description=main.__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, help="measure these cases alone")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.start_coordinator()
        with cluster.client() as client:
            for name in args.only or CASES:
                found = measure(cluster, client, name)
                if not args.json:
                    taken, foretold = (x / 2**20 for x in (found.measured_bytes, found.foretold_bytes))
                    print(f"{name}: {taken:.0f} of {foretold:.0f} MiB, {found.ratio:.2f}", flush=True)
                rows.append(_row(name, found))
    return finish("memory", rows)


def _row(name: str, found: Measured) -> Row:
    return Row(
        what=f"fullest worker of {name}, 29 million parameters",
        value=found.measured_bytes / 2**20,
        unit="MiB",
        against=f"foretold: {found.foretold_bytes / 2**20:.0f} MiB",
        ratio=found.ratio,
        goal=f"{LEAST} to {MOST}",
        holds=LEAST <= found.ratio <= MOST,
        spread=0.0,
    )


if __name__ == "__main__":
    sys.exit(main())
