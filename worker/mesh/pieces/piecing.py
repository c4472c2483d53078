"""Pieces in which a stage's tokens go to experts on other devices: chosen by times that the devices measure.

Rules of this file
- All devices are told the same numbers, chosen by the slowest times of any.
- What is chosen decides how long a layer takes, and of results only how they are rounded.
"""

import logging

from skein.model.layers import AnyModel
from skein.model.sparse.model import SparseModel
from skein.plan.pieces.choice import Drift, ExpertLines, TimedRows, sizes_to_time, slowest
from skein.plan.pieces.lanes import Pieces
from skein.types import StageSpec
from worker.mesh.frames import Metered, TimeRowsAsk
from worker.mesh.mesh import Mesh

_log = logging.getLogger(__name__)


class Piecing:
    """Numbers of pieces of one stage, by the tokens of a microbatch.

    Args:
        mesh: the devices.
        size: of them, those that share the stage.
        model: whose experts they are.
        stage: the stage.
    """

    def __init__(self, mesh: Mesh, size: int, model: AnyModel, stage: StageSpec) -> None:
        self._mesh = mesh
        self._size = size
        self._stage = stage
        blocks = range(max(stage.first, model.inner_layers.start), min(stage.stop, model.inner_layers.stop))
        self._num_chosen = 0
        if isinstance(model, SparseModel) and model.is_spread and size > 1 and blocks:
            self._num_chosen = model.experts.num_chosen
        self._chosen: dict[int, Pieces] = {}
        self._lines: dict[int, ExpertLines] = {}
        self._drift = Drift()

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
        layer_s = lines.end_s(num_rows, self._chosen[num_tokens], is_forward=is_forward)
        ratio = self._drift.observe(layer_s * metered.num_layers, metered.layers_s)
        if ratio is not None:
            _log.info("stage=%d experts take %.2f times as long as predicted", self._stage.index, ratio)
            del self._chosen[num_tokens], self._lines[num_tokens]

    def _num_rows(self, num_tokens: int) -> int:
        """Rows of one device, if experts are chosen evenly."""
        return -(-num_tokens * self._num_chosen // self._size)

    def _measure(self, chunk: int, num_tokens: int) -> None:
        num_rows = self._num_rows(num_tokens)
        sizes = sizes_to_time(num_rows, self._size)
        self._chosen[num_tokens] = Pieces()
        if not sizes:
            return
        answers = self._mesh.ask(self._size, TimeRowsAsk(chunk=chunk, num_rows=sizes))
        times = [[TimedRows(**x.model_dump()) for x in answer.row_times] for answer, _ in answers]
        lines = ExpertLines.of(slowest(times))
        self._lines[num_tokens], self._chosen[num_tokens] = lines, lines.pieces(num_rows)
        self._tell(num_rows, lines, self._chosen[num_tokens])

    def _tell(self, num_rows: int, lines: ExpertLines, pieces: Pieces) -> None:
        every = {"exchange": lines.exchange, "forward": lines.forward, "backward": lines.backward}
        told = ", ".join(
            f"{name} {line.alpha_s * 1e6:.0f} us + {line.beta_s * 1e6:.3g} us a row (R2 {line.r_squared:.3f})"
            for name, line in every.items()
        )
        _log.info(
            "stage=%d experts of %d rows a device in %d pieces forward, %d backward: %s",
            self._stage.index,
            num_rows,
            pieces.forward,
            pieces.backward,
            told,
        )
