"""Line charts as small SVG files, written by hand: readable on light and dark grounds, without colours, and aloud."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's palette for all kinds of colour vision, less those that fade on white or on black.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#888888")
_DASHES = ("none", "7 3", "2 3", "9 3 2 3", "1 4")
_LOG_FACTORS = ((1, 2, 5), (1, 2, 3, 4, 5, 6, 8))
_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 44, 52
_INNER_WIDTH, _INNER_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_STYLE = """text{font:13px sans-serif;fill:#444}.title{font-weight:bold;font-size:15px}.grid{stroke:#8886}
.line{fill:none;stroke-width:2}.band{opacity:.18;stroke:none}
@media(prefers-color-scheme:dark){text{fill:#ccc}}"""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a chart; `low` and `high`, if given, are the ends of a band around it, at the same x.

    `look` picks one of five colours and dashes, so that a thing looks alike in all charts.
    """

    label: str
    look: int
    points: tuple[Point, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart shows. `description` says in words what is to be seen, for those who cannot see it."""

    title: str
    description: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    y_from: float | None = None
    y_to: float | None = None
    """What lies outside is cut off; None: as far as the lines reach."""
    is_log: bool = False
    has_marks: bool = False


def ticks(low: float, high: float) -> tuple[float, ...]:
    """Round numbers within [low, high], three to eight of them.

    >>> ticks(0, 2000), ticks(1.3, 2.9)
    ((0.0, 500.0, 1000.0, 1500.0, 2000.0), (1.5, 2.0, 2.5))
    """
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    size = min((factor * power for factor in (1, 2, 5, 10)), key=lambda size: abs(math.log(size / rough)))
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return tuple(round(index * size, 10) for index in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Round numbers within [low, high], as coarse as four of them allow.

    >>> log_ticks(4, 60), log_ticks(3.3, 12)
    ((5.0, 10.0, 20.0, 50.0), (4.0, 5.0, 6.0, 8.0, 10.0))
    """
    found: tuple[float, ...] = ()
    for factors in _LOG_FACTORS:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = (round(factor * 10.0**power, 10) for power in powers for factor in factors)
        found = tuple(tick for tick in marks if low <= tick <= high)
        if len(found) >= 4:
            break
    return found


def line_chart(chart: Chart) -> str:
    """The chart as an SVG document.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not any(line.points for line in chart.lines):
        raise ValueError(f"{chart.title}: there are no points")
    axes = _Axes.of(chart)
    parts = [*_head(chart), *axes.drawn(chart), '<g clip-path="url(#inner)">']
    for line in chart.lines:
        parts += _drawn(line, axes, chart)
    return "\n".join([*parts, "</g>", *_legend(chart), "</svg>\n"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """From figures to places on the sheet."""

    x: Point
    y: Point
    is_log: bool

    @staticmethod
    def of(chart: Chart) -> "_Axes":
        xs = [x for line in chart.lines for x, _ in line.points]
        ys = [y for line in chart.lines for y in (*(y for _, y in line.points), *line.low, *line.high)]
        low = min(ys) if chart.y_from is None else chart.y_from
        high = max(ys) if chart.y_to is None else chart.y_to
        return _Axes(x=_widened(min(xs), max(xs)), y=_widened(low, high), is_log=chart.is_log)

    def place(self, x: float, y: float) -> Point:
        return (
            round(_LEFT + _INNER_WIDTH * _share(x, self.x), 1),
            round(_TOP + _INNER_HEIGHT * (1 - self._height(y)), 1),
        )

    def _height(self, y: float) -> float:
        if not self.is_log:
            return _share(y, self.y)
        return _share(math.log(y), (math.log(self.y[0]), math.log(self.y[1])))

    def drawn(self, chart: Chart) -> Iterator[str]:
        bottom, right = _TOP + _INNER_HEIGHT, _LEFT + _INNER_WIDTH
        for tick in log_ticks(*self.y) if self.is_log else ticks(*self.y):
            _, y = self.place(self.x[0], tick)
            yield f'<path class="grid" d="M{_LEFT} {y}H{right}"/>'
            yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>'
        for tick in ticks(*self.x):
            x, _ = self.place(tick, self.y[0])
            yield f'<path class="grid" d="M{x} {bottom}v5"/>'
            yield f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{tick:g}</text>'
        centre, middle = _LEFT + _INNER_WIDTH / 2, _TOP + _INNER_HEIGHT / 2
        yield f'<text x="{centre:g}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>'
        yield (
            f'<text transform="translate(16 {middle:g}) rotate(-90)" text-anchor="middle">'
            f"{escape(chart.y_label)}</text>"
        )


def _widened(low: float, high: float) -> Point:
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))


def _share(value: float, ends: Point) -> float:
    return (value - ends[0]) / (ends[1] - ends[0])


def _head(chart: Chart) -> Iterator[str]:
    title, description = escape(chart.title), escape(chart.description)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-labelledby="title description">'
    )
    yield f'<title id="title">{title}</title><desc id="description">{description}</desc>'
    yield f"<style>{_STYLE}</style>"
    yield (
        f'<clipPath id="inner"><rect x="{_LEFT}" y="{_TOP}" width="{_INNER_WIDTH + 4}" '
        f'height="{_INNER_HEIGHT}"/></clipPath>'
    )
    yield f'<text class="title" x="{_LEFT}" y="24">{title}</text>'


def _drawn(line: Line, axes: _Axes, chart: Chart) -> Iterator[str]:
    colour, dash = _COLOURS[line.look], _DASHES[line.look]
    xs = [x for x, _ in line.points]
    if line.low:
        around = [*zip(xs, line.high, strict=True), *reversed(list(zip(xs, line.low, strict=True)))]
        yield f'<path class="band" fill="{colour}" d="M{_path(around, axes)}Z"/>'
    yield (
        f'<path class="line" stroke="{colour}" stroke-dasharray="{dash}" d="M{_path(line.points, axes)}"/>'
    )
    if chart.has_marks:
        for x, y in (axes.place(*point) for point in line.points):
            yield f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>'


def _path(points: Sequence[Point], axes: _Axes) -> str:
    return "L".join(f"{x:g} {y:g}" for x, y in (axes.place(*point) for point in points))


def _legend(chart: Chart) -> Iterator[str]:
    left = _LEFT + _INNER_WIDTH + 14
    for index, line in enumerate(chart.lines):
        colour, dash = _COLOURS[line.look], _DASHES[line.look]
        y = _TOP + 14 + 24 * index
        yield f'<path class="line" stroke="{colour}" stroke-dasharray="{dash}" d="M{left} {y}h28"/>'
        yield f'<text x="{left + 36}" y="{y + 4}">{escape(line.label)}</text>'
