"""A step drawn as SVG: workers down, time across, each microbatch in a colour of its own.

Rules of this file
- Forwards are light, backwards and input gradients dark, weight gradients between, so the picture reads without
  colours; a loss has a black frame, and so, with dashes, has what shards of a vocabulary do; wide ops carry their
  microbatch's number; a pointer over a microbatch's ops shows where it goes.
- All ops of a microbatch of one kind are one path element, those of shards another: a picture of a thousand ops stays
  below 150 KB.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from xml.sax.saxutils import escape

from client.planning.account import RoutedOp, holders_of, placed_ops
from skein.plan.ops import Cost, OpKind
from skein.plan.route.problem import Problem, Routing, Timeline

_WIDTH = 1200
_MARGIN = 12
_TOP, _BOTTOM = 68, 44
_LEGEND = 32
_SWATCH = 'width="18" height="11"'
_TALL, _FLAT = 24, 12
"""Pixels of a row: of few workers, of many."""
_MANY_WORKERS = 40
_PIXELS_PER_SIGN = 6.2
_MAX_SIGNS = 24
_LEAST_NUMBERED = 13
"""Pixels that a microbatch's number needs."""
_MAX_NUMBERED = 1200
_GOLDEN_ANGLE = 137.508
_LIGHT, _BETWEEN, _DARK = 76, 54, 32
"""Lightness in percent."""
_STYLE = (
    "text{font:11px sans-serif;fill:#222}.t{font-size:15px;font-weight:bold}.s{fill:#666}.e{text-anchor:end}"
    ".n{font-size:9px;text-anchor:middle}.w{fill:#fff}.x{fill:none;stroke-width:.6;stroke-opacity:.45}"
    ".l{stroke:#000;stroke-width:1.2}.v{stroke:#000;stroke-width:1.2;stroke-dasharray:3 2}"
    ".r{fill:url(#h);stroke:#555;stroke-width:.6}.g{stroke:#ddd}.b{fill:#f4f4f4}"
    "g:hover>.x{stroke-opacity:1;stroke-width:1.6}"
)


