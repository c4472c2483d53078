"""How a benchmark ends: one JSON line with each figure beside what it is compared with, and an exit code."""

import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `ratio` is value / against, `spread` is (largest - smallest) / median of the runs behind it."""

    what: str
    value: float
    unit: str
    against: str
    ratio: float
    goal: str
    holds: bool
    spread: float


def spread(runs: Sequence[float]) -> float:
    """(largest - smallest) / median.

    >>> spread([9.0, 10.0, 12.0])
    0.3
    """
    return (max(runs) - min(runs)) / median(runs)


def speed_row(
    what: str, speeds: Sequence[float], others: Sequence[float], *, against: str, least: float
) -> Row:
    """Tokens a second of runs, each beside the other's that it took turns with; `ratio` is the median of pairs."""
    ratios = [one / other for one, other in zip(speeds, others, strict=True)]
    return Row(
        what=what,
        value=median(speeds),
        unit="tokens/s",
        against=f"{against}: {median(others):.0f} tokens/s",
        ratio=median(ratios),
        goal=f">= {least}",
        holds=median(ratios) >= least,
        spread=spread(ratios),
    )


Figure = float | str | None
Figures = Mapping[str, Figure | Mapping[str, Figure]]
"""What a line carries beside its rows."""


def finish(name: str, rows: Iterable[Row], *, figures: Figures | None = None) -> int:
    """Print the line; 1 if a row does not hold, else 0."""
    listed = list(rows)
    line = {
        "name": name,
        "commit": _commit(),
        "machine": f"{_cpu()}, {platform.system()} {platform.release()}, Python {platform.python_version()}",
        **(figures or {}),
        "rows": [asdict(row) for row in listed],
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return 0 if all(row.holds for row in listed) else 1


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return f"{len(names)} x {names[0].split(':', 1)[1].strip()}" if names else platform.processor()
