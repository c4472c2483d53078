"""Arrays that the trials of a sweep are packed into: those that differ in numbers only may be rows of one.

Rules of this file
- What parts two trials is what makes one operator of theirs unlike the other's: shapes, batches, precision, an
  optimizer's kind and its flags. Rates, decays, schedules, clips and seeds do not.
- The same trials on as many workers are packed the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from pydantic import JsonValue

from skein.config.job import MOST_MICROBATCH_SAMPLES, JobSpec
from skein.config.optimizer import SgdSpec
from skein.config.sweep.trials import SweepTrial, trials_of
from skein.plan.load import stage_loads
from skein.plan.sweeping.hyperband import Rung, split_brackets
from skein.types import StageIndex, StageSpec

ROUND_S = 2.0
"""Seconds that a round is to take where little is saved at its end: a commit costs nothing then, and a death little."""
_MOST_ROUND_S = 8.0
_SAVED_BYTES_PER_S = 2_000_000
"""Bytes of state, as of AdamW, for which a round lasts a second: one that is saved costs the coordinator some 5 ns."""
_MOST_ROUND_STEPS = 1024
_LEAST_LAYER_S = 1e-4
"""Seconds that a layer of a row takes, forward and back, however small it is."""
_LEAST_STEP_S = 1e-9
"""Seconds that no step takes less than, whatever a worker tells."""
_NUMBERS = frozenset(
    {
        "betas",
        "clip_norm",
        "drop_every_steps",
        "drop_ratio",
        "eps",
        "final_learning_rate_ratio",
        "learning_rate",
        "max_ratio",
        "min_ratio",
        "momentum",
        "rho",
        "schedule",
        "warmup_steps",
        "weight_decay",
    }
)
"""Settings of an optimizer that each row has for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Part of a trial's job that rows of one array share, as dotted keys and their values."""

    shared: tuple[tuple[str, str], ...]

    def differs_in(self, other: "Parting") -> tuple[str, ...]:
        """Keys that part two trials, sorted."""
        ours, theirs = dict(self.shared), dict(other.shared)
        return tuple(sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)))


def parting(trial: SweepTrial) -> Parting:
    """Keys and values that a trial shares with all that may be rows beside it."""
    job = trial.job
    # A seed says which rows validate, so rows with one choice have one seed.
    has_one_choice = job.data.coreset.share == "first_alive"
    document: dict[str, JsonValue] = job.model_dump(
        mode="json", exclude=set() if has_one_choice else {"seed"}
    )
    # Of a model's numbers each row has this one for itself.
    document["model"] = job.model.model_dump(mode="json", exclude={"label_smoothing"})
    document["optimizer"] = job.optimizer.model_dump(mode="json", exclude=set(_NUMBERS))
    if isinstance(job.optimizer, SgdSpec):
        # Without a momentum there is no state for one.
        document["optimizer.momentum"] = job.optimizer.momentum > 0
    return Parting(shared=tuple(sorted(_flat(document, ""))))


def _flat(value: JsonValue, key: str) -> list[tuple[str, str]]:
    if not isinstance(value, dict):
        return [(key, repr(value))]
    return [x for name, inner in value.items() for x in _flat(inner, f"{key}.{name}" if key else name)]


def alike(trials: Sequence[SweepTrial]) -> tuple[tuple[SweepTrial, ...], ...]:
    """Trials in groups that may be rows of one array, in the order of each one's first."""
    groups: dict[Parting | int, list[SweepTrial]] = {}
    for trial in trials:
        groups.setdefault(trial.number if why_alone(trial.job) else parting(trial), []).append(trial)
    return tuple(tuple(group) for group in groups.values())


