"""Shards of a vocabulary keep, put aside and compute what their layers say, and no logits between two ops."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from skein.model.layers import layers_of, pending_bytes, stage_cost
from skein.model.rows import VocabularySplit
from skein.types import Precision, StageIndex, StageSpec
from tests.worker.model.builders import MODELS, NUM_TOKENS, part, samples
from worker.model.base import Crossing, Stage
from worker.model.pending import add_up, held_bytes

NUM_SAMPLES = 3
# 50 rows are three blocks; the input's are layers 0 to 2, the norm is layer 5, the output's are 6 to 8.
SHARDS = {
    "input": (0, 3),
    "later input": (1, 3),
    "one block": (7, 8),
    "output": (6, 9),
    "later output": (7, 9),
}
WITH_NORM = (5, 9)
CASES = [
    (name, first, stop, precision)
    for precision in Precision
    for name in ("tied", "untied")
    for first, stop in (*SHARDS.values(), WITH_NORM)
]


def shard(name: str, first: int, stop: int, precision: Precision) -> Stage:
    return part(MODELS[name].with_rows(VocabularySplit.BOTH), first, stop, precision=precision)


def given(stage: Stage) -> tuple[Crossing, Tensor]:
    """Tensors that come to a stage, and labels."""
    tokens, labels = samples(stage.spec, NUM_SAMPLES)
    if stage.stage.first == 0:
        return Crossing(tokens), labels
    shape, dtype = (NUM_SAMPLES, NUM_TOKENS), next(stage.parameters()).dtype
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(*shape, 32, generator=draw, dtype=dtype).requires_grad_()
    scores = torch.randn(*shape, 2, generator=draw, dtype=dtype).requires_grad_()
    return Crossing(
        hidden, tokens if stage.takes_tokens else None, scores if stage.takes_scores else None
    ), labels


def bytes_beside(tensors: list[Tensor], stage: Stage, came: Crossing, labels: Tensor) -> int:
    """Bytes of tensors, each storage once, without parameters and without what came; a sample's tokens are kept."""
    others = [came.hidden] if stage.stage.first else []
    others += [x for x in (came.tokens, came.scores, labels) if x is not None]
    own = {x.untyped_storage().data_ptr() for x in (*stage.parameters(), *stage.buffers(), *others)}
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(num_bytes for address, num_bytes in kept.items() if address not in own)


@pytest.mark.parametrize(("name", "first", "stop", "precision"), CASES)
def test_a_shard_keeps_scores_and_tokens_and_no_logits(
    name: str, first: int, stop: int, precision: Precision
) -> None:
    stage = shard(name, first, stop, precision)
    came, labels = given(stage)
    saved: list[Tensor] = []  # kept alive, or storages would share an address

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        stage.onward(came, labels)
    layers = layers_of(stage.spec, sequence_tokens=NUM_TOKENS, precision=precision)
    predicted = NUM_SAMPLES * stage_cost(layers, stage.stage).activation_bytes
    # Where rows are the first, scores begin with two numbers in all; the norm's input came, and is counted there too.
    begun = 2 * next(stage.parameters()).itemsize if first in (5, 6) else 0
    came_bytes = came.hidden.nbytes if first == 5 else 0
    assert bytes_beside(saved, stage, came, labels) == predicted + begun - came_bytes


@pytest.mark.parametrize(("name", "first", "stop", "precision"), CASES)
def test_a_shard_puts_aside_what_its_layers_say(
    name: str, first: int, stop: int, precision: Precision
) -> None:
    stage = shard(name, first, stop, precision)
    came, labels = given(stage)
    made = stage.onward(came, labels)
    grads = [torch.ones_like(x) for x in made.differentiable]
    pending = stage.put_aside(made.differentiable, grads)
    aside = [x for one in pending for x in one.operands]
    predicted = pending_bytes(
        stage.spec,
        stage.stage,
        num_samples=NUM_SAMPLES,
        sequence_tokens=NUM_TOKENS,
        precision=precision,
    )
    # A later shard has tokens and gradient as they came; what follows a norm has its result put aside.
    if first == 1:
        predicted += grads[0].nbytes
    elif first == 5:
        predicted += made.hidden.nbytes
    assert bytes_beside(aside, stage, came, labels) == predicted
    add_up(pending)
    assert held_bytes(pending) == 0


@pytest.mark.parametrize("end", SHARDS)
def test_a_shard_computes_what_its_layers_say_its_logits_twice(end: str) -> None:
    stage = shard("untied", *SHARDS[end], Precision.FP32)
    came, labels = given(stage)
    layers = layers_of(stage.spec, sequence_tokens=NUM_TOKENS, precision=Precision.FP32)
    predicted = stage_cost(layers, stage.stage)
    with FlopCounterMode(display=False) as forward:
        made = stage.onward(came, labels)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(made.differentiable, [torch.ones_like(x) for x in made.differentiable])
    assert forward.get_total_flops() == NUM_SAMPLES * predicted.forward_flops
    assert backward.get_total_flops() == NUM_SAMPLES * predicted.backward_flops
    assert predicted.backward_flops == 3 * predicted.forward_flops


@pytest.mark.parametrize("precision", Precision)
def test_output_bytes_of_a_shard_are_those_of_what_goes_on(precision: Precision) -> None:
    for first, stop in ((0, 1), (1, 3), (5, 6), (6, 7), (7, 8)):
        stage = shard("untied", first, stop, precision)
        came, labels = given(stage)
        made = stage.onward(came, labels)
        # Labels go with what is scored later on.
        sent = [
            x
            for x in (made.hidden, made.tokens, made.scores, labels if first >= 5 else None)
            if x is not None
        ]
        layers = layers_of(stage.spec, sequence_tokens=NUM_TOKENS, precision=precision)
        predicted = (
            NUM_SAMPLES
            * stage_cost(layers, StageSpec(index=StageIndex(0), first=first, stop=stop)).output_bytes
        )
        assert sum(x.nbytes for x in sent) == predicted
