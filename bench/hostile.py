"""Hostile input: every method of every service is sent what is malformed, oversized, slow, forged and more.

    python -m bench.hostile [--seconds 60] [--workers 2] [--seed 1]

Real processes on loopback, with certificates, that train a job. They are attacked in ten ways by whoever has no
certificate, one of another authority, and one of each role; a worker's goes on after its Hello. Beside the attacks
real calls are made: jobs are listed, workers probed. Ends with one JSON line; exit code 1 if a process ended, grew by
more than 64 MiB after as many attacks as fit into a tenth of the time, answered real calls later than within a second
(p99), if a tensor was taken, or if afterwards there were other jobs, identities or workers than before.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import quantiles

from bench.cluster import Cluster, running
from bench.hostility.fight import Field, Tally, fight
from bench.hostility.messages import MALLORY
from bench.report import Figure, Row, finish
from client.api import Client
from coordinator.records.store import LOCK_FILE
from skein.config.data.sources import DigitsSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, CheckpointSpec, JobSpec, ParallelSpec
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.wire.credentials import NO_CREDENTIALS, Credentials, Wallet
from skein.wire.identity.authority import Authority
from skein.wire.identity.passport import Passport
from skein.wire.views import WorkerState

MOST_GROWTH_BYTES = 64 << 20
MOST_P99_S = 1.0
_LAST_CHARACTERS = 4000


def job(num_workers: int) -> JobSpec:
    """Something to train meanwhile, without end."""
    return JobSpec(
        name="honest",
        model=DigitsCnnModel(family="digits_cnn"),
        data=DataSpec(sources=(DigitsSource(format="digits"),), sequence_tokens=1),
        batch=BatchSpec(samples=8, microbatch_samples=2),
        parallel=ParallelSpec(stages=1, replicas=num_workers),
        budget=BudgetSpec(steps=1_000_000),
        checkpoint=CheckpointSpec(every_steps=0),
    )


def shown(passport: Passport) -> Credentials:
    return Credentials(wallet=Wallet(passport))


def field_of(cluster: Cluster, client: Client) -> Field:
    """Who is attacked, and identities for everybody."""
    admin = cluster.admin()
    other = Authority.new(now_s=time.time()).make_out(admin.caller, now_s=time.time())
    mallory = cluster.passport(MALLORY, "worker")
    lesser = [cluster.passport(f"{MALLORY}-{role}", role) for role in ("submitter", "viewer")]
    return Field(
        coordinator=cluster.target,
        workers={worker.worker: worker.address for worker in client.workers()},
        attackers=(NO_CREDENTIALS, *map(shown, (other, mallory, mallory, mallory, *lesser, admin))),
        honest=shown(admin),
        honest_worker=shown(cluster.passport("honest", "worker")),
    )


def state_of(client: Client) -> frozenset[str]:
    """What an attack may have made or ended: jobs, identities, workers."""
    jobs = {f"job {status.job} {status.state.is_final}" for status in client.jobs()}
    identities = {f"{one.role} {one.name} {bool(one.revoked_s)}" for one in client.identities()}
    here = {f"worker {one.worker}" for one in client.workers() if one.state is not WorkerState.LOST}
    return frozenset(jobs | identities | here) - {f"worker {MALLORY}"}


# --- the processes ---


def processes_of(cluster: Cluster) -> dict[str, int]:
    """Process ids by name."""
    coordinator = int((cluster.directory / "state" / LOCK_FILE).read_text())
    return {"coordinator": coordinator} | {name: process.pid for name, process in cluster.workers.items()}


def resident_bytes(pid: int) -> int | None:
    """What a process holds in memory; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return None
    lines = (line.split() for line in text.splitlines() if line.startswith("VmRSS:"))
    return next((int(line[1]) << 10 for line in lines), None)


def resident(pids: dict[str, int]) -> dict[str, int | None]:
    """What each process holds in memory."""
    return {name: resident_bytes(pid) for name, pid in pids.items()}


def rows_of(
    tally: Tally, before: dict[str, int | None], after: dict[str, int | None], num_changes: int = 0
) -> list[Row]:
    """What must hold."""
    gone = [name for name, held in after.items() if held is None]
    growth = max((held - (before[name] or 0) for name, held in after.items() if held is not None), default=0)
    p99_s = quantiles(tally.real_s, n=100)[98] if len(tally.real_s) > 1 else float("inf")

    def row(what: str, value: float, unit: str, most: float) -> Row:
        ratio = value / most if most else value
        return Row(
            what=what,
            value=value,
            unit=unit,
            against=f"{most:g} {unit}",
            ratio=ratio,
            goal=f"at most {most:g}",
            holds=value <= most,
            spread=0.0,
        )

    return [
        row("processes that ended", float(len(gone)), "processes", 0.0),
        row("largest growth of a process", float(growth), "bytes", float(MOST_GROWTH_BYTES)),
        row("real calls, p99", p99_s, "s", MOST_P99_S),
        row("real calls without an answer", float(tally.num_unanswered), "calls", 0.0),
        row("tensors of attackers that were taken", float(tally.accepted.total()), "tensors", 0.0),
        row("jobs, identities and workers that changed", float(num_changes), "of them", 0.0),
    ]


def main() -> int:
    """Attack for so long, and print the line."""
    parser = argparse.ArgumentParser(prog="skein bench hostile", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), args.workers, has_certificates=True) as cluster,
        cluster.client() as client,
    ):
        trained = client.submit(job(args.workers))
        at, pids = field_of(cluster, client), processes_of(cluster)
        # Buffers, threads and caches that any use fills are there after the first tenth.
        fight(at, seconds=args.seconds / 10, seed=args.seed)
        before, first, state = resident(pids), trained.status(), state_of(client)
        tally = fight(at, seconds=args.seconds, seed=args.seed)
        after, last = resident(pids), trained.status()
        changes = state ^ state_of(client)
        for name in (name for name, held in after.items() if held is None):
            print(f"{name} ended:\n{cluster.log_of(name)[-_LAST_CHARACTERS:]}", file=sys.stderr)
    figures: dict[str, Figure | dict[str, Figure]] = {
        "seconds": args.seconds,
        "statuses": {k: float(v) for k, v in tally.statuses.items()},
        "attacks": float(tally.num_attacks.total()),
        "kinds of attack": float(len(tally.num_attacks)),
        "steps meanwhile": float(last.step - first.step),
        "growth": {name: float((after[name] or 0) - (before[name] or 0)) for name in after},
        "changes": ", ".join(sorted(changes)),
    }
    return finish("hostile", rows_of(tally, before, after, len(changes)), figures=figures)


if __name__ == "__main__":
    sys.exit(main())
