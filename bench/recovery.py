"""What recovery costs, and what it costs to be ready for it: real processes on this machine.

    python -m bench.recovery [--only log,join,join-data,third,silence,deaths,coordinator] [--deaths 30] [--kills 50]
                             [--joins 5] [--text-mb 200] [--thirds 3] [--silences 20] [--turns 20] [--seed 0] [--json]

Each part has a cluster of its own. Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.chaosing.cluster import running_behind_wires
from bench.chaosing.meter import Meter
from bench.recovering import boundary, deaths, joins, leader, reading, silences
from bench.recovering.cluster import recovering
from bench.report import Row, finish

Part = Callable[[Path, argparse.Namespace], list[Row]]
NUM_STEPS_IN_TURN = 6
NUM_LOG_WORKERS = 4


def _log(folder: Path, args: argparse.Namespace) -> list[Row]:
    with recovering(folder, NUM_LOG_WORKERS) as (cluster, client):
        turns = boundary.take_turns(cluster, client, num_turns=args.turns, num_steps=NUM_STEPS_IN_TURN)
    return boundary.rows_of(turns)


def _join(folder: Path, args: argparse.Namespace) -> list[Row]:
    with recovering(folder, joins.NUM_WORKERS) as (cluster, client):
        calm = [joins.join(cluster, client, run=run, donor_dies=False) for run in range(args.joins)]
        harsh = [joins.join(cluster, client, run=run, donor_dies=True) for run in range(args.joins)]
    return [
        *joins.rows_of(calm, what="a sixth worker joins five"),
        *joins.rows_of(harsh, what="it joins and one of two donors is killed"),
    ]


def _join_data(folder: Path, args: argparse.Namespace) -> list[Row]:
    text = reading.write_corpus(folder / "corpus", num_bytes=args.text_mb * 1_000_000)
    reading.keep_tokens_below(folder / "cache")
    with recovering(folder, reading.NUM_WORKERS) as (cluster, client):
        return [reading.join(cluster, client, text, cache=folder / "cache-of-the-newcomer")]


def _third(folder: Path, args: argparse.Namespace) -> list[Row]:
    with recovering(folder, deaths.NUM_WORKERS) as (cluster, client):
        found = [
            [deaths.third(cluster, client, run=run, takes_a_stage=takes) for run in range(args.thirds)]
            for takes in (False, True)
        ]
    return deaths.third_rows(*found)


def _deaths(folder: Path, args: argparse.Namespace) -> list[Row]:
    with recovering(folder, deaths.NUM_WORKERS) as (cluster, client):
        num_microbatches = deaths.fitting_microbatches(client, seed=args.seed)
        found = deaths.one_by_one(
            cluster, client, num_deaths=args.deaths, num_microbatches=num_microbatches, seed=args.seed
        )
    return deaths.death_rows(found)


def _coordinator(folder: Path, args: argparse.Namespace) -> list[Row]:
    with recovering(folder, leader.NUM_WORKERS) as (cluster, client):
        found = leader.restarts(cluster, client, num_kills=args.kills, seed=args.seed)
    return leader.rows_of(found)


def _silence(folder: Path, args: argparse.Namespace) -> list[Row]:
    with running_behind_wires(folder, silences.NUM_WORKERS) as cluster, cluster.client() as client:
        found = silences.together(cluster, client, count=args.silences, seed=args.seed)
    return silences.rows_of(found)


PARTS: dict[str, Part] = {
    "log": _log,
    "join": _join,
    "join-data": _join_data,
    "third": _third,
    "silence": _silence,
    "deaths": _deaths,
    "coordinator": _coordinator,
}


def main() -> int:
    """Carry out the parts in turn, and print the line."""
    args = _arguments()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as passing, Meter() as meter:
        folder = args.folder or Path(passing)
        for name in args.only.split(","):
            for row in PARTS[name](folder / name, args):
                rows.append(row)
                if not args.json:
                    print(
                        f"{row.what}: {row.value:.3g} {row.unit} ({row.against}), {row.ratio:.3f}", flush=True
                    )
    figures = {"seed": float(args.seed), "load": os.getloadavg()[0], "others_cores": meter.others_cores}
    return finish("recovery", rows, figures=figures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="skein bench recovery", description=main.__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--turns", type=int, default=20, help="of each kind of boundary log")
    parser.add_argument("--joins", type=int, default=5, help="of each kind")
    parser.add_argument("--text-mb", type=int, default=200, help="that a newcomer tokenises in join-data")
    parser.add_argument("--thirds", type=int, default=3, help="times that a third dies, of each kind")
    parser.add_argument("--silences", type=int, default=20, help="of both holders of a stage")
    parser.add_argument("--deaths", type=int, default=30, help="of single workers")
    parser.add_argument("--kills", type=int, default=50, help="of the coordinator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keeps the logs")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args()
    unknown = sorted(set(args.only.split(",")) - PARTS.keys())
    if unknown:
        parser.error(f"--only: {', '.join(unknown)}: give some of {', '.join(PARTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
