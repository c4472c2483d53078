"""Hyperband over 27 trials as rows of arrays, beside the same trials one by one, and beside chance for as much work.

The trials are learning rates of a small network that is taught by a fixed linear map. Of each rung the survivors are
packed anew into arrays of at most `MOST_ROWS`; the first array of each rung is thrown away once, in the midst of its
steps, and goes on from its rows as they were. Work is counted in steps of a trial.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from bench.report import Row
from bench.sweeping.trials import Case, Separate, together
from skein import rng
from skein.config.optimizer import AdamWSpec
from skein.model.families.mlp import MlpModel
from skein.plan.sweeping.hyperband import Advance, Hyperband, brackets_of, steps_of
from skein.protocol.messages.array_rounds import PassKind
from skein.types import Precision
from worker.sweep.array import RowArray, RowSettings

UNIT_STEPS, MOST_UNITS, ETA = 10, 27, 3
MOST_ROWS = 14
SAME_VALUE = 1e-9
"""Most by which what a trial came to may differ in float64, fused beside alone."""
_LOWEST_RATE, _HIGHEST_RATE = 1e-5, 1.0


class Taught(Case):
    """Samples that a fixed linear map has put in classes."""

    def batch(self, seed: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Inputs and their classes."""
        images = Case.batch(self, seed, step, dtype)[0]
        teacher = torch.from_numpy(rng.stream(0, "teacher").standard_normal((64, 10))).to(dtype)
        return images, (images.flatten(1) @ teacher).argmax(1)


