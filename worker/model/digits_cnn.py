"""Stages of a small residual classifier for scikit-learn's digits.

Groups are normalised within each sample, so that the size of a microbatch changes nothing. B batch, C channels.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from skein.model.families.digits_cnn import DIGITS_CLASSES, DIGITS_PIXELS, DigitsCnnModel, num_groups
from skein.types import Precision, StageSpec
from worker.model.base import Stage, empty_parameter, parameter_dtype


class Convolution(nn.Module):
    """3 x 3, the size of the image kept, no bias; groups of channels are kept apart."""

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype, *, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.weight = empty_parameter(num_outputs, num_inputs // groups, 3, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight, padding=1, groups=self.groups)


class RectifiedNorm(nn.Module):
    """Group normalisation, rectified."""

    def __init__(self, num_channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(num_channels, dtype=dtype)
        self.bias = empty_parameter(num_channels, dtype=dtype)

    def forward(self, x_BC: Tensor) -> Tensor:
        return functional.relu(functional.group_norm(x_BC, num_groups(x_BC.shape[1]), self.weight, self.bias))


class ConvolutionBlock(nn.Module):
    """Normalised before its convolution, and added to what came in."""

    def __init__(self, num_channels: int, dtype: torch.dtype, *, groups: int) -> None:
        super().__init__()
        self.norm = RectifiedNorm(num_channels, dtype)
        self.conv = Convolution(num_channels, num_channels, dtype, groups=groups)

    def forward(self, x_BC: Tensor) -> Tensor:
        y: Tensor = x_BC + self.conv(self.norm(x_BC))
        return y


class Classifier(nn.Module):
    """Linear, with bias, over all pixels of all channels."""

    def __init__(self, num_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(DIGITS_CLASSES, num_features, dtype=dtype)
        self.bias = empty_parameter(DIGITS_CLASSES, dtype=dtype)

    def forward(self, x_BC: Tensor) -> Tensor:
        return functional.linear(x_BC.flatten(1), self.weight, self.bias)


class DigitsCnnStage(Stage):
    """Layers: the stem, one per block, the head. Images are (B, 1, 8, 8), labels (B,)."""

    def __init__(self, model: DigitsCnnModel, stage: StageSpec, *, precision: Precision) -> None:
        num_layers = model.num_blocks + 2
        super().__init__(model, stage, num_layers=num_layers, precision=precision)
        self.dtype = parameter_dtype(precision)
        self.stem = Convolution(1, model.channels, self.dtype) if stage.first == 0 else None
        self.blocks = nn.ModuleDict()
        for layer in range(max(stage.first, 1), min(stage.stop, num_layers - 1)):
            self.blocks[str(layer - 1)] = ConvolutionBlock(model.channels, self.dtype, groups=model.groups)
        self.norm = RectifiedNorm(model.channels, self.dtype) if self.has_head else None
        self.classifier = Classifier(model.channels * DIGITS_PIXELS**2, self.dtype) if self.has_head else None

    def body(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if self.stem is not None:
            x = self.stem(x).to(self.dtype)
        for block in self.blocks.values():
            x = block(x)
        return x

    def head(self, x: Tensor) -> Tensor:
        assert self.classifier is not None, "this stage has no head"
        logits: Tensor = self.classifier(self.into_head(x))
        return logits

    def into_head(self, x: Tensor) -> Tensor:
        assert self.norm is not None, "this stage has no head"
        normed: Tensor = self.norm(x)
        return normed.flatten(1)

    def initial(self, name: str, shape: torch.Size) -> tuple[float, float]:
        """He's initialisation for what is rectified, a small one for the classifier."""
        if len(shape) == 1:
            return (1.0 if name.endswith("norm.weight") else 0.0), 0.0
        gain = 1.0 if name.startswith("classifier") else 2.0
        return 0.0, math.sqrt(gain / math.prod(shape[1:]))
