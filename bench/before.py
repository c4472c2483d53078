"""Speed of a small dense job, and plans, by this checkout beside those by an earlier commit, in turns.

    python -m bench.before COMMIT [--runs 5] [--steps 10] [--samples 8] [--plans] [--json]

Both have a coordinator and two workers of one thread, on this machine at once; the job is that of `bench.overhead` with
small steps, so that what the service does beside products shows. One works while the other waits for work, in another
order each time, and each pair gives a ratio. With `--plans` both also make the plans of `tests.golden`, whose bytes are
to be equal but for what reasons say beyond how a plan was made. Ends with one JSON line; exit code 1 if a goal is
missed.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.overhead import NUM_WARM_STEPS
from bench.report import Row, finish, speed_row
from skein.errors import UserError

GOAL = 0.98
"""Speed that what came since may leave."""
ROOT = Path(__file__).resolve().parent.parent
_TURNS = """
import sys, tempfile
from pathlib import Path
from bench.cluster import running
from bench.overhead import make_job, through_skein
from skein.config.job import BatchSpec
steps, samples = map(int, sys.argv[1:])
batch = BatchSpec(samples=samples, microbatch_samples=2)
with tempfile.TemporaryDirectory() as folder, running(Path(folder), 2) as cluster:
    for turn in sys.stdin:
        job = make_job(f"before-{turn.strip()}", steps=steps)
        print(through_skein(cluster, job.model_copy(update={"batch": batch})), flush=True)
"""
_PLANS = """
import hashlib, json, sys
from dataclasses import replace
from skein.plan.plan import Plan
from tests.golden.plans import payload, plans
found = {}
for name, plan in plans():
    if isinstance(plan, Plan):
        plan = replace(plan, reason=type(plan.reason)(plan.reason.all[:1]))
    found[name] = hashlib.sha256(payload(plan)).hexdigest()
print(json.dumps(found))
"""


class Turns:
    """One checkout's cluster, which trains whenever it is asked to."""

    def __init__(self, tree: Path, process: "subprocess.Popen[str]") -> None:
        self._tree = tree
        self._process = process

    def take(self, turn: int) -> float:
        """Tokens per second of one job.

        Raises:
            UserError: that checkout could not do it; what it said stands above.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{turn}\n")
        self._process.stdin.flush()
        told = self._process.stdout.readline()
        if not told:
            raise UserError(
                "COMMIT", str(self._tree), "its job did not finish: take a commit that has bench/overhead.py"
            )
        return float(told)


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A folder with all files of a commit, until the end of the block.

    Raises:
        UserError: there is no such commit.
    """
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise UserError("COMMIT", commit, f"{packed.stderr.decode().strip()}: name one of this repository")
    with tempfile.TemporaryDirectory(prefix="skein-before-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


@contextmanager
def turns(tree: Path, steps: int, samples: int) -> Iterator[Turns]:
    """A checkout's cluster, which ends with the block."""
    command = [sys.executable, "-c", _TURNS, str(steps), str(samples)]
    with subprocess.Popen(
        command, cwd=tree, env=_environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        # Its input ends when the block does, and with that its cluster.
        yield Turns(tree, process)


def plans_of(tree: Path) -> Mapping[str, str]:
    """Digests of the golden plans as a checkout makes them."""
    made = subprocess.run(
        [sys.executable, "-c", _PLANS],
        cwd=tree,
        env=_environment(tree),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(made.stdout)
    return found


def _environment(tree: Path) -> dict[str, str]:
    """What is installed comes after the checkout's own packages, in all processes that begin here."""
    return os.environ | {"PYTHONPATH": str(tree)}


def main() -> int:
    """Take turns, print the median of the pairs' ratios."""
    parser = argparse.ArgumentParser(prog="skein bench before", description=main.__doc__)
    parser.add_argument("commit", help="what to compare with")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="counted, in each run")
    parser.add_argument("--samples", type=int, default=8, help="of a step, 2 in a microbatch")
    parser.add_argument("--plans", action="store_true", help="compare plans too")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args()
    try:
        with checkout(args.commit) as tree:
            rows = [pairs_row(*measured(tree, args), args.commit)] if args.runs else []
            rows += [plans_row(plans_of(ROOT), plans_of(tree), args.commit)] if args.plans else []
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return finish("before", rows)


def measured(tree: Path, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Tokens per second of every turn: now, and before."""
    now: list[float] = []
    before: list[float] = []
    with ExitStack() as stack:
        ways = [
            (found, stack.enter_context(turns(at, args.steps + NUM_WARM_STEPS, args.samples)))
            for found, at in ((now, ROOT), (before, tree))
        ]
        for run in range(args.runs):
            # Whatever drifts while they take turns is against each as often.
            for found, way in ways if run % 2 == 0 else reversed(ways):
                found.append(way.take(run))
            if not args.json:
                print(f"run {run}: {now[-1]:.0f} tokens/s, before {before[-1]:.0f}", flush=True)
    return now, before


def pairs_row(now: Sequence[float], before: Sequence[float], commit: str) -> Row:
    """Each run beside the one before it by the other checkout."""
    what = "2 stages x 1 replica on 2 workers of 1 thread, llama-10m, sequence 256"
    return speed_row(what, now, before, against=commit, least=GOAL)


def plans_row(now: Mapping[str, str], before: Mapping[str, str], commit: str) -> Row:
    """Plans that both make, and how many of them are equal; those that are not stand on standard error."""
    both = sorted(now.keys() & before.keys())
    others = [name for name in both if now[name] != before[name]]
    for name in others:
        print(f"differs: {name}", file=sys.stderr)
    num_equal = len(both) - len(others)
    return Row(
        what="plans at a fixed seed, equal to the byte",
        value=float(num_equal),
        unit="plans",
        against=f"{commit}: {len(both)} plans",
        ratio=num_equal / max(1, len(both)),
        goal="all",
        holds=bool(both) and not others,
        spread=0.0,
    )


if __name__ == "__main__":
    sys.exit(main())
