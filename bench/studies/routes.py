"""`python -m bench.studies.routes`: our plans beside the reference's, and how far from optimal they may be.

Problems have the shapes that SkipPipe's authors publish (stages, skip ratios, slots and waves; one city table) and
some of their kind: five cities, unequal workers, more workers. Ours are made by `skein plan` as a user calls it, one
process, the others by `bench.studies.methods`; all are judged by the mean of its step under 3 % jitter of all times.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.report import Row, finish, spread

_CITIES = Path(__file__).parents[1] / "emulated" / "cities.json"
_ACTIVATION_BYTES = 4 * 1024 * 1024 * 8
"""fp32, width 1024, context 1024, 8 samples: the reference's microbatch."""
_OVERHEAD_S = 0.35
_SECONDS_PER_LAYER = 0.055 * 8
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem: workers per stage, stages that a path visits, and where the workers are."""

    name: str
    sizes: tuple[int, ...]
    path_len: int
    layers: int = 4
    num_cities: int = 10
    is_unequal: bool = False

    @property
    def num_workers(self) -> int:
        return sum(self.sizes)


SMALL = (
    Case(name="9 workers, 25 %", sizes=(3, 2, 2, 2), path_len=3, layers=6),
    Case(name="18 workers, 25 %", sizes=(6, 4, 4, 4), path_len=3, layers=6),
    Case(name="20 workers, 33 %", sizes=(5, 3, 3, 3, 3, 3), path_len=4),
    Case(name="20 workers, 33 %, five cities", sizes=(5, 3, 3, 3, 3, 3), path_len=4, num_cities=5),
    Case(name="20 workers, 33 %, unequal", sizes=(5, 3, 3, 3, 3, 3), path_len=4, is_unequal=True),
    Case(name="22 workers, 50 %", sizes=(7, 3, 3, 3, 3, 3), path_len=3),
)
LARGE = (
    Case(name="40 workers, 33 %", sizes=(10, 6, 6, 6, 6, 6), path_len=4),
    Case(name="100 workers, 25 %", sizes=(16, *[12] * 7), path_len=6, layers=3),
)
_INPUT = "instance.json"
_ROOT = Path(__file__).parents[2]
REFERENCE, FULL = "skippipe", "full"


def instance(case: Case) -> dict[str, object]:
    """The problem as an instance file has it."""
    table = json.loads(_CITIES.read_text(encoding="utf-8"))
    cities: list[str] = table["cities"][: case.num_cities]
    between = {frozenset((x["a"], x["b"])): x for x in table["links"]}
    places = [cities[worker % len(cities)] for worker in range(case.num_workers)]

    def seconds(a: int, b: int) -> float:
        if a == b:
            return 0.0
        link = table["same_city"] if places[a] == places[b] else between[frozenset((places[a], places[b]))]
        return float(
            link["latency_ms"] / 1000 + _ACTIVATION_BYTES / (link["bandwidth_gib_s"] * _GIB) + _OVERHEAD_S
        )

    luck = random.Random(5)
    speeds = [luck.choice((0.6, 1.0, 1.0, 1.5)) if case.is_unequal else 1.0 for _ in places]
    return {
        "name": case.name,
        "n_nodes": case.num_workers,
        "stage_sizes": list(case.sizes),
        "path_len": case.path_len,
        "memory": 3,
        "waves": 2,
        "fwd_s": [_SECONDS_PER_LAYER * case.layers * speed for speed in speeds],
        "bwd_factor": 1.5,
        "loss_factor": 0.25,
        "comm_s": [[seconds(a, b) for b in range(case.num_workers)] for a in range(case.num_workers)],
        "locations": places,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What `skein plan` said: mean under jitter, step without, bound, and when the first plan was there."""

    jittered_s: float
    step_s: float
    bound_s: float
    first_plan_s: float


def planned(case: Case, *, budget_s: float, seed: int) -> Answer | None:
    """Our plan; None if there is none."""
    command = ["client.cli", "plan", _INPUT, "--json", "--budget-s", str(budget_s), "--seed", str(seed)]
    if (line := _told(case, command)) is None:
        return None
    told = json.loads(line)
    return Answer(
        jittered_s=told["parts"]["jittered_mean_s"],
        step_s=told["parts"]["makespan_s"],
        bound_s=told["bound"]["seconds"] if told["bound"] else 0.0,
        first_plan_s=told["effort"]["first_plan_s"],
    )


def other_s(case: Case, method: str, *, budget_s: float) -> float | None:
    """Mean under jitter of another method's plan; None if it finds none."""
    options = ["--method", method, "--budget-s", str(budget_s), "--seed", "5"]
    line = _told(case, ["bench.studies.methods", _INPUT, *options])
    return None if line is None else float(json.loads(line)["jittered_mean_s"])


