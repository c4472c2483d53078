"""A small residual classifier for scikit-learn's digits."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from skein.errors import UserError
from skein.model.layers import (
    LABEL_BYTES,
    AnyClassifier,
    LabelledShape,
    LayerSpec,
    Shapes,
    num_elements,
)
from skein.types import Precision

DIGITS_PIXELS = 8
"""Height and width of an image of scikit-learn's digits."""
DIGITS_CLASSES = 10


class DigitsCnnModel(AnyClassifier):
    """A small convolutional classifier for 8 x 8 grey images in 10 classes (scikit-learn's digits)."""

    family: Literal["digits_cnn"]
    channels: Annotated[int, Field(ge=1, le=1024)] = 16
    num_blocks: Annotated[int, Field(ge=1, le=64)] = 3
    groups: Annotated[int, Field(ge=1, le=1024)] = 1
    """Groups of channels that the convolution of a block keeps apart: so many times fewer products. As many as
    `channels`: each channel by itself (depthwise)."""

    @model_validator(mode="after")
    def _check_groups(self) -> "DigitsCnnModel":
        if self.channels % self.groups:
            raise UserError("groups", self.groups, f"give a divisor of channels ({self.channels})")
        return self

    @property
    def labelled(self) -> LabelledShape:
        return LabelledShape(sample=(1, DIGITS_PIXELS, DIGITS_PIXELS), num_classes=DIGITS_CLASSES)

    def layer_parameters(self) -> tuple[Shapes, ...]:
        channels = self.channels
        norm = {"norm.weight": (channels,), "norm.bias": (channels,)}
        block = norm | {"conv.weight": (channels, channels // self.groups, 3, 3)}
        features = channels * DIGITS_PIXELS * DIGITS_PIXELS
        return (
            {"stem.weight": (channels, 1, 3, 3)},
            *({f"blocks.{i}.{name}": shape for name, shape in block.items()} for i in range(self.num_blocks)),
            norm | {"classifier.weight": (DIGITS_CLASSES, features), "classifier.bias": (DIGITS_CLASSES,)},
        )

    def layers(self, *, sequence_tokens: int, precision: Precision) -> tuple[LayerSpec, ...]:
        word, product = precision.word_bytes, precision.product_bytes
        num_pixels = DIGITS_PIXELS * DIGITS_PIXELS
        num_features = num_pixels * self.channels
        # Input and rectified output of the norm, its mean and scale per group; bfloat16 keeps a cast copy besides.
        copy_bytes = num_features * product if precision is Precision.BF16 else 0
        norm_bytes = 2 * num_features * word + 2 * num_groups(self.channels) * word + copy_bytes
        first, *blocks, last = map(num_elements, self.layer_parameters())
        stem_flops = 2 * 9 * num_features
        conv_flops = stem_flops * self.channels // self.groups
        stem = LayerSpec(
            name="stem",
            num_parameters=first,
            forward_flops=stem_flops,
            extra_backward_flops=-stem_flops,
            activation_bytes=num_pixels * product,
            output_bytes=num_features * word,
        )
        middle = (
            LayerSpec(
                name=f"block.{i}",
                num_parameters=size,
                forward_flops=conv_flops,
                activation_bytes=norm_bytes,
                output_bytes=num_features * word,
            )
            for i, size in enumerate(blocks)
        )
        head = LayerSpec(
            name="head",
            num_parameters=last,
            forward_flops=2 * num_features * DIGITS_CLASSES,
            activation_bytes=norm_bytes + DIGITS_CLASSES * word + LABEL_BYTES,
            output_bytes=0,
        )
        return (stem, *middle, head)


def num_groups(channels: int) -> int:
    """Groups of a convolution block's normalisation: 4 where the channels allow it."""
    return math.gcd(channels, 4)
