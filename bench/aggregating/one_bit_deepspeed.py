"""`python -m bench.aggregating.one_bit_deepspeed [FILE]`: our 1-bit LAMB and 1-bit Adam against DeepSpeed 0.18.9's.

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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bench.report import Row, finish
from skein.config import aggregation
from skein.config.optimizer import AdamWSpec, LambSpec
from skein.errors import UserError
from skein.numeric.aggregate.exchange import exchange, talks_by_shard
from skein.numeric.aggregate.one_bit import ERROR, OneBit
from skein.numeric.aggregate.one_bit_adam import OneBitAdam
from skein.numeric.aggregate.one_bit_lamb import FACTOR, RATIO, RATIO_WEIGHT, OneBitLamb
from skein.numeric.aggregate.rule import Terms
from skein.numeric.gradients import flatten, unflatten
from skein.numeric.optim.adamw import MEAN, MEAN_OF_SQUARES
from skein.numeric.walker import Tensors, Walker

Kind = Literal["adam", "lamb"]
DType = Literal["float32", "float64"]
Arrays = dict[str, NDArray[np.floating]]

_HERE = Path(__file__).parent
_ENVIRONMENT = _HERE.parents[1] / ".bench" / "deepspeed"
_SHAPES: dict[str, tuple[int, ...]] = {"a": (24, 32), "b": (16, 32), "c": (64,)}
_LAST = "d"
"""In order of their names; vectors last, for DeepSpeed fuses what decays before what does not."""
_VERSION = "0.18.9"
_RATE, _BETAS, _EPS, _DECAY = 0.01, (0.9, 0.99), 1e-6, 0.1
_KINDS: tuple[Kind, ...] = ("adam", "lamb")
_GOAL_BY_DTYPE: dict[DType, float] = {"float32": 1e-6, "float64": 1e-12}
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What both are to do."""

    kind: Kind
    dtype: DType
    num_peers: int
    warmup_steps: int = 10
    num_steps: int = 40
    last_length: int = 32
    """Of the last parameter, a vector: 32 is what both can cut evenly."""
    divides_ratios: bool = False
    """Whether ours makes up for the mean of ratios having begun at zero."""
    floor: float = 0.0

    @property
    def name(self) -> str:
        return f"1-bit {self.kind.upper() if self.kind == 'lamb' else 'Adam'}, {self.num_peers} peers, {self.dtype}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name, in order."""
        return {**_SHAPES, _LAST: (self.last_length,)}

    @property
    def num_elements(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def start(self) -> NDArray[np.floating]:
        """(elements,): the parameters before the first step."""
        drawn: NDArray[np.floating] = np.random.default_rng(_SEED).standard_normal(self.num_elements)
        return drawn.astype(self.dtype)

    def noise(self) -> NDArray[np.floating]:
        """(steps, peers, elements)."""
        shape = (self.num_steps, self.num_peers, self.num_elements)
        drawn: NDArray[np.floating] = np.random.default_rng(_SEED + 1).standard_normal(shape)
        return drawn.astype(self.dtype)


# --- theirs ---


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
        "optimizer": {"lr": _RATE, "betas": _BETAS, "eps": _EPS, "weight_decay": _DECAY},
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


# --- ours ---


def rule_of(contest: Contest) -> OneBit:
    """The rule with the settings that DeepSpeed is given, and without the floor that it lacks."""
    if contest.kind == "adam":
        return OneBitAdam(
            spec=aggregation.OneBitAdam(
                rule="one_bit_adam", warmup_steps=contest.warmup_steps, variance_floor=contest.floor
            ),
            optimizer=AdamWSpec(betas=_BETAS, eps=_EPS, weight_decay=_DECAY),
        )
    return OneBitLamb(
        spec=aggregation.OneBitLamb(rule="one_bit_lamb", warmup_steps=contest.warmup_steps, variance_floor=0),
        optimizer=LambSpec(name="lamb", betas=_BETAS, eps=_EPS, weight_decay=_DECAY),
    )


def run_ours(contest: Contest) -> Arrays:
    """What our rules make of it, in the same arrays."""
    rule, noise = rule_of(contest), contest.noise()
    like = {name: torch.empty(shape) for name, shape in contest.shapes.items()}
    walkers = []
    for _ in range(contest.num_peers):
        params = {name: p.clone() for name, p in unflatten(torch.from_numpy(contest.start()), like).items()}
        walkers.append(Walker(params=params, state=rule.init(params)))
    seen = []
    for step in range(contest.num_steps):
        terms = Terms(step=step, learning_rate=_RATE, gradient_scale=1.0)
        due = rule.plan(step)
        if not due:
            for walker in walkers:
                rule.local_step(walker, _gradients(walker, noise[step].mean(axis=0)), terms, talks=False)
        else:
            if due[0].round == 0 and contest.kind == "lamb" and not contest.divides_ratios:
                _leave_ratios_as_they_are(walkers)
            talks = talks_by_shard(due[0], num_members=contest.num_peers, num_shards=contest.num_peers)
            grads = [_gradients(walker, noise[step, me]) for me, walker in enumerate(walkers)]
            walkers = exchange(rule, walkers, grads, [terms] * contest.num_peers, talks)
        seen.append(flatten(walkers[0].params).numpy())
    return {"params": np.stack(seen)} | _kept(walkers)


def _gradients(walker: Walker, drawn: NDArray[np.floating]) -> Tensors:
    parts = unflatten(torch.from_numpy(drawn), walker.params)
    return {name: (param * 0.5).add_(parts[name]) for name, param in walker.params.items()}


def _leave_ratios_as_they_are(walkers: list[Walker]) -> None:
    """DeepSpeed does not divide them by their weight."""
    for walker in walkers:
        for weight in walker.state[RATIO_WEIGHT].values():
            weight.fill_(1.0)


def _kept(walkers: list[Walker]) -> Arrays:
    state = walkers[0].state

    def array(slot: str) -> NDArray[np.floating]:
        flat: NDArray[np.floating] = flatten(state[slot]).numpy()
        return flat

    kept = {"mean": array(MEAN), "mean_of_squares": array(MEAN_OF_SQUARES)}
    if RATIO in state:
        kept |= {"ratio": array(RATIO), "factor": array(FACTOR)}
    return kept | {"error": np.stack([flatten(walker.state[ERROR]).numpy() for walker in walkers])}


# --- both ---


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


def sample(array: NDArray[np.floating]) -> list[float]:
    """Of the last step or peer every 43rd element, so that some of each parameter are among them."""
    last = array[-1] if array.ndim > 1 else array
    return [float(x) for x in (last[::43] if last.size > 43 else last)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(record(), indent=1) + "\n")
    else:
        sys.exit(finish("one-bit-deepspeed", rows(is_quick=False)))
