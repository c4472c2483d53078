"""Planned step times beside measured ones, and ways to plan beside each other: real workers, ten emulated cities.

    python -m bench.plan [--workers 20] [--steps 6] [--repeats 3] [--methods search,full,balanced] [--json]

Coordinator, workers, transport and training are the real ones; emulated is how long ops take and how slow links are
(docs/benchmarks-plan.md). Methods take turns. Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import get_args

import psutil

from bench.emulated.cluster import EmulatedCluster, free_addresses
from bench.emulated.fleet import OpTimes, memory_for, op_times, ten_cities
from bench.emulated.job import ACTIVATION_BYTES, Method, make_job, write_tokens
from bench.report import Row, finish, spread
from client.api import Client
from skein.config.job import JobSpec
from skein.errors import UserError
from skein.plan.cut import cut
from skein.plan.load import stage_loads
from skein.types import JobState
from skein.wire.views import GenerationBegun, StateChanged, StepFinished

NUM_WARM_STEPS = 2
"""After a plan is put into place: connections are opened in them. Not counted."""
SKIP_RATIO = 0.33
SLOTS = 3
"""Microbatches that a worker's memory holds. Source: SkipPipe (arXiv 2502.19913)."""
UNIT_S = 2.5 * 1.76
"""Forward and backward of one microbatch at one stage, before it is scaled. Source: as above."""
BUSIEST = 0.6
"""Share of the machine's time above which ops and links are no longer what they are said to be."""
SIMULATED = ("search", "full")
"""Methods whose prediction is a simulated step; that of the others is an estimate that knows no busy links."""
_GATHERING = "waiting for workers"
"""Why a job is paused at first: fewer are here than its stages and replicas ask for."""
_LEAST, _MOST = 0.9, 1.1
_AT_MOST = {"full": 0.6, "balanced": 1.0}
"""What a searched plan may take of another method's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One job: its median counted step beside the planned one, and the share of the machine's time used meanwhile.

    `busy` is that of all programs, `own` that of this one and those that it started.
    """

    method: Method
    predicted_s: float
    step_s: float
    busy: float
    own: float
    plan: str


class _Busy:
    """The machine's processors, from when this is made."""

    def __init__(self) -> None:
        self._total_s, self._idle_s, self._own_s = _processor_s()

    def shares(self) -> tuple[float, float]:
        """Of the time since then: what was not idle, and what this program's processes took."""
        total_s, idle_s, own_s = _processor_s()
        spent_s = max(total_s - self._total_s, 1e-9)
        return 1 - (idle_s - self._idle_s) / spent_s, (own_s - self._own_s) / spent_s


def _processor_s() -> tuple[float, float, float]:
    """Processor seconds since they began: of the machine, idle ones, and of this process and all below it."""
    times, here = psutil.cpu_times(), psutil.Process()
    own_s = 0.0
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            own = process.cpu_times()
            own_s += own.user + own.system
    return sum(times), times.idle + times.iowait, own_s


def train(client: Client, job: JobSpec) -> Outcome:
    """Run a job to its end. Steps count from the second after its last plan.

    Raises:
        UserError: it was paused or did not finish, or too few of its steps count.
    """
    submitted = client.submit(job)
    commits_s: list[float] = []
    busy, shares = _Busy(), (0.0, 0.0)
    for event in submitted.events():
        match event.body:
            case GenerationBegun():
                commits_s.clear()
            case StepFinished():
                commits_s.append(event.wall_s)
                busy = _Busy() if len(commits_s) == NUM_WARM_STEPS else busy
                shares = busy.shares()
            case StateChanged(state=JobState.PAUSED, reason=reason) if reason != _GATHERING:
                raise UserError("job", job.name, f"paused: {reason}")
            case _:
                pass
    status = submitted.status()
    if status.state is not JobState.FINISHED or len(commits_s) <= NUM_WARM_STEPS:
        found = f"{status.state} with {len(commits_s)} steps by its last plan"
        raise UserError("job", job.name, f"{found} ({status.reason}); see the logs, or give more --steps")
    return Outcome(
        method=job.plan.method,
        predicted_s=status.predicted_step_s,
        step_s=median(b - a for a, b in pairwise(commits_s[NUM_WARM_STEPS - 1 :])),
        busy=shares[0],
        own=shares[1],
        plan=status.plan,
    )


def prediction_row(outcomes: Sequence[Outcome]) -> Row:
    """Measured against predicted, of one method."""
    ratios = [x.step_s / x.predicted_s for x in outcomes]
    ratio, method = median(ratios), outcomes[0].method
    is_simulated = method in SIMULATED
    predicted_s = median(x.predicted_s for x in outcomes)
    busy, own = median(x.busy for x in outcomes), median(x.own for x in outcomes)
    return Row(
        what=f"{method}: measured step",
        value=median(x.step_s for x in outcomes),
        unit="s",
        against=f"{predicted_s:.2f} s predicted; processors {busy:.0%} busy, {own:.0%} by this",
        ratio=ratio,
        goal=f"{_LEAST} to {_MOST}" if is_simulated else "none: an estimate without busy links",
        holds=not is_simulated or _LEAST <= ratio <= _MOST,
        spread=spread([x.step_s for x in outcomes]),
    )


