"""Model as the rest of Skein knows it: a list of layers, each with its tensors and what it costs.

All figures but parameters are per sample. FLOPs count the matrix products and convolutions, as
`torch.utils.flop_counter` does: 2 m n k each, and attention as if it were not causal. Activation bytes are those that
autograd keeps from forward to backward, each tensor once, without parameters and rotary tables, with an attention
kernel that keeps no scores.
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Self

from pydantic import Field, PrivateAttr

from skein.errors import UserError, shown
from skein.model.rows import VocabularySplit
from skein.model.sparse.choices import Choices
from skein.spec import Spec
from skein.types import Precision, StageSpec

Shapes = Mapping[str, tuple[int, ...]]
"""Tensors by the names that Hugging Face gives them."""

LABEL_BYTES = 8
"""Tokens and labels are int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Layer of a model: the smallest thing that a cut may separate from its neighbours."""

    name: str
    num_parameters: int
    """All that the layer must hold, so a head includes a tied matrix; `stage_cost` counts that once."""
    forward_flops: int
    activation_bytes: int
    output_bytes: int
    """Size of what it hands to the next layer; 0 for the head, whose loss stays where it is."""
    extra_backward_flops: int = 0
    """FLOPs of backward beyond twice the forward: scores recomputed, or less where no input wants a gradient."""
    num_tied_parameters: int = 0
    """Number of the parameters that a layer before holds too."""
    pending_bytes: int = 0
    """Size of the gradients put aside from input op to weight op, but for `num_early_gradients`."""
    num_early_gradients: int = 0
    """Number of the parameters, those of norms, whose gradients the input op makes; put aside once per microbatch."""

    @property
    def backward_flops(self) -> int:
        """FLOPs of the gradients of inputs and parameters together."""
        return 2 * self.forward_flops + self.extra_backward_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Sums over the layers of a stage; `output_bytes` is that of its last layer."""

    num_parameters: int
    forward_flops: int
    backward_flops: int
    activation_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledShape:
    """Shape of a sample that a classifier takes, and how many classes there are."""

    sample: tuple[int, ...]
    num_classes: int

    @property
    def num_features(self) -> int:
        """Numbers of a sample."""
        return math.prod(self.sample)


class AnyModel(Spec):
    """A model as a job asks for it. Each family derives from it; `skein.model.table` lists them."""

    family: str
    has_split_backward: ClassVar[bool] = False
    """Whether its functions can put weight gradients aside; else every backward is whole."""
    has_vocabulary: ClassVar[bool] = False
    """Whether it has matrices over a vocabulary, which can be cut into rows."""
    has_experts: ClassVar[bool] = False
    """Whether routers in it weigh what goes through them by the valid tokens of a microbatch."""
    of_training: ClassVar[frozenset[str]] = frozenset()
    """Fields that say how it is trained, and nothing of what its weights compute."""

    _split: VocabularySplit = PrivateAttr(default=VocabularySplit.OFF)

    @property
    def vocabulary_split(self) -> VocabularySplit:
        """Matrices over the vocabulary whose blocks of rows are layers."""
        return self._split

    def with_rows(self, split: VocabularySplit) -> Self:
        """This model with a layer for each block of rows of the matrices that `split` names."""
        if split is self._split:
            return self
        made = self.model_copy()
        made._split = split
        return made

    def check_microbatch(self, num_samples: int, sequence_tokens: int) -> None:
        """Refuses a microbatch of so many samples that is too small for it.

        Raises:
            UserError: names the field of the model that makes it so.
        """

    @property
    def tensor_divisor(self) -> int:
        """So many devices, or a divisor of that, can share every block; 0: not known yet, 1: it is not shared."""
        return 1

    @property
    def has_dropout(self) -> bool:
        """Whether numbers between its layers are dropped in training, by draws of each sample's own."""
        return False

    @property
    def smoothing(self) -> float:
        """Share of each label that training spreads over all classes."""
        return 0.0

    @property
    def divided_words(self) -> str:
        """Sizes that bound how many devices can share a block, in words; empty where its family bounds that to one."""
        return ""

    @property
    def is_spread(self) -> bool:
        """Whether the experts of a block shall be on several devices of a worker."""
        return False

    @property
    def num_experts(self) -> int:
        """Experts of each block, of which each device that shares blocks has some whole; 0: it has none."""
        return 0

    @property
    def grid_sizes(self) -> Mapping[str, int]:
        """Sizes that q must divide for q times q devices to share every block in two dimensions; none: they cannot."""
        return {}

    def gridded(self, side: int) -> Self:
        """Model whose blocks have the sizes that one of `side` times `side` devices has of each."""
        assert side == 1, f"models of family {self.family} are not shared in two dimensions"
        return self

    def shared(self, size: int) -> Self:
        """Model whose blocks are the share that one of `size` devices has of each; all else is whole."""
        assert size == 1, f"models of family {self.family} are not shared"
        return self

    @property
    def begins_from(self) -> str | None:
        """The Hugging Face directory that the weights begin from; None: they are drawn."""
        return None

    def choices_of(self, num_tokens: int) -> Choices | None:
        """Form of what each router chooses of so many tokens of a microbatch; None: nothing is chosen."""
        return None

    def num_blocks_in(self, stage: StageSpec) -> int:
        """Blocks of a stage."""
        inner = self.inner_layers
        return len(range(max(stage.first, inner.start), min(stage.stop, inner.stop)))

    @property
    @abstractmethod
    def vocab_size(self) -> int | None:
        """Number of tokens that the model knows; None: it is a classifier."""

    @property
    def labelled(self) -> LabelledShape | None:
        """Samples of a classifier; None: they are tokens."""
        return None

    def sample_tokens(self, sequence_tokens: int) -> int:
        """Tokens that a sample counts for, where one of text has `sequence_tokens`."""
        return sequence_tokens

    @abstractmethod
    def layer_parameters(self) -> tuple[Shapes, ...]:
        """The tensors of each layer: what takes raw samples first, then the blocks, the head and its loss last.

        With tied embeddings the ends of the list have tensors in common, for each needs them where it runs. Where the
        vocabulary is cut, blocks of its rows are layers: of the output after the final norm, which is one too, and of
        the input at the beginning.
        """

    @property
    def inner_layers(self) -> range:
        """Places of the blocks in the layer list, between its ends."""
        return range(1, len(self.layer_parameters()) - 1)

    @abstractmethod
    def layers(self, *, sequence_tokens: int, precision: Precision) -> tuple[LayerSpec, ...]:
        """Layers with what each costs; see `layers_of`."""

    def hugging_face(self) -> dict[str, object]:
        """The `config.json` that lies beside exported weights."""
        left_out = {"family", *self.of_training}
        return {"model_type": self.family} | self.model_dump(mode="json", exclude=left_out)

    def check_config(self, config: Mapping[str, object]) -> None:
        """Refuses weights that their `config.json` says are of another model.

        Raises:
            UserError: the first difference that would change what the weights compute.
        """
        refuse_difference(self.hugging_face(), config)

    def begun(self, config: Mapping[str, object]) -> Self:
        """Model like this one, with what it leaves open taken from the `config.json` of what it begins from.

        Raises:
            UserError: the weights are of another model.
        """
        self.check_config(config)
        return self


