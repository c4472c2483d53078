"""Passes of an array: whichever way rows go, each has the loss and the gradients of its own model alone."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.mlp import MlpModel
from skein.numeric.rows import RowBuffer
from skein.numeric.walker import Walker
from skein.protocol.messages.array_rounds import PassKind
from skein.types import Precision
from tests.worker.model.builders import MODELS, samples, whole
from worker.model.base import IGNORED_LABEL, Stage
from worker.model.dropout import luck_of
from worker.sweep.fused import fused_forward, strangers
from worker.sweep.passes import make_pass

SPARSE = ("mixtral", "qwen3 moe")
FUSED = [name for name in MODELS if name not in SPARSE]
NUM_ROWS = 3
# Sums of the same float64 numbers in another order: a few units in the last place of the largest.
ROUNDING = 1e-12


def rows_of(stages: list[Stage]) -> RowBuffer:
    params = [{name: x.detach() for name, x in stage.named_parameters()} for stage in stages]
    return RowBuffer.of([Walker(params=tensors, state={}) for tensors in params])


def own_samples(name: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Other samples for each row, some of them without a label."""
    inputs, labels = (torch.stack(x.chunk(NUM_ROWS)) for x in samples(MODELS[name], 3 * NUM_ROWS))
    labels[1, 0] = IGNORED_LABEL
    return inputs.to(dtype) if inputs.is_floating_point() else inputs, labels


def lucks(stage: Stage) -> Tensor | None:
    """Luck of each row's first sample, where the model has dropout."""
    return torch.tensor([luck_of(row, 3, 0) for row in range(NUM_ROWS)]) if stage.spec.has_dropout else None


def expected(stages: list[Stage], inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    losses, grads = [], []
    for row, (stage, x, y) in enumerate(zip(stages, inputs, labels, strict=True)):
        with stage.junction.visited(None, luck=luck_of(row, 3, 0)):
            loss, _ = stage.loss(x, y)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
        grads.append({name: p.grad for name, p in stage.named_parameters() if p.grad is not None})
    return torch.stack(losses), RowBuffer.of([Walker(params=grad, state={}) for grad in grads]).params


@pytest.mark.parametrize("name", FUSED)
def test_fused_rows_have_the_losses_and_gradients_of_their_models(name: str) -> None:
    stages = [whole(MODELS[name], seed=row) for row in range(NUM_ROWS)]
    made = make_pass(PassKind.FUSED, stages[0], rows_of(stages))
    assert made is not None
    inputs, labels = own_samples(name)
    losses, grads = expected(stages, inputs, labels)
    for times in (1, 2):  # A second microbatch is added.
        found = made.run(inputs, labels, luck=lucks(stages[0]))
        assert torch.allclose(found, losses, rtol=ROUNDING, atol=0)
        worst = (made.grads - times * grads).abs().max()
        assert worst <= ROUNDING * grads.abs().max()
    made.clear()
    made.run(inputs, labels, luck=lucks(stages[0]))
    assert (made.grads - grads).abs().max() <= ROUNDING * grads.abs().max()


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((PassKind.VMAPPED, x) for x in FUSED), *((PassKind.LOOPED, x) for x in MODELS)],
)
def test_other_passes_have_them_too(kind: PassKind, name: str) -> None:
    stages = [whole(MODELS[name], seed=row) for row in range(NUM_ROWS)]
    made = make_pass(kind, stages[0], rows_of(stages))
    assert made is not None
    inputs, labels = own_samples(name)
    losses, grads = expected(stages, inputs, labels)
    assert torch.allclose(made.run(inputs, labels, luck=lucks(stages[0])), losses, rtol=ROUNDING, atol=0)
    assert (made.grads - grads).abs().max() <= ROUNDING * grads.abs().max()


@pytest.mark.parametrize("kind", PassKind)
@pytest.mark.parametrize("groups", [2, 6], ids=["grouped", "depthwise"])
def test_groups_of_all_rows_are_kept_apart(kind: PassKind, groups: int) -> None:
    model = DigitsCnnModel(family="digits_cnn", channels=6, num_blocks=2, groups=groups)
    stages = [whole(model, seed=row) for row in range(NUM_ROWS)]
    made = make_pass(kind, stages[0], rows_of(stages))
    assert made is not None
    inputs, labels = own_samples("digits")
    losses, grads = expected(stages, inputs, labels)
    assert torch.allclose(made.run(inputs, labels), losses, rtol=ROUNDING, atol=0)
    assert (made.grads - grads).abs().max() <= ROUNDING * grads.abs().max()


