"""Stages in blocks over two times two devices, in real processes over gloo, against the same stages on one device."""

import pytest
import torch

from skein.config.mesh.tensor import MeshForm
from tests.worker.mesh.test_stage import (
    assert_learns_alike,
    assert_same_sums,
    counted,
    grid_job,
    sums,
    zeroed,
)
from tests.worker.model.builders import MODELS, NUM_TOKENS, assert_near, part, samples, whole
from worker.mesh.mesh import Mesh
from worker.mesh.stage import MeshStage
from worker.mesh.traffic import Collective
from worker.model.base import Crossing
from worker.model.pending import add_up

# Sums of the same float64 numbers in another order, through two blocks and a loss.
ROUNDING = 1e-12
FAMILIES = ["no_groups", "tied", "wide_heads", "qwen2", "qwen3", "mistral"]


@pytest.mark.parametrize("num_samples", [4, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_together_give_the_loss_and_gradients_of_one_device(
    four: Mesh, name: str, num_samples: int
) -> None:
    model = MODELS[name]
    alone, shared = zeroed(whole(model)), zeroed(whole(model))
    stage = MeshStage(four, grid_job(model), shared)
    assert stage.form == MeshForm(size=4, is_grid=True)
    assert_learns_alike(stage, shared, alone, *samples(model, num_samples))


@pytest.mark.parametrize("puts_aside", [False, True])
def test_a_block_costs_spread_blocks_of_its_products_and_a_sum_of_each_norm(
    four: Mesh, puts_aside: bool
) -> None:
    model = MODELS["no_groups"]
    inner, alone = zeroed(part(model, 1, 3)), zeroed(part(model, 1, 3))
    stage = MeshStage(four, grid_job(model), inner)
    x = torch.randn(4, NUM_TOKENS, 32, dtype=torch.float64)
    given, other = (Crossing(x.clone()).followed(is_sample=False) for _ in range(2))
    before = counted(four)
    y = stage.onward(given, None)
    # Queries, keys and values share an input, which is spread and reduced once, and so do gate and up.
    num_inputs, num_products, num_norms = 4 * 2, 7 * 2, 2 * 2
    assert counted(four, before) == {
        Collective.SPREAD: 2 * (num_inputs + num_products),
        Collective.SUM: num_norms,
    }
    before = counted(four)
    wanted = alone.onward(other, None)
    torch.autograd.backward(wanted.differentiable, [torch.ones_like(wanted.hidden)])
    if puts_aside:
        aside = stage.put_aside(y.differentiable, [torch.ones_like(y.hidden)])
        stage.gather_sums()
        assert all(not gradient.any() for gradient in sums(inner).values())
        add_up(aside)
    else:
        torch.autograd.backward(y.differentiable, [torch.ones_like(y.hidden)])
    back = {
        Collective.SPREAD: 4 * num_products,
        Collective.REDUCE: 2 * (num_inputs + num_products),
        Collective.SUM: num_norms,
    }
    assert counted(four, before) == back
    assert other.hidden.grad is not None
    assert_near(y.hidden.detach(), wanted.hidden.detach(), tolerance=ROUNDING)
    assert_near(given.hidden.grad, other.hidden.grad, tolerance=ROUNDING)
    stage.gather_sums()
    assert_same_sums(inner, alone)
