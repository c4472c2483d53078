"""Choice of pieces for a stage's layers of experts, from times that its devices have measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from skein.plan.pieces.lanes import LayerWork, Pieces, Work, best_pieces, end_s, idle_s
from skein.plan.pieces.line import LEAST_SIZES, TimeLine, fitted_line

OFF_BY = 0.15
"""Lines are measured anew where times are off by this share of what they predict."""
_NUM_SIZES = 10
_NUM_WATCHED = 8
_MOST_PATIENCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRows:
    """Seconds that so many rows of one device take: once between devices, and at its experts.

    Experts take `backward_s` for gradients of rows, and `weights_s` for those of their matrices.
    """

    num_rows: int
    exchange_s: float
    forward_s: float
    backward_s: float
    weights_s: float


def sizes_to_time(num_rows: int, num_devices: int = 1) -> tuple[int, ...]:
    """Numbers of rows, or elements, up to as many, that divide among devices; none where too few for a line.

    >>> sizes_to_time(80, 2), sizes_to_time(8, 2)
    ((8, 16, 24, 32, 40, 48, 56, 64, 72, 80), ())
    """
    steps = {-(-num_rows * i // _NUM_SIZES // num_devices) * num_devices for i in range(1, _NUM_SIZES + 1)}
    return tuple(sorted(steps)) if len(steps) >= LEAST_SIZES else ()


def slowest(times: Sequence[Sequence[TimedRows]]) -> tuple[TimedRows, ...]:
    """Times of the device that takes longest at each size and work, of those that all devices have measured."""
    return tuple(
        TimedRows(
            num_rows=same[0].num_rows,
            exchange_s=max(x.exchange_s for x in same),
            forward_s=max(x.forward_s for x in same),
            backward_s=max(x.backward_s for x in same),
            weights_s=max(x.weights_s for x in same),
        )
        for same in zip(*times, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLines:
    """Seconds of a layer of experts by rows of a device: exchanges, and experts forward and back."""

    exchange: TimeLine
    forward: TimeLine
    backward: TimeLine
    weights: TimeLine

    @classmethod
    def of(cls, times: Sequence[TimedRows]) -> "ExpertLines":
        """Lines through measured times.

        Raises:
            ValueError: of too few sizes.
        """
        sizes = [x.num_rows for x in times]
        return cls(
            exchange=fitted_line(sizes, [x.exchange_s for x in times]),
            forward=fitted_line(sizes, [x.forward_s for x in times]),
            backward=fitted_line(sizes, [x.backward_s for x in times]),
            weights=fitted_line(sizes, [x.weights_s for x in times]),
        )

    def layer(self, num_rows: int, *, is_forward: bool) -> LayerWork:
        """Work of a layer with so many rows, one way."""
        return LayerWork(
            exchange=Work.of(self.exchange, num_rows),
            experts=Work.of(self.forward if is_forward else self.backward, num_rows),
            after_s=0.0 if is_forward else self.weights.seconds(num_rows),
        )

    def pieces(self, num_rows: int) -> Pieces:
        """Numbers of pieces with which a layer of so many rows ends earliest; sums beside it are not in them yet."""
        return Pieces(
            forward=best_pieces(self.layer(num_rows, is_forward=True)),
            backward=best_pieces(self.layer(num_rows, is_forward=False)),
        )

    def idle_s(self, num_rows: int, pieces: Pieces) -> float:
        """Seconds that exchanges of such a layer leave their lane idle for on the way back."""
        return idle_s(self.layer(num_rows, is_forward=False), pieces.backward)

    def end_s(self, num_rows: int, pieces: Pieces, *, is_forward: bool) -> float:
        """Seconds of a layer of so many rows in these pieces, one way."""
        return end_s(
            self.layer(num_rows, is_forward=is_forward), pieces.forward if is_forward else pieces.backward
        )

    def exposed_s(self, num_rows: int, pieces: Pieces, *, is_forward: bool) -> float:
        """Seconds of such a layer in which its experts wait for rows."""
        layer, num = (
            self.layer(num_rows, is_forward=is_forward),
            pieces.forward if is_forward else pieces.backward,
        )
        computing_s = num * layer.experts.piece_s(num) + layer.after_s
        return self.end_s(num_rows, pieces, is_forward=is_forward) - computing_s


class Drift:
    """Comparison of predicted with measured times: whether they are off for long enough to measure anew.

    Each time that it says so it takes twice as many times before it does again: what no line explains is not measured
    over and over.
    """

    def __init__(self) -> None:
        self._patience = _NUM_WATCHED
        self._ratios: list[float] = []

    def observe(self, predicted_s: float, measured_s: float) -> float | None:
        """Median of measured over predicted times if it is off, and was watched for long enough; then begins anew."""
        self._ratios.append(measured_s / predicted_s if predicted_s else 1.0)
        if len(self._ratios) < self._patience:
            return None
        ratio = median(self._ratios[-_NUM_WATCHED:])
        self._ratios.clear()
        if abs(ratio - 1) <= OFF_BY:
            return None
        self._patience = min(_MOST_PATIENCE, 2 * self._patience)
        return ratio
