"""Base of all stages, whatever their family."""

from abc import ABC, abstractmethod
from collections import deque

import torch
from torch import Tensor, nn
from torch.nn import functional

from skein.model.layers import AnyModel
from skein.rng import key
from skein.types import Precision, StageSpec
from worker.model.pending import Pending, Tray

IGNORED_LABEL = -100
"""A label that takes no part in the loss."""
# Bounds the memory of initialising; a part of what defines the numbers drawn, so never change it.
_DRAW_SIZE = 1 << 20


def parameter_dtype(precision: Precision) -> torch.dtype:
    """In what parameters, residuals and boundary tensors are kept."""
    return torch.float64 if precision is Precision.FP64 else torch.float32


def product_dtype(precision: Precision) -> torch.dtype:
    """In what matrix products are computed."""
    return torch.bfloat16 if precision is Precision.BF16 else parameter_dtype(precision)


class Stage(nn.Module, ABC):
    """A contiguous range of a model's layers, with parameters under the names of the whole model.

    `forward` runs the layers but the head; `logits` and `loss` go on through the head and need `has_head`. A stage that
    is nothing but a head passes its input through `forward` unchanged.
    """

    def __init__(self, model: AnyModel, stage: StageSpec, *, num_layers: int, precision: Precision) -> None:
        super().__init__()
        self.spec = model
        self.stage = stage
        self.precision = precision
        self.num_layers = num_layers
        self.tray = Tray()

    @property
    def has_head(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage.stop == self.num_layers

    @abstractmethod
    def body(self, x: Tensor) -> Tensor:
        """The layers of this stage but the head."""

    @abstractmethod
    def head(self, x: Tensor) -> Tensor:
        """Logits, classes in the last dim, from what the last block gives."""

    @abstractmethod
    def initial(self, name: str, shape: torch.Size) -> tuple[float, float]:
        """Mean and standard deviation of the normal distribution a parameter begins with."""

    def forward(self, x: Tensor) -> Tensor:
        """Input of the next stage, from `x`: raw samples for the first stage, its predecessor's result for others."""
        with self._autocast(x):
            return self.body(x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits, classes in the last dim, in the dtype of products."""
        with self._autocast(x):
            return self.head(self.body(x))

    def loss(self, x: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        """Sum of the cross entropies (nats) of the valid labels, and how many they are.

        The sum is taken in float32, or float64 under FP64; a microbatch without a valid label gives 0.

        Args:
            x: as for `forward`.
            labels: int64, the shape of the logits but for classes; `IGNORED_LABEL` where there is nothing to predict.
        """
        logits = self.logits(x).to(parameter_dtype(self.precision))
        num_valid = int((labels != IGNORED_LABEL).sum())
        total = functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return total, num_valid

    def put_aside(self, y: Tensor, grad: Tensor | None = None) -> deque[Pending]:
        """Go back through the stage, and put the gradients of all parameters aside: `add_up` adds them, once.

        The stage's input has its gradient then, where one is wanted; no parameter's changes. Only where the model
        `has_split_backward`.

        Args:
            y: what `forward` or `loss` gave; its graph is used up.
            grad: gradient of `y`; none of a loss.
        """
        assert self.spec.has_split_backward, "backward is whole here"
        with self.tray.opened() as pending:
            torch.autograd.backward(y, grad)
        return pending

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draws every parameter from (seed, name, shape) alone, so that every cut begins with the same model."""
        for name, parameter in self.named_parameters():
            mean, std = self.initial(name, parameter.shape)
            parameter.fill_(mean)
            if std > 0:
                _draw(parameter, key(seed, "init", name), std)

    def _autocast(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision is Precision.BF16)


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter on the current default device, to be filled by `Stage.initialise` or from a file."""
    return nn.Parameter(torch.empty(shape, dtype=dtype))


def _draw(parameter: Tensor, seed: int, std: float) -> None:
    """Adds normal noise, drawn on the CPU in float64 whatever the device and dtype of `parameter`."""
    generator = torch.Generator("cpu").manual_seed(seed)
    flat = parameter.view(-1)
    for start in range(0, flat.numel(), _DRAW_SIZE):
        part = flat[start : start + _DRAW_SIZE]
        noise = torch.randn(part.numel(), generator=generator, dtype=torch.float64, device="cpu")
        part += noise.mul_(std).to(part)