def packed(
    trials: Sequence[SweepTrial], *, most_rows: int, num_workers: int
) -> tuple[tuple[SweepTrial, ...], ...]:
    """Arrays of the trials: as few as keep all workers busy, each of at most so many rows, as equal as can be.

    Args:
        trials: in any order; rows keep it.
        most_rows: of an array.
        num_workers: that hold a whole model.
    """
    arrays: list[tuple[SweepTrial, ...]] = []
    for group in alike(trials):
        share = ceil(num_workers * len(group) / len(trials))
        num_arrays = min(len(group), max(share, ceil(len(group) / most_rows)))
        starts = [len(group) * place // num_arrays for place in range(num_arrays + 1)]
        arrays += [group[a:b] for a, b in pairwise(starts)]
    return tuple(arrays)


def sweep_arrays(job: JobSpec, *, num_workers: int) -> tuple[tuple[SweepTrial, ...], ...]:
    """Arrays of all trials of a job's sweep, as they would be made for so many workers; none without a sweep."""
    if job.sweep is None:
        return ()
    return packed(trials_of(job), most_rows=job.sweep.most_rows, num_workers=num_workers)


def why_alone(job: JobSpec) -> str:
    """Reason why a trial cannot be a row, in words; "" if it can."""
    if job.budget.is_open:
        return "only the data tell how many steps a budget of epochs is"
    if job.model.has_experts:
        return f"rows of family {job.model.family} go in turn, and routers are a job's own"
    if job.batch.samples > MOST_MICROBATCH_SAMPLES:
        return f"a step of rows has one microbatch, of {MOST_MICROBATCH_SAMPLES} samples at most"
    return ""


def brackets_of_sweep(job: JobSpec) -> tuple[tuple[Rung, ...], ...]:
    """Brackets of a sweep under `hyperband`, whose trials follow each other by number; none under another search."""
    sweep = job.sweep
    if sweep is None or sweep.search != "hyperband":
        return ()
    most = job.total_steps
    least = min(most, sweep.least_steps or max(1, most // 27))
    return split_brackets(sweep.size, most, least_steps=least, eta=sweep.eta, num_brackets=sweep.num_brackets)


def row_seconds(job: JobSpec, *, flops_per_s: float) -> float:
    """Seconds of a row's step, as far as can be told before anything is measured.

    Args:
        job: what the row would be alone.
        flops_per_s: of the worker.
    """
    layers = job.layers
    flops = sum(x.forward_flops + x.backward_flops for x in layers) * job.batch.samples
    return max(flops / max(1.0, flops_per_s), _LEAST_LAYER_S * len(layers))


def unmeasured_steps(num_steps: int) -> int:
    """Steps of a first round, at most, before anything is measured, of so many in all.

    >>> unmeasured_steps(400), unmeasured_steps(3)
    (100, 1)
    """
    return max(1, num_steps // 4)


def round_seconds(job: JobSpec, *, num_rows: int) -> float:
    """Seconds that a round of so many rows is to take: the more is saved at its end, the longer.

    >>> from skein.model.families.mlp import MlpModel
    >>> job = JobSpec.model_validate({"name": "a", "model": MlpModel(family="mlp", widths=(384, 384)), "data":
    ...     {"sources": [{"format": "digits"}]}, "budget": {"steps": 9}, "parallel": {"stages": 1}})
    >>> [round(round_seconds(job, num_rows=rows), 1) for rows in (1, 4, 8)]
    [2.0, 4.2, 8.0]
    """
    (load,) = stage_loads(job, [StageSpec(index=StageIndex(0), first=0, stop=len(job.layers))])
    return min(_MOST_ROUND_S, max(ROUND_S, num_rows * load.state_bytes / _SAVED_BYTES_PER_S))


def round_steps(job: JobSpec, *, num_rows: int, num_saved: int, num_steps: int, row_s: float) -> int:
    """Steps of each row in a round that takes about as long as `round_seconds`.

    Args:
        job: what one of the rows would be alone.
        num_rows: that make them.
        num_saved: of the array, those that make none any more among them.
        num_steps: that it is to make.
        row_s: seconds of a row's step, beside so many others.
    """
    most = min(_MOST_ROUND_STEPS, num_steps, 1_000_000 // job.batch.samples)
    steps = round(round_seconds(job, num_rows=num_saved) / max(num_rows * row_s, _LEAST_STEP_S))
    return max(1, min(most, steps))