@pytest.mark.parametrize("kind", PassKind)
@pytest.mark.parametrize("name", ["digits", "mlp"])
def test_rows_smooth_their_labels_each_as_much_as_it_is_to(kind: PassKind, name: str) -> None:
    stages, shares = [whole(MODELS[name], seed=row) for row in range(NUM_ROWS)], (0.0, 0.1, 0.5)
    inputs, labels = own_samples(name)
    weights = torch.linspace(0.5, 1.5, labels.numel(), dtype=torch.float64).view(labels.shape)
    losses, grads = [], []
    for stage, share, x, y, w in zip(stages, shares, inputs, labels, weights, strict=True):
        each = functional.cross_entropy(stage.logits(x), y, reduction="none", label_smoothing=share)
        (each * w).sum().backward()
        losses.append((each * w).sum().detach())
        grads.append({name: p.grad for name, p in stage.named_parameters() if p.grad is not None})
    made = make_pass(kind, stages[0], rows_of(stages), shares)
    assert made is not None
    assert torch.allclose(made.run(inputs, labels, weights), torch.stack(losses), rtol=ROUNDING, atol=0)
    wanted = RowBuffer.of([Walker(params=grad, state={}) for grad in grads]).params
    assert (made.grads - wanted).abs().max() <= ROUNDING * wanted.abs().max()


def test_labels_are_smoothed_where_something_is_learned_alone() -> None:
    model = MlpModel(family="mlp", widths=(7,), label_smoothing=0.3)
    stage, plain = whole(model), whole(model.model_copy(update={"label_smoothing": 0.0}))
    inputs, labels = samples(model)
    learned, calm = (each.loss(inputs, labels)[0] for each in (stage, plain))
    wanted = functional.cross_entropy(plain.logits(inputs), labels, reduction="sum", label_smoothing=0.3)
    assert learned.item() == pytest.approx(wanted.item(), rel=ROUNDING)
    with torch.no_grad():
        assert torch.equal(stage.loss(inputs, labels)[0], calm)


@pytest.mark.parametrize("kind", PassKind)
def test_rows_drop_by_their_own_luck_and_without_any_nothing(kind: PassKind) -> None:
    stages = [whole(MODELS["mlp dropout"], seed=7) for _ in range(NUM_ROWS)]
    made = make_pass(kind, stages[0], rows_of(stages))
    assert made is not None
    inputs, labels = (x[:1].expand(NUM_ROWS, *x.shape[1:]) for x in own_samples("mlp dropout"))
    calm = made.run(inputs, labels)
    assert torch.allclose(calm, calm[0], rtol=ROUNDING)
    luck = torch.tensor([luck_of(1, 0, 0), luck_of(2, 0, 0), luck_of(1, 0, 0)])
    one, other, again = made.run(inputs, labels, luck=luck).tolist()
    assert one == pytest.approx(again, rel=ROUNDING)
    assert abs(one - other) > 1e-3
    assert abs(one - float(calm[0])) > 1e-3


@pytest.mark.parametrize("name", ["digits", "mlp", "tied"])
def test_fused_rows_round_as_their_models_do_under_bfloat16(name: str) -> None:
    stages = [whole(MODELS[name], seed=row, precision=Precision.BF16) for row in range(NUM_ROWS)]
    made = make_pass(PassKind.FUSED, stages[0], rows_of(stages))
    assert made is not None
    inputs, labels = own_samples(name, torch.float32)
    losses, grads = expected(stages, inputs, labels)
    # Eight bits of products, whose sums may round to either side.
    assert torch.allclose(made.run(inputs, labels), losses, rtol=1e-2)
    assert (made.grads - grads).norm() <= 2e-2 * grads.norm()


def test_softmax_regression_has_a_head_alone_and_is_fused() -> None:
    stages = [whole(MlpModel(family="mlp", widths=()), seed=row) for row in range(NUM_ROWS)]
    made = make_pass(PassKind.FUSED, stages[0], rows_of(stages))
    assert made is not None
    inputs, labels = own_samples("mlp")
    losses, grads = expected(stages, inputs, labels)
    assert torch.allclose(made.run(inputs, labels), losses, rtol=ROUNDING, atol=0)
    assert (made.grads - grads).abs().max() <= ROUNDING * grads.abs().max()


@pytest.mark.parametrize("name", SPARSE)
def test_a_model_with_a_module_that_is_not_known_is_not_fused(name: str) -> None:
    stage = whole(MODELS[name])
    assert fused_forward(stage) is None
    assert "SparseMlp" in strangers(stage)
    assert make_pass(PassKind.FUSED, stage, rows_of([stage])) is None


def test_a_subclass_is_a_stranger() -> None:
    stage = whole(MODELS["mlp"])

    class Other(type(stage)):  # type: ignore[misc]  # of a class known at run time
        pass

    stage.__class__ = Other
    assert strangers(stage) == ("Other",)
    assert fused_forward(stage) is None
