"""Base of all stages, whatever their family."""

import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from skein.errors import LocalError
from skein.model.layers import AnyModel
from skein.model.parameters import parameter_shapes
from skein.model.rows import parse_block, whole_shapes
from skein.rng import key
from skein.types import Precision, StageSpec
from worker.model.ops import biased, go_back, linear
from worker.model.pending import Pending, Tray
from worker.model.sparse.junction import Junction

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


@dataclass(frozen=True, slots=True)
class Crossing:
    """Tensors that go from a stage to the next: samples before the first one.

    Where the vocabulary is cut, tokens that rows to come are looked up for, and scores over rows so far, go along.
    """

    hidden: Tensor
    tokens: Tensor | None = None
    scores: Tensor | None = None

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """Tensors among them that have gradients."""
        return (self.hidden,) if self.scores is None else (self.hidden, self.scores)

    def followed(self, *, is_sample: bool) -> "Crossing":
        """The same tensors, which gather gradients from now on unless they are samples."""
        for tensor in self.differentiable:
            tensor.requires_grad_(not is_sample and tensor.is_floating_point())
        return self

    def detached(self) -> "Crossing":
        """The same numbers, without what they were made of."""
        scores = None if self.scores is None else self.scores.detach()
        return Crossing(self.hidden.detach(), self.tokens, scores)


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of a microbatch, and (B,) how much the loss of each sample counts; None: all alike."""

    labels: Tensor
    weights: Tensor | None = None

    @property
    def num_valid(self) -> int:
        """Labels that are not ignored."""
        return int((self.labels != IGNORED_LABEL).sum())


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
        self.smoothing = model.smoothing
        """Share of each label that is spread over all classes, where gradients are made."""
        self.junction = Junction(max(0, stage.first - model.inner_layers.start))

    @property
    def has_head(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage.stop == self.num_layers

    @property
    def takes_labels(self) -> bool:
        """Whether `onward` needs labels."""
        return False

    @property
    def takes_tokens(self) -> bool:
        """Whether tokens come with its input, from shards of the vocabulary before it."""
        return False

    @property
    def takes_scores(self) -> bool:
        """Whether scores come with its input, from shards of the vocabulary before it."""
        return False

    @abstractmethod
    def body(self, x: Tensor) -> Tensor:
        """The layers of this stage but the head."""

    @abstractmethod
    def head(self, x: Tensor) -> Tensor:
        """Logits, classes in the last dim, from what the last block gives."""

    def into_head(self, x: Tensor) -> Tensor:
        """Input of the last matrix of a classifier, (B, H), from what the last block gives."""
        raise LocalError(f"{self.spec.family} is no classifier")

    @abstractmethod
    def initial(self, name: str, shape: torch.Size) -> tuple[float, float]:
        """Mean and standard deviation of the normal distribution a parameter begins with."""

    def forward(self, x: Tensor) -> Tensor:
        """Input of the next stage, from `x`: raw samples for the first stage, its predecessor's result for others."""
        with self.autocast(x):
            return self.body(x)

    def onward(self, given: Crossing, labels: Tensor | None) -> Crossing:
        """Tensors for the next stage, as of `forward`; `labels` where rows of a vocabulary that is cut are scored."""
        del labels
        return Crossing(self(given.hidden))

    def score(self, given: Crossing, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, int]:
        """Loss as of `loss`, of what the stage before gives."""
        return self.loss(given.hidden, labels, weights)

    def logits(self, x: Tensor) -> Tensor:
        """Logits, classes in the last dim, in the dtype of products."""
        with self.autocast(x):
            return self.head(self.body(x))

    def loss(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, int]:
        """Sum of the cross entropies (nats) of the valid labels, and how many they are, whatever they weigh.

        Labels are smoothed where there are gradients: whoever makes none scores what the model knows. The sum is taken
        in float32, or float64 under FP64; a microbatch without a valid label gives 0.

        Args:
            x: as for `forward`.
            labels: int64, the shape of the logits but for classes; `IGNORED_LABEL` where there is nothing to predict.
            weights: (B,), a factor on each sample's cross entropies; None: 1.
        """
        logits = self.logits(x).to(parameter_dtype(self.precision))
        num_valid = int((labels != IGNORED_LABEL).sum())
        entropies = partial(
            functional.cross_entropy,
            logits.flatten(0, -2),
            labels.flatten(),
            ignore_index=IGNORED_LABEL,
            label_smoothing=self.smoothing if torch.is_grad_enabled() else 0.0,
        )
        if weights is None:
            total = entropies(reduction="sum")
        else:
            each = entropies(reduction="none")
            total = (each.view(len(weights), -1) * weights.to(each)[:, None]).sum()
        return total, num_valid

    def traits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the last matrix of a classifier, (B, H), and its logits, (B, C), as of `loss`."""
        with self.autocast(x):
            hidden = self.body(x)
            logits, taken = self.head(hidden), self.into_head(hidden)
        dtype = parameter_dtype(self.precision)
        return taken.to(dtype), logits.to(dtype)

    def add_gradients(self, y: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Go back through the stage, and add the gradients of all parameters to their sums.

        Args:
            y: what `onward` gave; its graph is used up.
            grads: gradients of `y`.
        """
        go_back(y, grads)

    def put_aside(self, y: Sequence[Tensor], grads: Sequence[Tensor] | None = None) -> deque[Pending]:
        """Go back through the stage, and put the gradients of all parameters aside: `add_up` adds them, once.

        The stage's input has its gradient then, where one is wanted; no parameter's changes. Only where the model
        `has_split_backward`.

        Args:
            y: what `onward` or `score` gave; its graph is used up.
            grads: gradients of `y`; none of a loss.
        """
        assert self.spec.has_split_backward, "backward is whole here"
        with self.tray.opened() as pending:
            if grads is None:
                torch.autograd.backward(y)
            else:
                go_back(y, grads)
        return pending

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draws every parameter from (seed, name, shape) alone, so that every cut begins with the same model.

        Blocks of rows are the rows of the whole tensor.
        """
        whole_by_name = whole_shapes(parameter_shapes(self.spec))
        parts_by_name: defaultdict[str, list[_Part]] = defaultdict(list)
        for name, parameter in self.named_parameters():
            block = parse_block(name)
            whole, first_row = (name, 0) if block is None else (block.whole, block.rows.start)
            parts_by_name[whole].append((first_row * math.prod(parameter.shape[1:]), parameter))
        for name, parts in parts_by_name.items():
            shape = torch.Size(whole_by_name[name])
            mean, std = self.initial(name, shape)
            for _, part in parts:
                part.fill_(mean)
            if std > 0:
                _draw(parts, shape.numel(), key(seed, "init", name), std)

    def autocast(self, x: Tensor) -> AbstractContextManager[object]:
        """The context in which forwards run, on the device of `x`."""
        return (
            torch.autocast(x.device.type, torch.bfloat16)
            if self.precision is Precision.BF16
            else nullcontext()
        )


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter on the current default device, to be filled by `Stage.initialise` or from a file."""
    return nn.Parameter(torch.empty(shape, dtype=dtype))


