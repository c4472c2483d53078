"""The pictures of `bench.studies.convergence`, drawn from its record."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean

from bench.studies.convergence.curves import Record, RunRecord, perplexity
from bench.studies.plot import Chart, Line, line_chart

_SECONDS_PER_HOUR = 3600.0
_HALF_LOOK = 4


def draw(record: Record, folder: Path) -> tuple[Path, ...]:
    """Writes every picture that the record has figures for; gives their paths."""
    charts = {
        "convergence-training.svg": training_chart(record),
        "convergence-validation.svg": validation_chart(record),
        "convergence-left-out.svg": left_out_chart(record),
    }
    if len(record.step_s) > 1:
        charts["convergence-hours.svg"] = hours_chart(record)
    folder.mkdir(parents=True, exist_ok=True)
    for name, chart in charts.items():
        (folder / name).write_text(line_chart(chart), encoding="utf-8")
    return tuple(folder / name for name in charts)


def training_chart(record: Record) -> Chart:
    """Training loss by step, through the paths that were trained."""
    lines = tuple(_line(record, left_out, is_training=True) for left_out in record.trained_with)
    description = f"Mean loss along each microbatch's own path. {_ends(lines)}. Bands: seeds."
    return _loss_chart("Training loss by step", description, "step", lines)


def validation_chart(record: Record) -> Chart:
    """Validation loss of the whole model by step."""
    lines = tuple(_line(record, left_out, is_training=False) for left_out in record.trained_with)
    description = f"Loss on text that was held out. {_ends(lines)}. Bands: seeds."
    return _loss_chart("Validation loss of the whole model by step", description, "step", lines)


def hours_chart(record: Record) -> Chart:
    """Validation loss by hours that the steps would take on the fleet."""
    known = [left_out for left_out in record.trained_with if left_out in record.step_s]
    lines = (
        *(_in_hours(_line(record, n, is_training=False), record.step_s[n]) for n in known),
        *_half_lines(record),
    )
    costs = ", ".join(f"{record.percent(n)} %: {record.step_s[n]:g} s" for n in known)
    description = f"Steps stretched to what one takes there ({costs}). {_ends(lines)}. Bands: seeds."
    return _loss_chart("Validation loss by predicted hours on a fleet", description, "hours", lines)


def _half_lines(record: Record) -> Iterator[Line]:
    if record.half and 0 in record.step_s:
        line = _mean_line("0 %, half the steps", _HALF_LOOK, [run.validation for run in record.half])
        yield _in_hours(line, record.step_s[0])


def _loss_chart(title: str, description: str, x_label: str, lines: tuple[Line, ...]) -> Chart:
    """Cut off above where the lines are after a tenth of their way: the first fall would leave no room for the rest."""
    later = [y for line in lines for x, y in line.points if x >= 0.1 * line.points[-1][0]]
    return Chart(
        title=title,
        description=description,
        x_label=x_label,
        y_label="nats per byte",
        y_to=max(later),
        lines=lines,
    )


def left_out_chart(record: Record) -> Chart:
    """Perplexity of the trained models by how many stages are left out when they are asked."""
    return Chart(
        title="Perplexity with stages left out at inference",
        description=(
            "Per byte, on text that was held out; one line per share of stages left out in training. "
            "Bands: the least and the greatest of all choices of stages and seeds."
        ),
        x_label="stages left out at inference, %",
        y_label="perplexity per byte",
        lines=tuple(_left_out_line(record, left_out) for left_out in record.trained_with),
        is_log=True,
        has_marks=True,
    )


def _line(record: Record, left_out: int, *, is_training: bool) -> Line:
    runs = record.runs_with(left_out)
    curves = [run.training if is_training else run.validation for run in runs]
    return _mean_line(f"{record.percent(left_out)} % left out", record.trained_with.index(left_out), curves)


def _mean_line(label: str, look: int, curves: Sequence[Sequence[tuple[int, float]]]) -> Line:
    """The mean over seeds, with the ends of what they spread over."""
    by_seed = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(points) for points in by_seed)))
    losses = [[points[step] for points in by_seed] for step in steps]
    return _banded(label, look, [float(step) for step in steps], losses)


def _left_out_line(record: Record, trained_with: int) -> Line:
    runs = record.runs_with(trained_with)
    asked = sorted({part.num_left_out for run in runs for part in run.leave_outs})
    values = [_whole(runs), *([*chain.from_iterable(_asked(run, n) for run in runs)] for n in asked)]
    percents = [0.0, *(float(record.percent(n)) for n in asked)]
    look = record.trained_with.index(trained_with)
    return _banded(f"{record.percent(trained_with)} % in training", look, percents, values)


def _whole(runs: Sequence[RunRecord]) -> list[float]:
    return [perplexity(run.validation[-1][1]) for run in runs]


def _asked(run: RunRecord, num_left_out: int) -> list[float]:
    losses = (part.losses for part in run.leave_outs if part.num_left_out == num_left_out)
    return [perplexity(loss) for loss in chain.from_iterable(losses)]


def _banded(label: str, look: int, xs: Sequence[float], values: Sequence[Sequence[float]]) -> Line:
    return Line(
        label=label,
        look=look,
        points=tuple((x, fmean(found)) for x, found in zip(xs, values, strict=True)),
        low=tuple(map(min, values)),
        high=tuple(map(max, values)),
    )


def _in_hours(line: Line, step_s: float) -> Line:
    points = tuple((step * step_s / _SECONDS_PER_HOUR, loss) for step, loss in line.points)
    return replace(line, points=points)


def _ends(lines: Sequence[Line]) -> str:
    """In words where the lines end, for those who cannot see them."""
    return "; ".join(f"{line.label} ends at {line.points[-1][1]:.3f}" for line in lines)
