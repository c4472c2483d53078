"""Choice among the passes of an array: the real rows and samples go through each, warm, and the quickest is taken.

What runs is measured, never assumed: fused rows win where operators are small, and lose where one row fills the device.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from skein.numeric.rows import RowBuffer
from skein.protocol.messages.array_rounds import PassKind
from skein.types import Precision
from skein.units import format_bytes
from worker.model.base import Stage
from worker.probe import synchronize
from worker.sweep.memory import RowMemory, measured_memory
from worker.sweep.passes import Pass, RowBatch, make_pass

_log = logging.getLogger(__name__)

MIN_SPEEDUP = 1.10
"""Times that the loop must take what another pass takes: below that fusing is not worth its memory."""
_NUM_WARM, _NUM_TIMED = 2, 5
_MOST_OFF: Mapping[Precision, float] = {Precision.FP64: 1e-9, Precision.FP32: 1e-3, Precision.BF16: 0.1}
"""Share of its norm by which a mapped gradient may be another: more than sums in another order are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassChoice:
    """The pass that was taken, how many times as fast as the loop the best other one was, and that in words.

    `memory`: of rows that go through that pass; None: it was not measured.
    """

    kind: PassKind
    speedup: float
    words: str
    memory: RowMemory | None = None


def choose_pass(
    stage: Stage,
    rows: RowBuffer,
    batch: RowBatch,
    *,
    min_speedup: float = MIN_SPEEDUP,
    memory_bytes: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PassChoice:
    """The quickest pass of these rows at this batch that there is memory for; the rows are read, and left as they are.

    Args:
        stage: a whole model, as each row is one.
        rows: whose parameters go through it.
        batch: of one microbatch.
        min_speedup: least ratio for which the loop is left.
        memory_bytes: that rows may take; None: no limit.
        clock: seconds.
    """
    looped = make_pass(PassKind.LOOPED, stage, rows)
    assert looped is not None, "any model goes in turn"
    other, why_not = _other(stage, rows, batch, looped)
    in_turn = measured_memory(PassKind.LOOPED, stage, rows, batch)
    if other is None:
        return PassChoice(kind=PassKind.LOOPED, speedup=1.0, words=why_not, memory=in_turn)
    kind, made = other
    memory = measured_memory(kind, stage, rows, batch)
    needed = memory.of(len(rows))
    if memory_bytes is not None and needed > memory_bytes:
        words = f"{len(rows)} rows {kind.value} need {format_bytes(needed)}, and there are {format_bytes(memory_bytes)}"
        return PassChoice(kind=PassKind.LOOPED, speedup=1.0, words=words, memory=in_turn)
    loop_s, other_s = _seconds([looped, made], batch, rows.params.device, clock)
    speedup = loop_s / other_s
    took = f"{1e3 * other_s:.3g} ms {kind.value}, {1e3 * loop_s:.3g} ms row by row"
    if speedup < min_speedup:
        words = f"{took}: not worth it"
        return PassChoice(kind=PassKind.LOOPED, speedup=speedup, words=words, memory=in_turn)
    return PassChoice(kind=kind, speedup=speedup, words=took, memory=memory)


_Key = tuple[str, tuple[int, ...], bool, int, str, float]
"""Model and precision, shape of the inputs of all rows, whether samples weigh, state tensors of a row, device, least
ratio."""


class PassChoices:
    """Choices that one process has made, by all that they depend on: the arrays of a sweep are measured once.

    `memory_bytes`: that rows may take; None: no limit.
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        self._memory_bytes = memory_bytes
        self._known: dict[_Key, PassChoice] = {}

    def of(self, stage: Stage, rows: RowBuffer, batch: RowBatch, *, min_speedup: float) -> PassChoice:
        """The choice for so many rows at this batch, measured if it was not before."""
        model = f"{stage.spec.model_dump_json()} {stage.precision}"
        shape, weighs, num_slots = tuple(batch.inputs.shape), batch.weights is not None, len(rows.state)
        key = model, shape, weighs, num_slots, str(rows.params.device), min_speedup
        if key not in self._known:
            found = choose_pass(stage, rows, batch, min_speedup=min_speedup, memory_bytes=self._memory_bytes)
            _log.info("rows=%d pass=%s speedup=%.2f: %s", len(rows), found.kind, found.speedup, found.words)
            self._known[key] = found
        return self._known[key]


def _other(
    stage: Stage, rows: RowBuffer, batch: RowBatch, looped: Pass
) -> tuple[tuple[PassKind, Pass] | None, str]:
    """The first way beside the loop that this model has; or why it has none.

    What torch maps, of modules that are not written out here, has to come to what they come to in turn: some of its
    rules are silently others, as that of an embedding with padding is.
    """
    fused = make_pass(PassKind.FUSED, stage, rows)
    if fused is not None:
        return (PassKind.FUSED, fused), ""
    mapped = make_pass(PassKind.VMAPPED, stage, rows)
    assert mapped is not None, "torch tells what it cannot map when it is run"
    try:
        mapped.run(*batch)
    except RuntimeError as error:
        return None, f"a {type(stage).__name__} cannot be mapped: {str(error).splitlines()[0]}"
    off = _difference(mapped, looped, batch)
    if off > _MOST_OFF[stage.precision]:
        return (
            None,
            f"a {type(stage).__name__} that is mapped has other gradients, by {off:.2g} of their norm",
        )
    return (PassKind.VMAPPED, mapped), ""


def _difference(one: Pass, other: Pass, batch: RowBatch) -> float:
    """Most that a row's gradient by one pass is off from that by another, as a share of its norm.

    Rows without finite gradients are left out.
    """
    for made in (one, other):
        made.clear()
        made.run(*batch)
    norms = partial(torch.linalg.vector_norm, dim=1, dtype=torch.float64)
    off, norm = norms(one.grads - other.grads), norms(other.grads)
    shares = torch.where(norm > 0, off / norm, off)[norm.isfinite()]
    return float(shares.nan_to_num(nan=torch.inf).max()) if len(shares) else 0.0


def _seconds(
    passes: Sequence[Pass],
    batch: RowBatch,
    device: torch.device,
    clock: Callable[[], float],
) -> list[float]:
    """Median seconds of each pass, all in turns."""
    took: list[list[float]] = [[] for _ in passes]
    for number in range(_NUM_WARM + _NUM_TIMED):
        for made, times in zip(passes, took, strict=True):
            began = clock()
            made.clear()
            made.run(*batch)
            synchronize(device)
            if number >= _NUM_WARM:
                times.append(clock() - began)
    return [median(times) for times in took]
