"""A small classifier of handwritten digits: what rules are compared on where accuracy is the question."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from skein import rng
from skein.numeric.walker import Tensors
from worker.data.digits import open_digits

_SIZES = (64, 64, 64, 10)
_NUM_HELD_OUT = 500

Samples = tuple[Tensor, Tensor]
"""Images, (N, 64) in 0 to 1, and classes, (N,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What is trained on, and what is held out."""

    trained: Samples
    held_out: Samples


def split(seed: int, *, num_held_out: int = _NUM_HELD_OUT) -> Split:
    """scikit-learn's digits in an order that the seed draws, the first of them held out."""
    pixels, labels = open_digits(field="digits")
    order = rng.stream(seed, "digits").permutation(len(labels))
    images, classes = torch.from_numpy(pixels[order]), torch.from_numpy(labels[order])
    return Split(
        trained=(images[num_held_out:], classes[num_held_out:]),
        held_out=(images[:num_held_out], classes[:num_held_out]),
    )


def batch(samples: Samples, *, size: int, seed: int, walker: int, step: int) -> Samples:
    """The samples of one walker's step, drawn with replacement."""
    images, classes = samples
    chosen = torch.from_numpy(rng.stream(seed, "batch", walker, step).integers(len(classes), size=size))
    return images[chosen], classes[chosen]


def initial(seed: int) -> Tensors:
    """Two hidden layers of 64 rectified units and ten outputs, as He et al. scale them."""
    generator = torch.Generator().manual_seed(seed)
    params: Tensors = {}
    for layer, (before, after) in enumerate(pairwise(_SIZES)):
        params[f"{layer}.weight"] = torch.randn(after, before, generator=generator) * (2 / before) ** 0.5
        params[f"{layer}.bias"] = torch.zeros(after)
    return params


def outputs(params: Tensors, images: Tensor) -> Tensor:
    """(N, 10): logits."""
    x = images
    for layer in range(len(_SIZES) - 1):
        x = functional.linear(x, params[f"{layer}.weight"], params[f"{layer}.bias"])
        x = x.relu() if layer < len(_SIZES) - 2 else x
    return x


def loss(params: Tensors, samples: Samples) -> Tensor:
    """The mean cross entropy, in nats."""
    images, classes = samples
    return functional.cross_entropy(outputs(params, images), classes)


def gradient(params: Tensors, samples: Samples) -> tuple[float, Tensors]:
    """The loss, and its gradient by name."""
    watched = {name: x.detach().requires_grad_() for name, x in params.items()}
    found = loss(watched, samples)
    return found.item(), dict(zip(watched, torch.autograd.grad(found, list(watched.values())), strict=True))


def accuracy(params: Tensors, samples: Samples) -> float:
    """Share of the samples that are told right."""
    images, classes = samples
    return float((outputs(params, images).argmax(dim=1) == classes).double().mean())
