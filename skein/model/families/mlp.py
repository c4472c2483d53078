"""Linear layers one after the other, a classifier; softmax regression where none is hidden."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from skein.model.families.digits_cnn import DIGITS_CLASSES, DIGITS_PIXELS
from skein.model.layers import LABEL_BYTES, AnyClassifier, LabelledShape, LayerSpec, Shapes, num_elements
from skein.types import Precision

Activation = Literal["relu", "tanh", "gelu"]

_Width = Annotated[int, Field(ge=1, le=65_536)]


class MlpModel(AnyClassifier):
    """A classifier of linear layers with biases, by default of the 8 x 8 images of scikit-learn's digits."""

    has_split_backward: ClassVar[bool] = True
    of_training: ClassVar[frozenset[str]] = AnyClassifier.of_training | {"dropout"}

    family: Literal["mlp"]
    widths: Annotated[tuple[_Width, ...], Field(max_length=64)] = (128, 128)
    """Features of each hidden layer, first to last; [] makes softmax regression, which cannot be cut."""
    activation: Activation = "relu"
    """Between two layers."""
    dropout: Annotated[float, Field(ge=0, le=0.95)] = 0.0
    """Share of the numbers between two layers that training sets to 0, drawn anew for each sample and step. Raise it,
    to 0.1 or 0.5, if the training loss falls far below that of validation."""
    num_features: _Width = DIGITS_PIXELS**2
    """Numbers of a sample, whatever its shape."""
    num_classes: Annotated[int, Field(ge=2, le=65_536)] = DIGITS_CLASSES

    @property
    def labelled(self) -> LabelledShape:
        return LabelledShape(sample=(self.num_features,), num_classes=self.num_classes)

    @property
    def has_dropout(self) -> bool:
        return self.dropout > 0

    def products(self) -> Iterator[tuple[int, int]]:
        """Features that each layer takes and gives, the head's last."""
        return pairwise((self.num_features, *self.widths, self.num_classes))

    def layer_parameters(self) -> tuple[Shapes, ...]:
        names = (*(f"layers.{i}" for i in range(len(self.widths))), "classifier")
        return tuple(
            {f"{name}.weight": (num_outputs, num_inputs), f"{name}.bias": (num_outputs,)}
            for name, (num_inputs, num_outputs) in zip(names, self.products(), strict=True)
        )

    def layers(self, *, sequence_tokens: int, precision: Precision) -> tuple[LayerSpec, ...]:
        word, product = precision.word_bytes, precision.product_bytes
        sizes = map(num_elements, self.layer_parameters())
        return tuple(
            LayerSpec(
                name="head" if i == len(self.widths) else f"linear.{i}",
                num_parameters=size,
                forward_flops=2 * num_inputs * num_outputs,
                extra_backward_flops=0 if i else -2 * num_inputs * num_outputs,
                activation_bytes=num_inputs * self._kept_bytes(product, is_first=i == 0)
                + (num_outputs * word + LABEL_BYTES if i == len(self.widths) else 0),
                output_bytes=0 if i == len(self.widths) else num_outputs * word,
                pending_bytes=(num_inputs + num_outputs) * product,
            )
            for i, (size, (num_inputs, num_outputs)) in enumerate(zip(sizes, self.products(), strict=True))
        )

    def _kept_bytes(self, product: int, *, is_first: bool) -> int:
        """Bytes kept of a number that a layer takes: for its product, by GELU what that takes, and what dropout takes.

        Dropout keeps a byte besides, which says whether the number is dropped.
        """
        if is_first:
            return product
        has_both = self.activation == "gelu" or self.has_dropout
        return (2 if has_both else 1) * product + self.has_dropout
