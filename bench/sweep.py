"""Trials side by side as rows of one array, beside the same trials one after the other.

    skein bench sweep [--only WHAT ...] [--turns 40] [--device cpu|cuda]

WHAT is `equal` (fused rows beside separate runs, 40 steps), `apart` (a row at a rate that blows up,
the others beside lone runs), `speed` (against the best loop: a model and a fused optimizer of torch for each trial),
`search` (Hyperband over rows of arrays beside the same one by one, and beside chance for as much work) or `share` (what
the coordinator takes of a sweep with real processes).
Speeds are of one thread's CPU time, both ways in turns; the ratio is the median of the turns'. On a GPU they are of the
clock, once it has done everything. The control is no option. Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from bench.reference import torch_optimizer
from bench.report import Row, finish, spread
from bench.sweeping.search import search_rows
from bench.sweeping.share import share_rows
from bench.sweeping.trials import (
    CNN,
    DECODER,
    LARGE,
    MLP,
    NUM_STEPS,
    OPTIMIZERS,
    WIDE,
    Case,
    Separate,
    settings_of,
    together,
)
from skein.config.optimizer import AdamWSpec
from skein.protocol.messages.array_rounds import PassKind
from skein.types import Precision
from worker.model.base import parameter_dtype
from worker.model.stage import Stage
from worker.probe import synchronize
from worker.sweep.array import RowArray, RowSettings
from worker.sweep.choosing import MIN_SPEEDUP, choose_pass

EQUAL_LOSS, EQUAL_PARAMETER, HEALTHY_LOSS = 1e-10, 1e-7, 1e-12
"""Most that may differ in float64: losses and parameters beside separate runs, losses beside a row that blew up."""
EQUAL_LOSS_FP32 = 1e-3
NUM_WARM = 4
"""Turns at the start that are not counted."""
AUTO_STEPS, AUTO_SHARE = 400, 0.95
"""Steps of each row under `fuse: auto`, and least share of the loop's pace that they are to have."""
GOALS = ((MLP, 8, 1.6), (MLP, 16, 2.0), (CNN, 8, 1.5), (DECODER, 8, 1.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Furthest:
    """Most by which fused rows differ from the same trials one by one: a loss in nats, a parameter in the end."""

    loss: float
    parameter: float


def furthest(
    case: Case,
    settings: Sequence[RowSettings],
    rows: Sequence[int],
    *,
    precision: Precision = Precision.FP64,
    num_steps: int = NUM_STEPS,
) -> Furthest:
    """Train an array, and these of its rows as trials of their own beside it."""
    seeds, dtype = range(len(settings)), parameter_dtype(precision)
    stages = [case.stage(seed, precision) for seed in seeds]
    array = RowArray.of(stages, settings, PassKind.FUSED)
    alone = {row: Separate(stages[row], settings[row]) for row in rows}
    loss = 0.0
    for step in range(num_steps):
        batch = together(case, seeds, step, dtype)
        found = array.step([batch])
        for row, run in alone.items():
            loss = max(loss, abs(found[row].loss - run.step(batch.inputs[row], batch.labels[row])))
    distances = [run.distance(array.rows.walker(row)) for row, run in alone.items()]
    return Furthest(loss=loss, parameter=max(distances))


def equal_rows() -> Iterator[Row]:
    """Four rows of each model and optimizer beside separate runs; in float32 where no tie of a maximum may flip."""
    for case in (MLP, CNN, DECODER):
        for spec in OPTIMIZERS:
            settings = [settings_of(spec, row) for row in range(4)]
            found, what = furthest(case, settings, range(4)), f"{case.what}, {spec.name}"
            yield differing(what, found.loss, EQUAL_LOSS)
            yield differing(f"{what}, parameters in the end", found.parameter, EQUAL_PARAMETER)
    for case in (MLP, DECODER):
        settings = [settings_of(AdamWSpec(), row) for row in range(4)]
        found = furthest(case, settings, range(4), precision=Precision.FP32)
        yield differing(f"{case.what}, adamw, float32", found.loss, EQUAL_LOSS_FP32)


def apart_rows() -> Iterator[Row]:
    """Row 2 of 4 at a rate of 1e200: the others beside lone runs."""
    for case in (MLP, CNN, DECODER):
        settings = [settings_of(AdamWSpec(), row) for row in range(4)]
        wild = settings[2].optimizer.model_copy(update={"learning_rate": 1e200})
        settings[2] = RowSettings(optimizer=wild, num_steps=NUM_STEPS)
        yield differing(
            f"{case.what}, row 2 at rate 1e200", furthest(case, settings, (0, 1, 3)).loss, HEALTHY_LOSS
        )


def differing(what: str, worst: float, most: float) -> Row:
    """A row that holds where losses differ by `most` at the most."""
    return Row(
        what=f"{what}: most that they differ, 4 rows, {NUM_STEPS} steps",
        value=worst,
        unit="nats or absolute",
        against="the same trials one by one",
        ratio=worst / most,
        goal=f"≤ {most:g}",
        holds=worst <= most,
        spread=0.0,
    )


def speed_rows(num_turns: int, device: torch.device) -> Iterator[Row]:
    """Whole steps of an array beside those of the best loop; and what the choice makes of a large model."""
    for case, num_rows, goal in GOALS:
        yield _speed(replace(case, device=device), num_rows, goal, num_turns)
    # One thread is busy with a row of the large model, and no GPU is.
    yield from _auto(replace(LARGE, device=device), is_declined=device.type == "cpu")
    yield from _auto(replace(WIDE, device=device), is_declined=False)


def _auto(case: Case, *, is_declined: bool) -> Iterator[Row]:
    """What `fuse: auto` makes of 8 rows; and their steps, with what it takes to find that out, beside `fuse: never`."""
    settings = [RowSettings(optimizer=AdamWSpec(), num_steps=10_000)] * 8
    stages = [case.stage(seed, Precision.FP32) for seed in range(8)]
    looped = RowArray.of(stages, settings, PassKind.LOOPED)
    batch = together(case, range(8), 0, torch.float32)
    clock = _clock(case.device)
    began = clock()
    choice = choose_pass(stages[0], looped.rows, batch, clock=clock)
    probe_s = clock() - began
    yield Row(
        what=f"{case.what}, 8 rows: what fused rows would gain, and are declined for below {MIN_SPEEDUP}",
        value=choice.speedup,
        unit="times as fast",
        against=f"row by row; {choice.words}",
        ratio=choice.speedup,
        goal=f"takes the loop, < {MIN_SPEEDUP}" if is_declined else "none",
        holds=choice.kind is PassKind.LOOPED or not is_declined,
        spread=0.0,
    )
    arrays = [RowArray.of(stages, settings, choice.kind), looped]
    turns = [
        [_seconds(partial(array.step, [batch]), case.device) for array in arrays] for _ in range(NUM_WARM + 5)
    ]
    auto_s, never_s = (AUTO_STEPS * median(x) for x in zip(*turns[NUM_WARM:], strict=True))
    ratio = never_s / (auto_s + probe_s)
    yield Row(
        what=f"{case.what}, 8 rows: {AUTO_STEPS} steps under `auto`, its probe included, of the median step",
        value=auto_s + probe_s,
        unit="s",
        against=f"fuse: never: {never_s:.3g} s; the probe: {probe_s:.2g} s",
        ratio=ratio,
        goal=f"never / auto ≥ {AUTO_SHARE:g}",
        holds=ratio >= AUTO_SHARE,
        spread=0.0,
    )


def _speed(case: Case, num_rows: int, goal: float, num_turns: int) -> Row:
    seeds = range(num_rows)
    settings = [RowSettings(optimizer=AdamWSpec(), num_steps=10_000)] * num_rows
    stages = [case.stage(seed, Precision.FP32) for seed in seeds]
    array = RowArray.of(stages, settings, PassKind.FUSED)
    loop = _best_loop(stages)
    batch = together(case, seeds, 0, torch.float32)
    ways: list[Callable[[], object]] = [
        partial(array.step, [batch]),
        partial(loop, batch.inputs, batch.labels),
    ]
    turns = [[_seconds(way, case.device) for way in ways] for _ in range(NUM_WARM + num_turns)][NUM_WARM:]
    ratios = [loop_s / array_s for array_s, loop_s in turns]
    array_ms, loop_ms = (1e3 * median(x) for x in zip(*turns, strict=True))
    return Row(
        what=f"{case.what}: a step of {num_rows} rows, AdamW, one thread, {case.device}",
        value=array_ms,
        unit="ms",
        against=f"{num_rows} models in turn, each with torch's fused AdamW and clip: {loop_ms:.3g} ms",
        ratio=median(ratios),
        goal=f"loop / array ≥ {goal}",
        holds=median(ratios) >= goal,
        spread=spread(ratios),
    )


def _best_loop(stages: Sequence[Stage]) -> Callable[[Tensor, Tensor], list[float]]:
    """One step of each model, with torch's own optimizer, fused, and its clip."""
    spec = AdamWSpec()
    optimizers = [torch_optimizer(spec, stage.parameters(), is_fused=True) for stage in stages]

    def step(inputs: Tensor, labels: Tensor) -> list[float]:
        losses = []
        for stage, optimizer, x, y in zip(stages, optimizers, inputs, labels, strict=True):
            optimizer.zero_grad(set_to_none=True)
            loss, num_valid = stage.loss(x, y)
            torch.autograd.backward(loss / num_valid)
            torch.nn.utils.clip_grad_norm_(stage.parameters(), spec.clip_norm or 0.0, foreach=True)
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    return step


def _seconds(way: Callable[[], object], device: torch.device) -> float:
    """Seconds of one step: of this process's CPU time, for beside other programs a clock tells of them; on a GPU, of
    the clock until it has done everything.
    """
    clock = _clock(device)
    began = clock()
    way()
    synchronize(device)
    return clock() - began


def _clock(device: torch.device) -> Callable[[], float]:
    return time.process_time if device.type == "cpu" else time.perf_counter


def main() -> int:
    """Compare each part in turn, and say what came of it."""
    parts: Mapping[str, Callable[[int], Iterator[Row]]] = {
        "equal": lambda _turns: equal_rows(),
        "apart": lambda _turns: apart_rows(),
        "speed": lambda turns: speed_rows(turns, device),
        "search": lambda _turns: search_rows(),
        "share": lambda _turns: share_rows(),
    }
    parser = argparse.ArgumentParser(prog="skein bench sweep", description=main.__doc__)
    parser.add_argument("--only", nargs="+", choices=parts, help="compare these parts alone")
    parser.add_argument("--turns", type=int, default=40, help="steps each way, in turns")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where speeds are measured")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    return finish("sweep", [row for part in args.only or parts for row in parts[part](args.turns)])


if __name__ == "__main__":
    sys.exit(main())
