"""Choices of rows that a job will make, in words, as far as they are known before workers open its data."""

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skein.config.data.sources import ArraysSource
from skein.config.job import JobSpec
from skein.data.selection import Selection
from skein.numeric.coreset.budgets import budgets, check_fraction
from skein.numeric.coreset.room import MOST_FEATURE_BYTES, feature_bytes
from skein.plan.sweeping.choosing import first_choice, steps_ahead, steps_of_passes
from skein.units import counted, format_bytes

_FORWARD = 1 / 3
"""Work of a row's forward, as a part of its gradient's."""
_MOST_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRows:
    """Rows that a job trains on: their number, and how many each group has."""

    num_rows: int
    by_group: tuple[int, ...]


def choices_outline(job: JobSpec) -> Iterator[str]:
    """Lines about what is chosen, of how many rows, when, and what it costs; none where all rows are trained on.

    Raises:
        UserError: fewer rows would be chosen than the job needs.
    """
    spec = job.data.coreset
    if not spec.chooses:
        return
    rows, each = (
        trained_rows(job),
        " of each trial, unless it says otherwise" if job.sweep is not None else "",
    )
    compared = f"craig by {spec.feature}" if spec.method == "craig" else "random"
    yield f"coreset{each}: {compared}: {_picks(job, rows)}"
    yield f"  {_times(job, rows)}"
    if spec.follows_model:
        yield f"  {_cost(job, rows)}"


def trained_rows(job: JobSpec) -> TrainedRows | None:
    """Rows of a job, if its data are arrays in one file that can be read here; None: workers will count them."""
    (source, *others), data = job.data.sources, job.data
    if others or not isinstance(source, ArraysSource):
        return None
    labels = _labels(Path(source.path))
    if labels is None:
        return None
    num_samples = [len(labels), *(1 for _ in data.validation)]
    selection = Selection.of(
        num_samples,
        [x.weight for _, x in data.named_sources],
        validation_ratio=data.held_out_ratio,
        seed=job.seed,
        num_validating=len(data.validation),
    )
    num_rows = selection.num_train
    if data.coreset.group_by == "source":
        return TrainedRows(num_rows=num_rows, by_group=(num_rows,))
    trained = labels[[pick.sample for pick in selection.train_rows(range(num_rows))]]
    return TrainedRows(num_rows=num_rows, by_group=tuple(np.unique(trained, return_counts=True)[1].tolist()))


def _labels(path: Path) -> NDArray[np.integer] | None:
    """Classes of the rows in an `.npz` file; None: it has none, or is elsewhere."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found: NDArray[np.integer] = arrays["y"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return found if found.ndim == 1 and found.dtype.kind in "iu" and len(found) else None


def _picks(job: JobSpec, rows: TrainedRows | None) -> str:
    spec = job.data.coreset
    group = "class" if spec.group_by == "label" else "source"
    if rows is None:
        share = f"{100 * spec.fraction:g} % of the rows to train on, which workers count when they open them"
        return f"{share}; of each {group} in proportion, at least one"
    check_fraction(spec, rows.num_rows, len(rows.by_group), num_sources=1, step_rows=job.step_batch.samples)
    num_picks = spec.num_picks(rows.num_rows)
    found = budgets(rows.by_group, num_picks)
    shown = ", ".join(map(str, found[:_MOST_SHOWN])) + (", ..." if len(found) > _MOST_SHOWN else "")
    return f"{num_picks} of {rows.num_rows} rows; of each {group} {shown}"


def _times(job: JobSpec, rows: TrainedRows | None) -> str:
    """Moments at which rows are chosen, in words."""
    spec, samples = job.data.coreset, job.step_batch.samples
    warmup = counted(spec.warmup_epochs, "pass", "passes")
    first = f"chosen after {warmup} over all rows" if spec.warmup_epochs else "chosen before the first step"
    if rows is not None and spec.warmup_epochs:
        step = first_choice(spec, num_rows=rows.num_rows, samples=samples)
        first += "" if step is None else f", at step {step}"
    if spec.refresh_epochs is None:
        return f"{first}, and kept"
    again = f"anew after every {counted(spec.refresh_epochs, 'pass', 'passes')} over a choice"
    if rows is None:
        return f"{first}; {again}"
    num_picks = spec.num_picks(rows.num_rows)
    steps = steps_of_passes(spec.refresh_epochs, num_picks=num_picks, samples=samples) or 0
    ahead = steps_ahead(job, steps) if spec.follows_model else 0
    beside = f", by the model {counted(ahead, 'step')} before" if ahead else ""
    return f"{first}; {again}, {counted(steps, 'step')}{beside}"


def _cost(job: JobSpec, rows: TrainedRows | None) -> str:
    """Cost of a choice by the model, in words: forwards, and memory where paths end."""
    spec = job.data.coreset
    if rows is None:
        return "each is a forward of all rows, a third of the work of a pass over them"
    num_rows = rows.num_rows
    words = f"each is a forward of {num_rows} rows, as much work as gradients of {round(_FORWARD * num_rows)}"
    if spec.refresh_epochs is not None:
        share = _FORWARD * num_rows / (spec.refresh_epochs * spec.num_picks(num_rows))
        above = ", above it choices come half as often" if share > spec.max_overhead else ""
        words += f": {share:.0%} of the training between two (max_overhead, by time: {spec.max_overhead:.0%}{above})"
    num_bytes = feature_bytes(job.model, spec, num_rows)
    room = (
        ""
        if num_bytes <= MOST_FEATURE_BYTES
        else f": more than {format_bytes(MOST_FEATURE_BYTES)} on one worker"
    )
    return f"{words}; features take {format_bytes(num_bytes)}{room}"