def _told(case: Case, arguments: Sequence[str]) -> str | None:
    """The last line that a module prints of a problem, named `instance.json`; None if it has no plan."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _INPUT).write_text(json.dumps(instance(case)), encoding="utf-8")
        found = {"PYTHONPATH": str(_ROOT)}
        command = [sys.executable, "-P", "-m", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=folder, env=os.environ | found
        )
    return None if done.returncode else done.stdout.splitlines()[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Our plans of one problem, of several seeds, beside the reference's plan and its full pipeline."""

    case: Case
    ours: tuple[Answer, ...]
    reference_s: float | None
    full_s: float | None

    @property
    def jittered_s(self) -> float:
        return median(x.jittered_s for x in self.ours)

    @property
    def gap(self) -> float:
        return median(x.step_s / x.bound_s - 1 if x.bound_s else float("inf") for x in self.ours)


def compared(
    case: Case, *, budget_s: float, reference_s: float, seeds: Sequence[int], say: Callable[[str], None]
) -> Compared:
    """One problem by all three."""
    ours = [planned(case, budget_s=budget_s, seed=seed) for seed in seeds]
    found = Compared(
        case=case,
        ours=tuple(x for x in ours if x is not None),
        reference_s=other_s(case, REFERENCE, budget_s=reference_s),
        full_s=other_s(case, FULL, budget_s=reference_s),
    )
    told = "none" if found.reference_s is None else f"{found.reference_s:.1f} s"
    whole = "none" if found.full_s is None else f"{found.full_s:.1f} s"
    say(
        f"{case.name}: {found.jittered_s:.1f} s, gap {found.gap:.1%}, first plan {found.ours[0].first_plan_s:.2f} s; "
        f"reference {told}, full pipeline {whole}",
    )
    return found


def rows(small: Sequence[Compared], large: Sequence[Compared]) -> Iterator[Row]:
    """The figures, each with its goal."""
    ratios = [x.jittered_s / x.reference_s for x in small if x.reference_s is not None]
    if ratios:
        yield _row(
            "mean step under 3 % jitter",
            median(ratios),
            "reference",
            "<= 0.88",
            median(ratios) <= 0.88,
            ratios,
        )
        yield _row(
            "the same, worst problem", max(ratios), "reference", "<= 1.01", max(ratios) <= 1.01, ratios
        )
    for x in small:
        if x.case.name == "20 workers, 33 %" and x.full_s is not None:
            ratio = x.jittered_s / x.full_s
            yield _row("20 workers, 33 % left out", ratio, "full pipeline", "<= 0.42", ratio <= 0.42, [ratio])
    gaps = [x.gap for x in small if 18 <= x.case.num_workers <= 22]
    if gaps:
        yield _row(
            "gap to the bound, 18 to 22 workers", median(gaps), "bound", "<= 0.12", median(gaps) <= 0.12, gaps
        )
        yield _row("the same, worst problem", max(gaps), "bound", "<= 0.20", max(gaps) <= 0.2, gaps)
    for group, goal_s in ((small, 1.0), (large, 5.0)):
        first = [answer.first_plan_s for x in group for answer in x.ours]
        if first:
            what = f"first legal plan, up to {max(x.case.num_workers for x in group)} workers"
            yield Row(
                what=what,
                value=max(first),
                unit="s",
                against="start of the command",
                ratio=max(first) / goal_s,
                goal=f"<= {goal_s:g} s",
                holds=max(first) <= goal_s,
                spread=spread(first),
            )


def _row(what: str, value: float, against: str, goal: str, holds: bool, runs: Sequence[float]) -> Row:
    return Row(
        what=what,
        value=value,
        unit="",
        against=against,
        ratio=value,
        goal=goal,
        holds=holds,
        spread=spread(runs),
    )


def _aloud(line: str) -> None:
    print(line, flush=True)


def _silent(_line: str) -> None:
    """For those who want the last line alone."""


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(prog="python -m bench.studies.routes", description=__doc__)
    parser.add_argument("--budget-s", type=float, default=10.0, help="for each of our plans (default: 10)")
    parser.add_argument("--reference-s", type=float, default=60.0, help="for each other plan (default: 60)")
    parser.add_argument("--seeds", type=int, default=3, help="of our plans for each problem (default: 3)")
    parser.add_argument(
        "--large", action="store_true", help="40 and 100 workers too, with six times the budget"
    )
    parser.add_argument("--json", action="store_true", help="nothing but the last line")
    asked = parser.parse_args()
    seeds, say = range(asked.seeds), (_silent if asked.json else _aloud)
    small = [
        compared(case, budget_s=asked.budget_s, reference_s=asked.reference_s, seeds=seeds, say=say)
        for case in SMALL
    ]
    large = [
        compared(case, budget_s=6 * asked.budget_s, reference_s=asked.reference_s, seeds=[0], say=say)
        for case in (LARGE if asked.large else ())
    ]
    return finish("routes", rows(small, large))


if __name__ == "__main__":
    sys.exit(main())
