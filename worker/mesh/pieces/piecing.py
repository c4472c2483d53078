"""Pieces in which a stage's tokens go to experts on other devices: chosen by times that the devices measure.

Rules of this file
- All devices are told the same numbers, chosen by the slowest times of any.
- What is chosen decides how long a layer takes, and of results only how they are rounded.
"""

import logging
from dataclasses import replace

from skein.config.mesh.tensor import MeshForm
from skein.model.decoder import DecoderModel, decoder_shape
from skein.model.layers import AnyModel
from skein.model.sparse.model import SparseModel
from skein.plan.pieces.choice import Drift, ExpertLines, sizes_to_time, slowest
from skein.plan.pieces.collectives import LaneKind
from skein.plan.pieces.lanes import Pieces
from skein.plan.pieces.line import LEAST_SIZES, TimeLine, fitted_line
from skein.types import StageSpec
from worker.mesh.frames import DeviceAnswer, Metered, TimeRowsAsk, TimeSumsAsk
from worker.mesh.mesh import Mesh

_log = logging.getLogger(__name__)


class Piecing:
    """Numbers of pieces of one stage, by the tokens of a microbatch.

    Args:
        mesh: the devices.
        form: in which they share the stage.
        model: whose experts they are.
        stage: the stage.
    """

    def __init__(self, mesh: Mesh, form: MeshForm, model: AnyModel, stage: StageSpec) -> None:
        self._mesh = mesh
        self._form = form
        self._stage = stage
        self._num_chosen = 0
        if isinstance(model, SparseModel) and model.is_spread and not model.experts.mixes_tokens:
            is_exchanged = form.size > 1 and model.num_blocks_in(stage) > 0
            self._num_chosen = model.experts.num_chosen if is_exchanged else 0
        self._chosen: dict[int, Pieces] = {}
        self._lines: dict[int, ExpertLines] = {}
        self._drift = Drift()
        self._sums: TimeLine | None = None
        self._times_sums = form.size > 1 and not form.is_grid
        """Whether sums are to be measured at the next visit."""
        self._sums_drift = Drift()
        self._num_features = decoder_shape(model).hidden_size if isinstance(model, DecoderModel) else 0

    def pieces(self, chunk: int, num_tokens: int) -> Pieces:
        """Numbers of pieces for a microbatch of so many tokens, measured for if there was none as large so far.

        Raises:
            MeshLostError: a device is lost.
        """
        if not self._num_chosen:
            return Pieces()
        if self._mesh.pieces is not None:
            return self._mesh.pieces
        if num_tokens not in self._chosen:
            self._measure(chunk, num_tokens)
        return self._chosen[num_tokens]

    def observe(self, num_tokens: int, metered: Metered, *, is_forward: bool) -> None:
        """Layers of such a microbatch took so long: where that is off for long, it is measured anew."""
        lines = self._lines.get(num_tokens)
        if lines is None or not metered.num_layers:
            return
        num_rows = self._num_rows(num_tokens)
        exposed_s = lines.exposed_s(num_rows, self._chosen[num_tokens], is_forward=is_forward)
        self._mesh.times.add(
            LaneKind.A2A,
            metered.num_layers,
            predicted_s=exposed_s * metered.num_layers,
            measured_s=metered.layers_s - metered.experts_s,
        )
        layer_s = lines.end_s(num_rows, self._chosen[num_tokens], is_forward=is_forward)
        ratio = self._drift.observe(layer_s * metered.num_layers, metered.layers_s)
        if ratio is not None:
            self._tell_off("experts", ratio)
            del self._chosen[num_tokens], self._lines[num_tokens]

    def time_sums(self, chunk: int, num_tokens: int) -> None:
        """Measure sums of activations of so many tokens, where devices take any: once, and where predictions are off.

        Raises:
            MeshLostError: a device is lost.
        """
        if not self._times_sums:
            return
        self._times_sums = False
        sizes = sizes_to_time(num_tokens * self._num_features)
        if not sizes:
            return
        answers = self._mesh.ask(self._form.size, TimeSumsAsk(chunk=chunk, num_elements=sizes))
        slowest_s = [max(same) for same in zip(*(answer.sum_times for answer, _ in answers), strict=True)]
        # Collectives of all kinds are counted by what comes to a device.
        self._sums = fitted_line([self._come(size) for size in sizes], slowest_s)
        self._mesh.times.fitted(LaneKind.TP, self._sums)
        _log.info(
            "stage=%d sums take %.0f us + %.3g us for a thousand elements that come (R2 %.3f)",
            self._stage.index,
            self._sums.alpha_s * 1e6,
            self._sums.beta_s * 1e9,
            self._sums.r_squared,
        )

    def observe_sums(self, answer: DeviceAnswer) -> None:
        """Collectives of an op that its devices wait for took so long."""
        if self._sums is None or not answer.metered.waited_s:
            return
        num, come = (
            sum(count for kind, count in counts.items() if kind.is_waited_for)
            for counts in (answer.collectives, answer.elements)
        )
        predicted_s, measured_s = num * self._sums.alpha_s + come * self._sums.beta_s, answer.metered.waited_s
        self._mesh.times.add(LaneKind.TP, num, predicted_s=predicted_s, measured_s=measured_s)
        ratio = self._sums_drift.observe(predicted_s, measured_s)
        if ratio is not None:
            self._tell_off("sums", ratio)
            self._times_sums = True

    def _come(self, num_elements: int) -> int:
        """Elements that come to a device with a sum of so many."""
        return 2 * num_elements * (self._form.size - 1) // self._form.size

    def _num_summed(self, num_tokens: int, idle_s: float) -> int:
        """Elements whose sum takes no longer than that, of as many as sums were measured for."""
        if self._sums is None:
            return 0
        come = self._sums.size_within(idle_s, self._come(num_tokens * self._num_features))
        return come * self._form.size // (2 * (self._form.size - 1))

    def _num_rows(self, num_tokens: int) -> int:
        """Rows of one device, if experts are chosen evenly."""
        return -(-num_tokens * self._num_chosen // self._form.size)

    def _measure(self, chunk: int, num_tokens: int) -> None:
        num_rows = self._num_rows(num_tokens)
        sizes = sizes_to_time(num_rows, self._form.size)
        self._chosen[num_tokens] = Pieces()
        if not sizes:
            _log.info(
                "stage=%d rows go to experts in one piece: %d a device are too few to time %d sizes",
                self._stage.index,
                num_rows,
                LEAST_SIZES,
            )
            return
        answers = self._mesh.ask(self._form.size, TimeRowsAsk(chunk=chunk, num_rows=sizes))
        times = [answer.row_times for answer, _ in answers]
        lines = ExpertLines.of(slowest(times))
        self._mesh.times.fitted(LaneKind.A2A, lines.exchange, lines.forward, lines.backward, lines.weights)
        pieces = lines.pieces(num_rows)
        pieces = replace(pieces, num_summed=self._num_summed(num_tokens, lines.idle_s(num_rows, pieces)))
        self._lines[num_tokens], self._chosen[num_tokens] = lines, pieces
        self._tell(num_rows, lines, self._chosen[num_tokens])

    def _tell_off(self, what: str, ratio: float) -> None:
        _log.info(
            "stage=%d %s take %.2f times as long as predicted: they are timed again",
            self._stage.index,
            what,
            ratio,
        )

    def _tell(self, num_rows: int, lines: ExpertLines, pieces: Pieces) -> None:
        every = {"exchange": lines.exchange, "forward": lines.forward, "backward": lines.backward}
        told = ", ".join(
            f"{name} {line.alpha_s * 1e6:.0f} us + {line.beta_s * 1e6:.3g} us a row (R2 {line.r_squared:.3f})"
            for name, line in every.items()
        )
        _log.info(
            "stage=%d experts of %d rows a device in %d pieces forward, %d backward, room to sum %d elements: %s",
            self._stage.index,
            num_rows,
            pieces.forward,
            pieces.backward,
            pieces.num_summed,
            told,
        )
