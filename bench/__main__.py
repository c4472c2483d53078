"""`python -m bench NAME ...`, or `all`: run a comparison, or each in turn. Exit code 1 if a goal is missed."""

import importlib
import sys

NAMES = (
    "backwards",
    "before",
    "chaos",
    "coreset",
    "detect",
    "devices",
    "fleet",
    "hostile",
    "log",
    "lying",
    "memory",
    "meshes",
    "overhead",
    "pieces",
    "plan",
    "recovery",
    "relay",
    "scale",
    "schedules",
    "shards",
    "sparse",
    "split",
    "sweep",
    "vocabulary",
    "wire",
)
ASKING = frozenset({"before"})
"""Comparisons that want to be told what with: `all` leaves them out."""
_ABOUT = "Run a comparison; exit 1 if it misses its goal. `skein bench NAME --help` has its options."


def main() -> int:
    """Hand the arguments after the name to that comparison."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(f"Usage: skein bench {{{'|'.join((*NAMES, 'all'))}}} [OPTIONS]\n\n  {_ABOUT}")
        return 0
    if len(sys.argv) < 2 or sys.argv[1] not in (*NAMES, "all"):
        print(f"error: name a comparison: {', '.join(NAMES)}, or all", file=sys.stderr)
        return 2
    names = [x for x in NAMES if x not in ASKING] if sys.argv[1] == "all" else [sys.argv[1]]
    arguments = sys.argv[2:]
    worst = 0
    for name in names:
        sys.argv = [f"bench {name}", *arguments]
        worst = max(worst, importlib.import_module(f"bench.{name}").main())
    return worst


if __name__ == "__main__":
    sys.exit(main())
