"""`python -m bench.studies.methods INSTANCE`: what other methods reach on an instance or a fleet, a JSON line each.

`skein plan INSTANCE --json` has the search's plan of the same problem, and the bound. Exit code 1 if none has a plan.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from bench.studies.methods.table import METHODS
from client.planning.case import case_of
from client.planning.messages import Objective
from skein.plan.plan import Infeasible
from skein.plan.route.evaluate import jittered_mean_s, timeline
from skein.plan.route.problem import Problem


def planned(problem: Problem, method: str, *, seed: int, budget_s: float) -> dict[str, object]:
    """What a method found, or why it has no plan."""
    until_s = time.monotonic() + budget_s
    found = METHODS[method](problem, seed=seed, may_go_on=lambda: time.monotonic() < until_s)
    if isinstance(found, Infeasible):
        return {"method": method, "step_s": None, "jittered_mean_s": None, "reason": found.reason}
    solved, routing = found  # a full pipeline has longer paths than were asked for
    return {
        "method": method,
        "step_s": timeline(solved, routing).step_s,
        "jittered_mean_s": jittered_mean_s(solved, routing),
        "reason": "",
    }


def main() -> int:
    """Each method in turn, each with the whole budget."""
    parser = argparse.ArgumentParser(prog="python -m bench.studies.methods", description=__doc__)
    parser.add_argument("instance", type=Path)
    parser.add_argument("--method", choices=METHODS, action="append", help="which ones (default: all)")
    parser.add_argument("--budget-s", type=float, default=10.0, help="of each (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--objective", type=Objective, choices=list(Objective))
    asked = parser.parse_args()
    problem = case_of(
        asked.instance.read_text(encoding="utf-8"), origin=str(asked.instance), objective=asked.objective
    ).searched
    rows = [planned(problem, x, seed=asked.seed, budget_s=asked.budget_s) for x in asked.method or METHODS]
    for row in rows:
        print(json.dumps(row))
    return 0 if any(row["step_s"] is not None for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