class AnyClassifier(AnyModel):
    """A model that tells which of some classes a sample is of."""

    of_training: ClassVar[frozenset[str]] = frozenset({"label_smoothing"})

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each label that training spreads evenly over all classes; evaluations, and choices of samples, go by
    plain labels. Raise it, to 0.1, if the model is surer than it is right."""

    @property
    def vocab_size(self) -> None:
        return None

    @property
    def smoothing(self) -> float:
        return self.label_smoothing

    def sample_tokens(self, sequence_tokens: int) -> int:
        """A sample counts as one token."""
        return 1


def refuse_difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> None:
    """
    Raises:
        UserError: the first key of `ours` for which `theirs` has another value.
    """
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise UserError(f"model.{key}", value, f"the weights to start from have {shown(theirs.get(key))}")


@lru_cache(maxsize=64)
def layers_of(model: AnyModel, *, sequence_tokens: int, precision: Precision) -> tuple[LayerSpec, ...]:
    """The layer list of `model`, made once: what takes raw samples first, then the blocks, the head and its loss last.

    Args:
        model: what the job asks for.
        sequence_tokens: length of a sample; without meaning for images.
        precision: decides how many bytes an activation takes.

    Raises:
        UserError: the model's sizes do not fit together, or a sample is longer than the model's positions.
    """
    return model.layers(sequence_tokens=sequence_tokens, precision=precision)


def stage_cost(layers: Sequence[LayerSpec], stage: StageSpec) -> StageCost:
    """Cost of `stage` of `layers` per sample; a matrix tied within the stage is held, and counted, once."""
    held = layers[stage.first : stage.stop]
    num_twice = sum(x.num_tied_parameters for x in held) if stage.first == 0 else 0
    return StageCost(
        num_parameters=sum(x.num_parameters for x in held) - num_twice,
        forward_flops=sum(x.forward_flops for x in held),
        backward_flops=sum(x.backward_flops for x in held),
        activation_bytes=sum(x.activation_bytes for x in held),
        output_bytes=held[-1].output_bytes,
    )


def pending_bytes(
    model: AnyModel, stage: StageSpec, *, num_samples: int, sequence_tokens: int, precision: Precision
) -> int:
    """Bytes that `stage` puts aside of a microbatch, from input op to weight op; 0 where backward is whole."""
    if not model.has_split_backward:
        return 0
    held = layers_of(model, sequence_tokens=sequence_tokens, precision=precision)[stage.first : stage.stop]
    return sum(num_samples * x.pending_bytes + x.num_early_gradients * precision.word_bytes for x in held)


def tied_names(model: AnyModel) -> frozenset[str]:
    """Names of the tensors that two layers share; a cut between them leaves two copies, on two workers."""
    return frozenset(name for sizes in tied_sizes(model) for name in sizes)


def names_before(model: AnyModel, stage: StageSpec) -> frozenset[str]:
    """Names of the tied tensors that a layer before `stage` has: the first that has one saves it."""
    return frozenset(name for sizes in tied_sizes(model)[: stage.first] for name in sizes)


@lru_cache(maxsize=64)
def tied_sizes(model: AnyModel) -> tuple[Mapping[str, int], ...]:
    """Numbers in those tensors of each layer that another layer has too, by name."""
    layers = model.layer_parameters()
    num_holders = Counter(name for layer in layers for name in layer)
    return tuple(
        {name: math.prod(shape) for name, shape in layer.items() if num_holders[name] > 1} for layer in layers
    )


# --- for families ---


def num_elements(tensors: Shapes) -> int:
    """Numbers in all tensors of a layer."""
    return sum(math.prod(shape) for shape in tensors.values())
