"""The choice among passes: by what a clock says, the loop where nothing else is worth it or possible."""

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest
import torch

from bench.sweeping.trials import MLP, settings_of, together
from skein.config.optimizer import AdamWSpec
from skein.numeric.rows import RowBuffer
from skein.protocol.messages.array_rounds import PassKind
from skein.types import Precision
from tests.worker.model.builders import MODELS, samples, whole
from tests.worker.sweep.test_passes import rows_of
from worker.model.base import Stage
from worker.sweep.array import RowArray
from worker.sweep.choosing import choose_pass
from worker.sweep.memory import kept_bytes, measured_memory
from worker.sweep.passes import RowBatch, make_pass


def clock(loop_s: float, other_s: float) -> Callable[[], float]:
    """A clock by which the loop and the other way take so long, in turns, whatever they are."""

    def times() -> Iterator[float]:
        now = 0.0
        for took in chain.from_iterable(repeat((loop_s, other_s))):
            yield now
            now += took
            yield now

    ticking = times()
    # Two warm turns of each way ask once only.
    skipped = {"left": 4}

    def read() -> float:
        if skipped["left"]:
            skipped["left"] -= 1
            return 0.0
        return next(ticking)

    return read


def mlp_rows() -> tuple[Stage, RowBuffer]:
    stages = [MLP.stage(row, Precision.FP32) for row in range(4)]
    array = RowArray.of(stages, [settings_of(AdamWSpec(), 0)] * 4, PassKind.LOOPED)
    return stages[0], array.rows


@pytest.mark.parametrize(
    ("loop_s", "kind"),
    [(1.2, PassKind.FUSED), (1.11, PassKind.FUSED), (1.05, PassKind.LOOPED), (0.5, PassKind.LOOPED)],
)
def test_fused_rows_are_taken_from_so_much_on(loop_s: float, kind: PassKind) -> None:
    stage, rows = mlp_rows()
    before = rows.params.clone()
    choice = choose_pass(stage, rows, together(MLP, range(4), 0, torch.float32), clock=clock(loop_s, 1.0))
    assert choice.kind is kind
    assert choice.speedup == pytest.approx(loop_s)
    assert f"{1e3 * loop_s:.3g} ms row by row" in choice.words
    assert torch.equal(rows.params, before)


def test_two_dry_runs_tell_the_memory_of_any_number_of_rows() -> None:
    stage, rows = mlp_rows()
    batch = together(MLP, range(4), 0, torch.float32)
    before = rows.params.clone()
    memory = measured_memory(PassKind.FUSED, stage, rows, batch)
    made = make_pass(PassKind.FUSED, stage, rows)
    assert made is not None
    state_bytes = rows.layout.num_elements * 4 * (3 * (1 + len(rows.state)) + 2)
    found = kept_bytes(made, batch) + 4 * state_bytes
    # Whatever is rounded up is so for each allocation.
    assert memory.of(4) == pytest.approx(found, rel=0.02)
    assert memory.row_bytes > state_bytes
    in_turn = measured_memory(PassKind.LOOPED, stage, rows, batch)
    assert in_turn.row_bytes == state_bytes
    assert torch.equal(rows.params, before)


def test_rows_that_do_not_fit_together_go_in_turn_and_say_so() -> None:
    stage, rows = mlp_rows()
    batch = together(MLP, range(4), 0, torch.float32)
    needed = measured_memory(PassKind.FUSED, stage, rows, batch).of(4)
    fits = choose_pass(stage, rows, batch, memory_bytes=needed, clock=clock(2.0, 1.0))
    assert fits.kind is PassKind.FUSED
    choice = choose_pass(stage, rows, batch, memory_bytes=needed - 1)
    assert choice.kind is PassKind.LOOPED
    assert choice.words.startswith("4 rows fused need ")
    assert choice.memory is not None
    assert choice.memory.of(4) < needed


def test_a_model_that_can_be_mapped_alone_is() -> None:
    stages = [whole(MODELS["digits"], seed=row) for row in range(3)]

    class Other(type(stages[0])):  # type: ignore[misc]  # of a class known at run time
        pass

    for stage in stages:
        stage.__class__ = Other
    inputs, labels = samples(MODELS["digits"])
    batch = RowBatch(torch.stack([inputs] * 3), torch.stack([labels] * 3))
    choice = choose_pass(stages[0], rows_of(stages), batch, clock=clock(2.0, 1.0))
    assert (choice.kind, choice.speedup) == (PassKind.VMAPPED, 2.0)


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
def test_what_cannot_be_mapped_goes_in_turn_and_says_so(name: str) -> None:
    stages = [whole(MODELS[name], seed=row) for row in range(2)]
    inputs, labels = samples(MODELS[name])
    choice = choose_pass(
        stages[0], rows_of(stages), RowBatch(torch.stack([inputs] * 2), torch.stack([labels] * 2))
    )
    assert choice.kind is PassKind.LOOPED
    assert choice.words.startswith("a DecoderStage cannot be mapped: ")
