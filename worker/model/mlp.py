"""Stages of linear layers. A layer's activation belongs to the next one, which keeps its result for the product.

B batch, F features.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from skein.model.families.mlp import Activation, MlpModel
from skein.types import Precision, StageSpec
from worker.model.base import Linear, Stage, parameter_dtype, product_dtype
from worker.model.dropout import dropped

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
}


class MlpStage(Stage):
    """Layers: one per hidden width, the head. Samples are (B, ...) with F numbers each, labels (B,)."""

    def __init__(self, model: MlpModel, stage: StageSpec, *, precision: Precision) -> None:
        products = [*model.products()]
        super().__init__(model, stage, num_layers=len(products), precision=precision)
        self.dtype = parameter_dtype(precision)
        self.product = product_dtype(precision)
        self.activation = model.activation
        self.dropout = model.dropout
        held = {
            i: Linear(*products[i], self.dtype, self.tray, has_bias=True)
            for i in range(len(products))[stage.first : stage.stop]
        }
        self.classifier = held.pop(len(model.widths), None)
        self.layers = nn.ModuleDict({str(i): layer for i, layer in held.items()})

    def body(self, x: Tensor) -> Tensor:
        for i, layer in self.layers.items():
            x = layer(self._taken(x, int(i))).to(self.dtype)
        return x

    def head(self, x: Tensor) -> Tensor:
        assert self.classifier is not None, "this stage has no head"
        logits: Tensor = self.classifier(self.into_head(x))
        return logits

    def into_head(self, x: Tensor) -> Tensor:
        return self._taken(x, self.num_layers - 1)

    def initial(self, name: str, shape: torch.Size) -> tuple[float, float]:
        """He's initialisation for what is rectified, Glorot's variance by inputs for all else."""
        if len(shape) == 1:
            return 0.0, 0.0
        gain = 1.0 if name.startswith("classifier") or self.activation == "tanh" else 2.0
        return 0.0, math.sqrt(gain / shape[1])

    def _taken(self, x: Tensor, layer: int) -> Tensor:
        """Input of a layer's product, from raw samples or from the layer before."""
        x = x.to(self.product)
        if not layer:
            return x.flatten(1)
        return self.dropped(ACTIVATIONS[self.activation](x), layer, self.junction.luck)

    def dropped(self, x: Tensor, layer: int, luck: int | Tensor | None) -> Tensor:
        """Input of a layer's product, (..., B, F), with numbers dropped by the luck (...) of samples; None: none is."""
        if luck is None or not self.dropout:
            return x
        return dropped(x, luck, layer=layer, probability=self.dropout)
