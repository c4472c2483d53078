"""Training on a weighted part of the data beside chance and beside the whole, and what choosing it takes.

    skein bench coreset [--only WHAT ...] [--record FILE]

WHAT is `picking`, `convex` or `network`. Every figure comes with its controls: they are no option. Needs scikit-learn.
Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from bench.report import Row, finish
from bench.studies.coreset import convex, network, picking
from skein.errors import UserError

PARTS: Mapping[str, Callable[[], Iterator[Row]]] = {
    "picking": picking.rows,
    "convex": convex.rows,
    "network": network.rows,
}


def main() -> int:
    """Measure each part in turn, and say what came of it."""
    parser = argparse.ArgumentParser(prog="skein bench coreset", description=main.__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="measure these parts alone")
    parser.add_argument("--record", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    try:
        rows = [row for part in args.only or PARTS for row in PARTS[part]()]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.record is not None:
        listed = [asdict(row) for row in rows]
        args.record.write_text(json.dumps(listed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return finish("coreset", rows)


if __name__ == "__main__":
    sys.exit(main())
