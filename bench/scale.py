"""A thousand simulated workers take a hundred steps, through the very machines that the services run.

    python -m bench.scale [--runs N] [--json]

Each run replays its own run log into the state that was. Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import re
import subprocess
import sys
import time
from statistics import median

from bench.report import Row, finish, spread

SHAPE = {"--workers": 1000, "--stages": 20, "--microbatches": 100, "--steps": 100}
GOAL_S = 60.0


def simulate() -> tuple[float, dict[str, str]]:
    """Wall seconds of one run, the interpreter's start included, and what it said of itself."""
    began = time.perf_counter()
    options = [str(part) for option in SHAPE.items() for part in option]
    command = [sys.executable, "-m", "skein.sim", *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - began
    return seconds, dict(re.findall(r"(\w+)=(\S+)", ran.stdout))


def main() -> int:
    """Run it some times; exit 1 if it is too slow, or not the same every time."""
    parser = argparse.ArgumentParser(prog="skein bench scale", description=main.__doc__)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args()
    runs: list[float] = []
    told: list[dict[str, str]] = []
    for run in range(args.runs):
        seconds, said = simulate()
        runs.append(seconds)
        told.append(said)
        if not args.json:
            print(f"run {run}: {seconds:.1f} s, {said['events']} events, replay {said['replay']}")
    slowest = max(runs)
    events = {said["events"] for said in told}
    rows = [
        Row(
            what="1,000 workers in 4 sites, 20 stages x 50 replicas, 100 steps",
            value=median(runs),
            unit="s",
            against=f"{told[0]['simulated_s']} simulated seconds",
            ratio=median(runs) / float(told[0]["simulated_s"]),
            goal=f"<= {GOAL_S:.0f}",
            holds=slowest <= GOAL_S,
            spread=spread(runs),
        ),
        Row(
            what="events, every run alike, and each log replays into the state that was",
            value=float(told[0]["events"]),
            unit="events",
            against="the other runs",
            ratio=float(max(events, key=float)) / float(min(events, key=float)),
            goal="equal",
            holds=len(events) == 1 and all(said["replay"] == "equal" for said in told),
            spread=0.0,
        ),
    ]
    return finish("scale", rows)


if __name__ == "__main__":
    sys.exit(main())