def gantt_svg(
    problem: Problem,
    routing: Routing,
    timeline: Timeline,
    names: Sequence[str],
    shards: Collection[int] = (),
) -> str:
    """An SVG of one step.

    Rows are chunks, stage by stage: a worker that holds several has several rows. Thin lines are boundary tensors on
    their way, hatched bars the aggregation within each stage.

    Args:
        problem: what was planned.
        routing: the plan.
        timeline: of that routing.
        names: (num_workers,) what to call the workers; any text.
        shards: stages that are shards of the vocabulary.
    """
    sheet = _Sheet(problem, routing, timeline, names, shards)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_number(sheet.height)}" role="img" '
        'aria-labelledby="title desc">',
        f'<title id="title">{escape(sheet.title)}</title>',
        f'<desc id="desc">{escape(sheet.description)}</desc>',
        f"<style>{_STYLE}</style>",
        '<defs><pattern id="h" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="5" height="5" fill="#e8e8e8"/><path d="M0 0V5" stroke="#999" stroke-width="2"/></pattern></defs>',
        f'<rect width="{_WIDTH}" height="{_number(sheet.height)}" fill="#fff"/>',
        _text("t", _MARGIN, 22, sheet.title),
        *sheet.legend(),
        *sheet.rows(),
        *sheet.axis(),
        *sheet.reductions(),
        *sheet.microbatches(),
        *sheet.numbers(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Sheet:
    """Positions of everything on the page."""

    def __init__(
        self,
        problem: Problem,
        routing: Routing,
        timeline: Timeline,
        names: Sequence[str],
        shards: Collection[int],
    ) -> None:
        self._problem, self._routing, self._timeline = problem, routing, timeline
        self._shards = frozenset(shards)
        self._names = [_shortened(name) for name in names]
        self._ops = placed_ops(problem, routing, timeline)
        self._kinds = tuple(kind for kind in OpKind if kind in {op.kind for op in problem.ops})
        self._row_height = _TALL if problem.num_chunks <= _MANY_WORKERS else _FLAT
        longest = max((len(name) for name in self._names), default=0)
        self._left = _MARGIN + 62 + longest * _PIXELS_PER_SIGN
        self._scale = (_WIDTH - _MARGIN - self._left) / (timeline.step_s or 1.0)
        self.height = _TOP + problem.num_chunks * self._row_height + _BOTTOM

    @property
    def title(self) -> str:
        return f"{_printable(self._problem.name)}: one step in {self._timeline.step_s:.4g} s"

    @property
    def description(self) -> str:
        problem, timeline = self._problem, self._timeline
        exposed_s = timeline.step_s - timeline.makespan_s
        return (
            f"{problem.num_microbatches} microbatches on {problem.num_workers} workers in {problem.num_stages} stages, "
            f"{problem.path_len} stages each. The last backward ends after {timeline.makespan_s:.4g} s; aggregation "
            f"adds {exposed_s:.4g} s. One row for each stage of each worker, time from left to right."
        )

    def legend(self) -> list[str]:
        """Meaning of the marks, under the title."""
        marks = [
            *(
                (f"<rect {_SWATCH} {_mark(kind, 0, is_shard=False)}/>", kind.row.words)
                for kind in self._kinds
            ),
            (f'<rect {_SWATCH} class="r"/>', "aggregation"),
            (
                f'<path class="x" stroke="{_colour(0, _DARK)}" stroke-opacity="1" d="M0 10l18 -10"/>',
                "boundary tensor on its way; one colour for each microbatch",
            ),
        ]
        if self._shards:
            shown = f"<rect {_SWATCH} {_mark(OpKind.FORWARD, 0, is_shard=True)}/>"
            marks.insert(len(self._kinds), (shown, "of a shard of the vocabulary"))
        parts, x, y = [], float(_MARGIN), _LEGEND
        for mark, words in marks:
            width = 23 + len(words) * _PIXELS_PER_SIGN
            if x + width > _WIDTH:
                x, y = float(_MARGIN), y + 15
            parts.append(
                f'<svg x="{_number(x)}" y="{y}" overflow="visible">{mark}{_text("s", 23, 10, words)}</svg>'
            )
            x += width + 18
        return parts

    def rows(self) -> list[str]:
        """Names, stages and a tint behind every other stage."""
        parts = []
        for stage, size in enumerate(self._problem.stage_sizes):
            first = int(self._problem.first_chunk[stage])
            y, height = self._y(first), size * self._row_height
            if stage % 2:
                parts.append(
                    f'<rect class="b" y="{_number(y)}" width="{_WIDTH}" height="{_number(height)}"/>'
                )
            parts.append(_text("s", _MARGIN, self._baseline(first), f"stage {stage}"))
            for chunk, worker in enumerate(holders_of(self._problem, self._routing, stage), first):
                parts.append(_text("e", self._left - 6, self._baseline(chunk), self._names[worker]))
        return parts

    def axis(self) -> list[str]:
        """Seconds, with a line down at each tick."""
        bottom = _TOP + self._problem.num_chunks * self._row_height
        parts = []
        for second in _ticks(self._timeline.step_s):
            x = self._x(second)
            parts.append(f'<path class="g" d="M{_number(x)} {_TOP}V{bottom}"/>')
            parts.append(_text("s n", x, bottom + 14, f"{second:g}"))
        middle = (self._left + _WIDTH) / 2
        return [*parts, _text("s n", middle, bottom + 32, "seconds from the start of the step")]

    def reductions(self) -> list[str]:
        """A bar on each holder's row, from the stage's last backward to the end of its aggregation."""
        parts = []
        for stage in range(self._problem.num_stages):
            ends = [op.end_s for op in self._ops if op.stage == stage and op.kind.row.is_accumulating]
            begin_s, end_s = max(ends, default=0.0), float(self._timeline.reduced_s[stage])
            if end_s > begin_s:
                first, stop = self._problem.first_chunk[stage : stage + 2]
                bars = "".join(self._box(chunk, begin_s, end_s - begin_s) for chunk in range(first, stop))
                words = f"aggregation of stage {stage}: {begin_s:.4g} to {end_s:.4g} s"
                parts.append(f'<path class="r" d="{bars}"><title>{words}</title></path>')
        return parts

    def microbatches(self) -> list[str]:
        """Groups of marks, one for each microbatch: transfers, forwards, loss, backwards."""
        ops_by_microbatch: list[list[RoutedOp]] = [[] for _ in range(self._problem.num_microbatches)]
        for op in self._ops:
            ops_by_microbatch[op.microbatch].append(op)
        return [self._microbatch(number, ops) for number, ops in enumerate(ops_by_microbatch)]

    def _microbatch(self, number: int, ops: Sequence[RoutedOp]) -> str:
        dark = _colour(number, _DARK)
        stages = " ".join(str(op.stage) for op in ops if op.kind.row.leaves)
        end_s = float(self._timeline.end_s[number])
        return (
            f"<g><title>microbatch {number}: stages {stages}, back after {end_s:.4g} s</title>"
            f'<path class="x" stroke="{dark}" d="{self._ways(ops)}"/>'
            + "".join(self._marks(number, ops))
            + "</g>"
        )

    def _marks(self, number: int, ops: Sequence[RoutedOp]) -> Iterator[str]:
        """The ops by kind, and those of shards by themselves."""
        for kind, is_shard in product(self._kinds, (False, True) if self._shards else (False,)):
            alike = [op for op in ops if op.kind is kind and (op.stage in self._shards) is is_shard]
            if alike:
                yield f'<path {_mark(kind, number, is_shard=is_shard)} d="{self._boxes(alike)}"/>'

    def numbers(self) -> list[str]:
        """Microbatch numbers in the ops that have room for them; none where there are too many ops to read."""
        wide = [op for op in self._ops if op.takes_s * self._scale >= _LEAST_NUMBERED]
        if self._row_height < _TALL or len(wide) > _MAX_NUMBERED:
            return []
        return [self._numbered(op) for op in wide]

    def _numbered(self, op: RoutedOp) -> str:
        x = self._x(op.begin_s + op.takes_s / 2)
        kind = "n w" if _tone(op.kind) < _LIGHT else "n"
        return _text(kind, x, self._baseline(op.chunk), str(op.microbatch))

    def _ways(self, ops: Sequence[RoutedOp]) -> str:
        """Lines from the end of each op to where the tensor arrives, if that is on another worker."""
        lines = []
        by_number = {op.number: op for op in ops}
        pairs = ((by_number[x], op) for op in ops for x in self._problem.ops[op.number].inputs)
        for op, following in pairs:
            if op.worker != following.worker:
                takes_s = float(self._problem.transfer_s[op.worker, following.worker])
                # A transfer that waits for its link leaves later; it never arrives after the next op begins.
                arrives_s = min(op.end_s + takes_s, following.begin_s)
                x, y = self._x(op.end_s), self._y(op.chunk) + self._row_height / 2
                to_x = self._x(arrives_s)
                to_y = self._y(following.chunk) + self._row_height / 2
                lines.append(f"M{_number(x)} {_number(y)}l{_number(to_x - x)} {_number(to_y - y)}")
        return "".join(lines)

    def _boxes(self, ops: Iterable[RoutedOp]) -> str:
        return "".join(self._box(op.chunk, op.begin_s, op.takes_s) for op in ops)

    def _box(self, chunk: int, begin_s: float, takes_s: float) -> str:
        width, height = _number(takes_s * self._scale), self._row_height - 4
        return f"M{_number(self._x(begin_s))} {_number(self._y(chunk) + 2)}h{width}v{height}h-{width}z"

    def _x(self, second: float) -> float:
        return self._left + second * self._scale

    def _y(self, chunk: int) -> float:
        return _TOP + chunk * self._row_height

    def _baseline(self, chunk: int) -> float:
        return self._y(chunk) + self._row_height / 2 + 4


def _tone(kind: OpKind) -> int:
    """Lightness of ops of a kind, in percent."""
    if kind.row.cost is Cost.WEIGHT:
        return _BETWEEN
    return _DARK if kind.row.cost.whole is Cost.BACKWARD else _LIGHT


def _mark(kind: OpKind, number: int, *, is_shard: bool) -> str:
    """Attributes that draw ops of a kind, of the microbatch of this number."""
    fill = f'fill="{_colour(number, _tone(kind))}"'
    if is_shard:
        return f'class="v" {fill}'
    return f'class="l" {fill}' if kind.row.is_last else fill


def _colour(number: int, tone: int) -> str:
    """A tone of a microbatch's hue; neighbours in number are far apart in hue."""
    return f"hsl({round(number * _GOLDEN_ANGLE) % 360},68%,{tone}%)"


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{_number(x)}" y="{_number(y)}">{escape(words)}</text>'


def _ticks(seconds: float) -> list[float]:
    """Round numbers from 0 to `seconds`, about ten.

    >>> _ticks(63.3)
    [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    """
    if seconds <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(seconds / 6))
    step = next(power * factor for factor in (1, 2, 5, 10) if seconds / (power * factor) <= 12)
    return [round(step * i, 12) for i in range(int(seconds / step) + 1)]


def _number(value: float) -> str:
    """A coordinate to a tenth of a pixel, short.

    >>> _number(12.04), _number(3.25), _number(-0.01)
    ('12', '3.2', '0')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _shortened(name: str) -> str:
    """
    >>> _shortened("a-name-that-nobody-wants-to-read")
    'a-name-that-nobody-want…'
    """
    plain = _printable(name)
    return plain if len(plain) <= _MAX_SIGNS else f"{plain[: _MAX_SIGNS - 1]}…"


def _printable(text: str) -> str:
    """`text` without what XML may not hold, whatever else it is."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)
