"""AdamW alone: its numbers, bit for bit, against the equations in NumPy."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from skein.numeric.optim.adamw import AdamW
from skein.numeric.optim.groups import decayed_names
from skein.numeric.walker import Walker

F32 = NDArray[np.float32]


def numpy_update(p: F32, g: F32, m: F32, v: F32, step: int) -> tuple[F32, F32, F32]:
    """The equations with one rounding per operation, as IEEE 754 defines each."""
    one = np.float32
    g = g * one(0.5)
    m = m * one(0.9) + g * one(1 - 0.9)
    v = v * one(0.95) + g * g * one(1 - 0.95)
    denominator = np.sqrt(v) * one((1 - 0.95**step) ** -0.5) + one(1e-8)
    p = p * one(1 - 1e-3 * 0.1) - m * one(1e-3 / (1 - 0.9**step)) / denominator
    return p, m, v


def test_every_bit_is_what_ieee_arithmetic_gives() -> None:
    # Replicas on unlike CPUs and GPUs apply on their own and must stay equal.
    generator = np.random.default_rng(0)
    p = generator.standard_normal((300, 1000)).astype(np.float32)
    m, v = np.zeros_like(p), np.zeros_like(p)
    rule = AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    params = {"w": torch.from_numpy(p.copy())}
    walker = Walker(params=params, state=rule.init(params))
    for step in range(1, 4):
        g = generator.standard_normal(p.shape).astype(np.float32)
        p, m, v = numpy_update(p, g, m, v, step)
        grads = {"w": torch.from_numpy(g)}
        rule.update(walker, grads, learning_rate=1e-3, gradient_scale=0.5)
    assert np.array_equal(walker.params["w"].numpy(), p)
    assert np.array_equal(walker.state["exp_avg"]["w"].numpy(), m)
    assert np.array_equal(walker.state["exp_avg_sq"]["w"].numpy(), v)


def test_parameters_that_autograd_watches_are_updated_too() -> None:
    rule = AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    watched = torch.nn.Parameter(torch.ones(3))
    walker = Walker(params={"w": watched}, state=rule.init({"w": watched}))
    rule.update(walker, {"w": torch.ones(3)}, learning_rate=0.5, gradient_scale=1.0)
    # The first update moves by the learning rate, up to eps and the rounding of float32.
    assert watched.tolist() == pytest.approx([0.5] * 3, rel=1e-6)
    assert watched.requires_grad
    assert not walker.state["exp_avg"]["w"].requires_grad


def test_matrices_embeddings_and_kernels_decay_and_vectors_do_not() -> None:
    shapes = {"embed": (4, 2), "kernel": (2, 2, 3, 3), "norm": (4,), "bias": (2,), "scale": ()}
    assert decayed_names({name: torch.ones(shape) for name, shape in shapes.items()}) == {"embed", "kernel"}


def test_parameters_of_two_dtypes_are_refused() -> None:
    params = {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.float64)}
    rule = AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    walker = Walker(params=params, state=rule.init(params))
    with pytest.raises(ValueError, match="one dtype"):
        rule.update(walker, params, learning_rate=1.0, gradient_scale=1.0)