Products = Callable[[Tensor, Sequence[Tensor], Tray], tuple[Tensor, ...]]
"""Products of one input with several matrices, as of `linear`."""


def linears(x: Tensor, weights: Sequence[Tensor], tray: Tray) -> tuple[Tensor, ...]:
    """`linear` of each of these matrices."""
    return tuple(linear(x, weight, tray) for weight in weights)


class Linear(nn.Module):
    """A matrix, and in some families a bias, in the dtype of its input."""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        dtype: torch.dtype,
        tray: Tray,
        *,
        has_bias: bool = False,
        products: Products = linears,
    ) -> None:
        super().__init__()
        self.tray = tray
        self.products = products
        self.weight = empty_parameter(num_outputs, num_inputs, dtype=dtype)
        self.bias = empty_parameter(num_outputs, dtype=dtype) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return together(x, self)[0]


def together(x: Tensor, first: Linear, *others: Linear) -> tuple[Tensor, ...]:
    """Result of each of several such functions of one input; where that is on several devices it crosses once."""
    every = (first, *others)
    made = first.products(x, tuple(one.weight for one in every), first.tray)
    return tuple(
        y if one.bias is None else biased(y, one.bias, one.tray) for one, y in zip(every, made, strict=True)
    )


_Part = tuple[int, Tensor]
"""Place of a tensor's first number in the whole, and the tensor."""


def _draw(parts: Sequence[_Part], num_elements: int, seed: int, std: float) -> None:
    """Adds normal noise to parts of a tensor of so many numbers, whichever of them are here.

    It is drawn on the CPU in float64 whatever the device and dtype.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    spans = [(begin, begin + part.numel(), part.view(-1)) for begin, part in parts]
    for start in range(0, max(stop for _, stop, _ in spans), _DRAW_SIZE):
        size = min(_DRAW_SIZE, num_elements - start)
        noise = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu").mul_(std)
        for begin, end, flat in spans:
            first, stop = max(begin, start), min(end, start + size)
            if first < stop:
                here = flat[first - begin : stop - begin]
                here += noise[first - start : stop - start].to(here)
