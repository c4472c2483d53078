"""Our 1-bit LAMB and 1-bit Adam against those of DeepSpeed 0.18.9.

    python -m bench.studies.aggregation.one_bit_deepspeed [FILE]

The same gradients go through both, step by step. With FILE, what DeepSpeed says is written there for the tests.

DeepSpeed runs as it is, one process for each peer over gloo, in an environment of its own that is made on first use
and kept in .bench/. Ours runs in this process. Both begin with the same parameters; a peer's gradient is half the
parameter plus noise drawn beforehand, so the only way for the two to part is to compute differently.

Brought together by the settings, so that what is compared is the rules:
- the first step of DeepSpeed, which trains nothing, is made before the comparison begins;
- lengths that its fused buffer need not fill up;
- no floor for frozen variances; the mean of the layer ratios as its start at zero left it.
In float64 its collective is widened from float32, which it names in its own code.

What our own choices make of a trajectory is shown beside it; there is no goal for that.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from bench.report import Row, finish
from skein.errors import UserError
from tests.support.one_bit_contest import (
    BETAS,
    DECAY,
    EPS,
    RATE,
    Arrays,
    Contest,
    DType,
    Kind,
    run_ours,
    sample,
)

_HERE = Path(__file__).parent
_ENVIRONMENT = _HERE.parents[2] / ".bench" / "deepspeed"
_VERSION = "0.18.9"
_KINDS: tuple[Kind, ...] = ("adam", "lamb")
_GOAL_BY_DTYPE: dict[DType, float] = {"float32": 1e-6, "float64": 1e-12}


def make_environment(folder: Path = _ENVIRONMENT) -> Path:
    """The interpreter of an environment with DeepSpeed in it, made if it is not there.

    Raises:
        UserError: it cannot be had from here.
    """
    python, done = folder / "bin" / "python", folder / "made"
    if done.exists():
        return python
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / ".gitignore").write_text("*\n")
    wanted = _HERE / "deepspeed" / "requirements.txt"
    install = [str(python), "-m", "pip", "install", "--quiet"]
    first = [line for line in wanted.read_text().splitlines() if line.startswith(("torch", "numpy"))]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*install, *first, "setuptools", "wheel"],
        # Its setup imports torch, and must not find another one than the comparison uses.
        [*install, "--no-build-isolation", "-r", str(wanted)],
    ):
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        if ran.returncode:
            raise UserError(
                "deepspeed", _VERSION, f"let pip reach it: {ran.stderr.strip().splitlines()[-1:]}"
            )
    done.touch()
    return python


def run_theirs(contest: Contest) -> Arrays:
    """What DeepSpeed makes of it; `error` has one row for each peer."""
    python = make_environment()
    settings = {
        "kind": contest.kind,
        "shapes": list(contest.shapes.values()),
        "warmup_steps": contest.warmup_steps,
        "optimizer": {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
    }
    with TemporaryDirectory() as folder:
        np.savez(
            Path(folder, "asked.npz"),
            settings=np.array(json.dumps(settings)),
            noise=contest.noise(),
            start=contest.start(),
        )
        _run_peers(python, folder, contest.num_peers)
        told = [np.load(Path(folder, f"told{peer}.npz")) for peer in range(contest.num_peers)]
        for other in told[1:]:
            if not np.array_equal(other["params"], told[0]["params"]):
                raise RuntimeError("DeepSpeed's own replicas have parted")
        return {name: told[0][name] for name in told[0].files} | {
            "error": np.stack([t["error"] for t in told])
        }


def _run_peers(python: Path, folder: str, num_peers: int) -> None:
    program = str(_HERE / "deepspeed" / "peer.py")
    peers = [
        subprocess.Popen(
            [str(python), program, folder, str(me)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in range(num_peers)
    ]
    try:
        told = [peer.communicate(timeout=300)[1] for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
    for peer, text in zip(peers, told, strict=True):
        if peer.returncode:
            raise RuntimeError(f"DeepSpeed does not run here: {text.strip().splitlines()[-1:]}")


def difference(ours: NDArray[np.floating], theirs: NDArray[np.floating]) -> float:
    """The largest difference of two elements, over the largest element."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def differences(contest: Contest) -> dict[str, float]:
    """How far apart the two are: parameters after each step, and all that is kept in the end."""
    ours, theirs = run_ours(contest), run_theirs(contest)
    warm, cold = (slice(0, contest.warmup_steps), slice(contest.warmup_steps, None))
    return {
        "warm-up": difference(ours["params"][warm], theirs["params"][warm]),
        "compressed stage": difference(ours["params"][cold], theirs["params"][cold]),
    } | {name: difference(ours[name], theirs[name]) for name in sorted(theirs) if name != "params"}


def rows(*, is_quick: bool) -> Iterator[Row]:
    """One row for each rule, dtype, number of peers and stage, then what each choice of ours comes to."""
    for contest in _contests(is_quick=is_quick):
        apart = differences(contest)
        warm = apart.pop("warm-up")
        goal = _GOAL_BY_DTYPE[contest.dtype]
        yield _row(f"{contest.name}, warm-up", warm, goal)
        yield _row(f"{contest.name}, compressed stage with all that is kept", max(apart.values()), goal)
    for what, contest in () if is_quick else _CHOICES:
        apart_by = difference(run_ours(contest)["params"][-1], run_theirs(contest)["params"][-1])
        yield _row(f"{contest.name}, {what}", apart_by, None)


def _row(what: str, value: float, goal: float | None) -> Row:
    return Row(
        what=f"{what}: furthest from DeepSpeed {_VERSION}",
        value=value,
        unit="of the largest element",
        against=f"DeepSpeed {_VERSION} on CPU over gloo",
        ratio=value / (goal or 1.0),
        goal="none, a choice" if goal is None else f"at most {goal:g}",
        holds=goal is None or value <= goal,
        spread=0.0,
    )


def _contests(*, is_quick: bool) -> list[Contest]:
    dtypes: tuple[DType, ...] = ("float64",) if is_quick else ("float64", "float32")
    peers = (2,) if is_quick else (2, 4)
    return [Contest(kind=k, dtype=d, num_peers=n) for k in _KINDS for d in dtypes for n in peers]


_CHOICES = (
    ("a length that it fills up", Contest(kind="lamb", dtype="float64", num_peers=2, last_length=37)),
    (
        "ratios that make up for their start",
        Contest(kind="lamb", dtype="float64", num_peers=2, divides_ratios=True),
    ),
    ("a floor of 1 % where nothing is dead", Contest(kind="lamb", dtype="float64", num_peers=2, floor=0.01)),
)
"""What ours does otherwise on purpose."""


def record() -> dict[str, dict[str, list[float]]]:
    """What DeepSpeed says in float64, a sample of it: for tests that have no DeepSpeed."""
    contests = [Contest(kind=kind, dtype="float64", num_peers=n) for kind in _KINDS for n in (2, 4)]
    return {
        contest.name: {name: sample(array) for name, array in run_theirs(contest).items()}
        for contest in contests
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(record(), indent=1) + "\n")
    else:
        sys.exit(finish("one-bit-deepspeed", rows(is_quick=False)))
