"""Choice among the passes of an array: the real rows and samples go through each, warm, and the quickest is taken.

What runs is measured, never assumed: fused rows win where operators are small, and lose where one row fills the device.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from skein.numeric.rows import RowBuffer
from skein.protocol.messages.array_rounds import PassKind
from skein.units import format_bytes
from worker.model.base import Stage
from worker.sweep.memory import RowMemory, measured_memory
from worker.sweep.passes import Pass, RowBatch, make_pass

MIN_SPEEDUP = 1.10
"""Times that the loop must take what another pass takes: below that fusing is not worth its memory."""
_NUM_WARM, _NUM_TIMED = 2, 5


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
    other, why_not = _other(stage, rows, batch)
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


_Key = tuple[str, tuple[int, ...], str, float]
"""Model and precision, shape of the inputs of all rows, device, least ratio."""


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
        key = model, tuple(batch.inputs.shape), str(rows.params.device), min_speedup
        if key not in self._known:
            self._known[key] = choose_pass(
                stage, rows, batch, min_speedup=min_speedup, memory_bytes=self._memory_bytes
            )
        return self._known[key]


def _other(stage: Stage, rows: RowBuffer, batch: RowBatch) -> tuple[tuple[PassKind, Pass] | None, str]:
    """The first way beside the loop that this model has; or why it has none."""
    fused = make_pass(PassKind.FUSED, stage, rows)
    if fused is not None:
        return (PassKind.FUSED, fused), ""
    mapped = make_pass(PassKind.VMAPPED, stage, rows)
    assert mapped is not None, "torch tells what it cannot map when it is run"
    try:
        mapped.run(*batch)
    except RuntimeError as error:
        return None, f"a {type(stage).__name__} cannot be mapped: {str(error).splitlines()[0]}"
    return (PassKind.VMAPPED, mapped), ""


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
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number >= _NUM_WARM:
                times.append(clock() - began)
    return [median(times) for times in took]