CASE = Taught(
    what="MLP 64-32-10, batch 16, taught", model=MlpModel(family="mlp", widths=(32,)), num_samples=16
)
Values = Mapping[Advance, float]
"""Mean loss over a trial's last `UNIT_STEPS` steps, by how far it has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """End of a search: what each trial came to, who was left, and the CPU seconds that steps took."""

    values: Values
    survivors: tuple[int, ...]
    cpu_s: float


def settings_of_trial(trial: int) -> RowSettings:
    """A learning rate, drawn evenly by its logarithm."""
    share = float(rng.stream(0, "trial", trial).random())
    rate = _LOWEST_RATE * (_HIGHEST_RATE / _LOWEST_RATE) ** share
    return RowSettings(
        optimizer=AdamWSpec(learning_rate=rate, warmup_steps=0), num_steps=MOST_UNITS * UNIT_STEPS
    )


def bracket() -> Hyperband:
    """The boldest bracket: 27 trials, then 9, 3 and 1."""
    boldest = brackets_of(MOST_UNITS * UNIT_STEPS, least_steps=UNIT_STEPS, eta=ETA)[0]
    return Hyperband(boldest)


def in_arrays(search: Hyperband) -> Found:
    """Carry a search out on fused rows."""
    values: dict[Advance, float] = {}
    arrays: dict[int, RowArray] = {}
    began = time.process_time()
    while due := search.due:
        for number, first in enumerate(range(0, len(due), MOST_ROWS)):
            made = due[first : first + MOST_ROWS]
            array = _packed(made, arrays)
            if number == 0:
                # Its worker dies: what it has done is nobody's.
                _advance(array.taken(range(len(made)), PassKind.FUSED), made, most_steps=UNIT_STEPS // 2)
            values |= _advance(array, made)
            arrays |= {x.trial: array.taken([row], PassKind.FUSED) for row, x in enumerate(made)}
        for advance in due:
            search.told(advance, values[advance])
    return Found(values=values, survivors=search.survivors, cpu_s=time.process_time() - began)


def _packed(made: Sequence[Advance], arrays: Mapping[int, RowArray]) -> RowArray:
    """Trials side by side: as they are, or new ones."""
    if made[0].trial in arrays:
        return RowArray.joined([arrays[x.trial] for x in made], PassKind.FUSED)
    stages = [CASE.stage(x.trial, Precision.FP64) for x in made]
    return RowArray.of(stages, [settings_of_trial(x.trial) for x in made], PassKind.FUSED)


def _advance(array: RowArray, made: Sequence[Advance], *, most_steps: int | None = None) -> Values:
    """Have all rows make their steps; gives what each came to."""
    trials = [x.trial for x in made]
    steps = range(array.rows.num_updates[0], made[0].num_steps)[:most_steps]
    losses = [
        [row.loss for row in array.step([together(CASE, trials, step, torch.float64)])] for step in steps
    ]
    return {x: fmean(values) for x, values in zip(made, zip(*losses[-UNIT_STEPS:], strict=True), strict=True)}


def one_by_one(search: Hyperband) -> Found:
    """Carry a search out on a model for each trial."""
    values: dict[Advance, float] = {}
    runs: dict[int, tuple[Separate, int]] = {}
    began = time.process_time()
    while due := search.due:
        for advance in due:
            trial = advance.trial
            if trial not in runs:
                runs[trial] = Separate(CASE.stage(trial, Precision.FP64), settings_of_trial(trial)), 0
            run, done = runs[trial]
            losses = [
                run.step(*CASE.batch(trial, step, torch.float64)) for step in range(done, advance.num_steps)
            ]
            runs[trial] = run, advance.num_steps
            values[advance] = fmean(losses[-UNIT_STEPS:])
        for advance in due:
            search.told(advance, values[advance])
    return Found(values=values, survivors=search.survivors, cpu_s=time.process_time() - began)


def search_rows() -> Iterator[Row]:
    """Equal searches, what fusing them gains, and what the search gains over chance."""
    fused, alone = in_arrays(bracket()), one_by_one(bracket())
    what = f"{CASE.what}: Hyperband, 27 trials, eta {ETA}, rows packed anew and one array lost in each rung"
    is_same = fused.survivors == alone.survivors and fused.values.keys() == alone.values.keys()
    worst = max(abs(fused.values[x] - alone.values[x]) for x in alone.values if x in fused.values)
    yield Row(
        what=f"{what}: most that a trial's mean loss differs, float64",
        value=worst,
        unit="nats",
        against=f"the same trials one by one; survivor {fused.survivors} and {alone.survivors}",
        ratio=worst / SAME_VALUE,
        goal=f"≤ {SAME_VALUE:g}, same survivors at each rung",
        holds=is_same and worst <= SAME_VALUE,
        spread=0.0,
    )
    yield Row(
        what=f"{what}: CPU time, float64, with what was lost",
        value=fused.cpu_s,
        unit="s",
        against=f"one by one, nothing lost: {alone.cpu_s:.3g} s",
        ratio=alone.cpu_s / fused.cpu_s,
        goal="none",
        holds=True,
        spread=0.0,
    )
    yield _chance_row(fused)


def _chance_row(fused: Found) -> Row:
    """The loss that the search ends with, beside the best of as many trials as the same work takes to the end."""
    rungs = bracket().rungs
    most = MOST_UNITS * UNIT_STEPS
    everybody = [Advance(trial=trial, num_steps=most) for trial in range(rungs[0].num_trials)]
    values = _advance(_packed(everybody, {}), everybody)
    num_equal = steps_of(rungs) // most
    groups = [everybody[first : first + num_equal] for first in range(0, len(everybody), num_equal)]
    chance = fmean(min(values[x] for x in group) for group in groups)
    mine = min(value for x, value in fused.values.items() if x.num_steps == most)
    return Row(
        what=f"{CASE.what}: mean loss of the last {UNIT_STEPS} steps that Hyperband ends with, 27 trials",
        value=mine,
        unit="nats",
        against=f"random search for as much work, the best of {num_equal}, mean of {len(groups)} draws: "
        f"{chance:.4g}; all 27 to the end, {len(everybody) * most / steps_of(rungs):.3g} times the work: "
        f"{min(values.values()):.4g}",
        ratio=mine / chance,
        goal="≤ random's",
        holds=mine <= chance,
        spread=0.0,
    )
