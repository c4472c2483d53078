"""The choice among passes: by what a clock says, the loop where nothing else is worth it or possible."""

import logging
import re
from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bench.sweeping.trials import MLP, settings_of, together
from skein.config.optimizer import AdamWSpec, SgdSpec
from skein.numeric.rows import RowBuffer
from skein.protocol.messages.array_rounds import PassKind
from skein.types import Precision
from tests.worker.model.builders import MODELS, samples, whole
from tests.worker.sweep.test_passes import expected, rows_of
from worker.model.base import Stage
from worker.model.decoder import Embedding
from worker.sweep.array import RowArray
from worker.sweep.choosing import PassChoices, choose_pass
from worker.sweep.fused import strangers
from worker.sweep.memory import kept_bytes, measured_memory
from worker.sweep.passes import RowBatch, make_pass

PADDING = 5
"""Token that pads."""


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


def test_rows_with_other_state_are_measured_anew_for_their_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    choices, batch = PassChoices(), together(MLP, range(2), 0, torch.float32)
    found = {}
    for spec in (SgdSpec(name="sgd", momentum=0.0), AdamWSpec()):
        stages = [MLP.stage(row, Precision.FP32) for row in range(2)]
        array = RowArray.of(stages, [settings_of(spec, 0)] * 2, PassKind.LOOPED)
        choice = choices.of(stages[0], array.rows, batch, min_speedup=0.0)
        assert choices.of(stages[0], array.rows, batch, min_speedup=0.0) is choice
        assert choice.memory is not None
        found[len(array.rows.state)] = choice.memory.row_bytes
    lines = [record.getMessage() for record in caplog.records if record.name == "worker.sweep.choosing"]
    assert len(lines) == 2
    assert all(re.match(r"rows=2 pass=fused speedup=[\d.]+: .* ms fused, .* ms row by row", x) for x in lines)
    # Each of the two moments is there three times.
    num_elements = array.rows.layout.num_elements
    assert found[2] - found[0] == 2 * 3 * 4 * num_elements


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


class Padded(Embedding):
    """An embedding one of whose rows pads samples, and learns nothing."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return functional.embedding(tokens_BT, self.weight, padding_idx=PADDING)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_what_is_mapped_otherwise_than_it_is_goes_in_turn_as_it_is(name: str) -> None:
    # Of the tables of several rows in one torch's rule pads by the first row's alone, without a word.
    stages = [whole(MODELS[name], seed=row) for row in range(3)]
    for stage in stages:
        stage.get_submodule("model.embed_tokens").__class__ = Padded
    assert strangers(stages[0]) == ("Padded",)
    inputs, labels = (torch.stack(x.chunk(3)) for x in samples(MODELS[name], 9))
    inputs[:, :, -4:] = PADDING
    batch = RowBatch(inputs, labels)
    choice = choose_pass(stages[0], rows_of(stages), batch)
    assert choice.kind is PassKind.LOOPED
    assert choice.words.startswith("a DecoderStage that is mapped has other gradients, by 0.")
    made = make_pass(choice.kind, stages[0], rows_of(stages))
    assert made is not None
    losses, grads = expected(stages, inputs, labels)
    assert torch.allclose(made.run(*batch), losses, rtol=1e-12, atol=0)
    assert torch.allclose(made.grads, grads, rtol=1e-12, atol=1e-12)
    learned = made.rows.layout.views(made.grads)["model.embed_tokens.weight"].abs().sum(-1)
    # A matrix that is the head's too learns there.
    assert bool((learned[:, PADDING] > 0).all()) == (name == "tied")


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
def test_what_cannot_be_mapped_goes_in_turn_and_says_so(name: str) -> None:
    stages = [whole(MODELS[name], seed=row) for row in range(2)]
    inputs, labels = samples(MODELS[name])
    choice = choose_pass(
        stages[0], rows_of(stages), RowBatch(torch.stack([inputs] * 2), torch.stack([labels] * 2))
    )
    assert choice.kind is PassKind.LOOPED
    assert choice.words.startswith("a DecoderStage cannot be mapped: ")