def method_row(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> Row:
    """A searched plan's step against another method's."""
    ratios = [a.step_s / b.step_s for a, b in zip(ours, theirs, strict=True)]
    method = theirs[0].method
    return Row(
        what=f"search: measured step, beside {method}",
        value=median(x.step_s for x in ours),
        unit="s",
        against=f"{method}: {median(x.step_s for x in theirs):.2f} s",
        ratio=median(ratios),
        goal=f"<= {_AT_MOST[method]}",
        holds=median(ratios) <= _AT_MOST[method],
        spread=spread(ratios),
    )


def busy_row(outcomes: Sequence[Outcome]) -> Row:
    """Whether the machine had time enough to emulate."""
    busy, own = median(x.busy for x in outcomes), median(x.own for x in outcomes)
    return Row(
        what="share of this machine's time in use, all programs together",
        value=busy,
        unit="",
        against=f"{BUSIEST}, above which ops and messages come late; {own:.2f} by this alone",
        ratio=busy / BUSIEST,
        goal=f"<= {BUSIEST}",
        holds=busy <= BUSIEST,
        spread=spread([x.busy for x in outcomes]),
    )


def rows_of(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """One row for each method, one for each comparison with `search`, and one for the machine."""
    by_method = {x.method: [y for y in outcomes if y.method == x.method] for x in outcomes}
    for found in by_method.values():
        yield prediction_row(found)
    for method in _AT_MOST:
        if "search" in by_method and method in by_method:
            yield method_row(by_method["search"], by_method[method])
    yield busy_row(outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is trained on how many workers; everything takes `scale` times as long as between the cities.

    `budget_s` is what a search for a plan may take.
    """

    num_workers: int
    scale: float
    budget_s: float

    @property
    def stages(self) -> int:
        """As many as leave about three workers for each."""
        return 6 if self.num_workers >= 16 else 4

    def job(self, name: str, tokens: Path, *, method: Method, steps: int) -> JobSpec:
        """Three microbatches for two workers."""
        return make_job(
            name,
            tokens,
            method=method,
            num_workers=self.num_workers,
            stages=self.stages,
            microbatches=3 * self.num_workers // 2,
            skip_ratio=SKIP_RATIO,
            budget_s=self.budget_s,
            steps=steps,
        )


def flops_per_s(job: JobSpec, scale: float) -> float:
    """Speed at which the work of a middle stage takes `UNIT_S`, scaled."""
    layers = job.layers
    loads = stage_loads(job, cut(layers, job.parallel.stages, job.parallel.layout))
    return loads[1].flops / (UNIT_S * scale)


def measure(
    folder: Path, shape: Shape, methods: Sequence[Method], *, steps: int, repeats: int, is_quiet: bool
) -> Iterator[Outcome]:
    """Start the fleet, and let methods take turns."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = write_tokens(folder / "tokens")
    links = ten_cities(
        free_addresses(shape.num_workers), scale=shape.scale, activation_bytes=ACTIVATION_BYTES
    )
    sample = shape.job("sample", tokens, method="full", steps=1)
    speed = flops_per_s(sample, shape.scale)
    times: OpTimes = op_times(sample, speed)
    with EmulatedCluster(folder, links) as cluster:
        cluster.start_fleet(
            [times] * shape.num_workers, flops_per_s=speed, memory_bytes=memory_for(sample, SLOTS)
        )
        if not is_quiet:
            print(f"links: {cluster.worst_link()}", flush=True)
        with cluster.client() as client:
            for turn in range(repeats):
                for method in methods:
                    job = shape.job(f"{method}-{turn}", tokens, method=method, steps=steps + NUM_WARM_STEPS)
                    outcome = train(client, job)
                    if not is_quiet:
                        _tell(outcome)
                    yield outcome


def _tell(outcome: Outcome) -> None:
    ratio = outcome.step_s / outcome.predicted_s
    print(
        f"{outcome.method}: {outcome.step_s:.2f} s a step, {ratio:.2f} of what was predicted; "
        f"processors {outcome.busy:.0%} busy, {outcome.own:.0%} by this; {outcome.plan}",
        flush=True,
    )


def methods_of(text: str) -> tuple[Method, ...]:
    """Methods by name, between commas.

    Raises:
        argparse.ArgumentTypeError: one is unknown.
    """
    known: dict[str, Method] = {method: method for method in get_args(Method)}
    try:
        return tuple(known[name] for name in text.split(","))
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"give some of {', '.join(known)}, between commas") from error


def main() -> int:
    """Train on an emulated fleet by each method's plan."""
    parser = argparse.ArgumentParser(prog="skein bench plan", description=main.__doc__)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6, help="counted, in each job")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", type=methods_of, default=get_args(Method))
    parser.add_argument("--scale", type=float, default=1 / 20, help="of all times between the cities")
    parser.add_argument("--budget-s", type=float, default=10.0, help="for each search")
    parser.add_argument("--folder", type=Path, help="for logs and state; by default a temporary one")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args()
    shape = Shape(num_workers=args.workers, scale=args.scale, budget_s=args.budget_s)
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = list(
            measure(
                args.folder or Path(temporary),
                shape,
                args.methods,
                steps=args.steps,
                repeats=args.repeats,
                is_quiet=args.json,
            )
        )
    return finish("plan", rows_of(outcomes))


if __name__ == "__main__":
    sys.exit(main())
