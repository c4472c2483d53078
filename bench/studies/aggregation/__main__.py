"""What aggregation rules cost on the wire, what they teach and what they bear, beside what they are compared with.

    python -m bench.studies.aggregation [--only WHAT ...] [--quick] [--record FILE] [--plots DIR]

WHAT is a module beside this one. `--quick` is a short run that shows that all works; its figures say little. A
record keeps the rows of every part, and only parts that were measured anew change in it. Ends with one JSON line; exit
code 1 if a goal is missed or a part could not be measured.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from pydantic import TypeAdapter

from bench.report import Row, finish
from bench.studies.aggregation.measured import Measured
from bench.studies.plot import line_chart
from skein.errors import UserError

PARTS = (
    "one_bit_deepspeed",
    "one_bit_bytes",
    "wire_bytes",
    "one_bit_digits",
    "gossip_bias",
    "stability",
    "lsgd",
    "diloco",
    "consensus_topology",
    "all_reduce",
    "over_cities",
    "late",
    "kills",
)
"""In order of the table of docs/benchmarks-aggregation.md."""
_ROWS = TypeAdapter(tuple[Row, ...])

Rows = Mapping[str, tuple[Row, ...]]
"""By part."""


def main() -> int:
    """Measure each part in turn, and say what came of it."""
    args = _arguments()
    rows_by_part: dict[str, tuple[Row, ...]] = {}
    num_failed = 0
    for part in args.only or PARTS:
        began = perf_counter()
        try:
            measured = measure(part, is_quick=args.quick)
        except UserError as error:
            print(f"{part}: not measured: {error}", file=sys.stderr)
            num_failed += 1
            continue
        print(f"{part}: {perf_counter() - began:.0f} s", file=sys.stderr)
        rows_by_part[part] = measured.rows
        # At once, so that an interrupted run keeps what was done.
        if args.plots is not None:
            draw(measured, args.plots)
        if args.record is not None:
            record(rows_by_part, args.record)
    worst = finish("aggregation", [row for rows in rows_by_part.values() for row in rows])
    return max(worst, min(num_failed, 1))


def measure(part: str, *, is_quick: bool) -> Measured:
    """The figures of one part.

    Raises:
        UserError: something that this part needs is not there.
    """
    module = importlib.import_module(f"bench.studies.aggregation.{part}")
    if not hasattr(module, "measure"):
        return Measured(rows=tuple(module.rows(is_quick=is_quick)))
    found = module.measure(is_quick=is_quick)
    assert isinstance(found, Measured)
    return found


def draw(measured: Measured, folder: Path) -> None:
    """Writes every chart as a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, chart in measured.charts.items():
        (folder / f"aggregation-{name}.svg").write_text(line_chart(chart), encoding="utf-8")


def record(rows_by_part: Rows, path: Path) -> None:
    """Puts the rows of these parts in the place of what the file has of them; other parts stay.

    Raises:
        ValueError: the file is not a record.
    """
    kept = dict(recorded(path)) if path.exists() else {}
    kept |= rows_by_part
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = {part: [asdict(row) for row in kept[part]] for part in sorted(kept)}
    path.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def recorded(path: Path) -> Rows:
    """What `record` wrote.

    Raises:
        ValueError: it is not a record.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    return {part: _ROWS.validate_python(rows) for part, rows in found.items()}


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.aggregation", description=main.__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="measure these parts alone")
    parser.add_argument("--quick", action="store_true", help="a short run, to see that all works")
    parser.add_argument("--record", type=Path, help="keep the rows in this file, beside those of other parts")
    parser.add_argument("--plots", type=Path, help="draw pictures into this folder")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
