"""Experts of a sparse decoder: feed-forwards side by side in a block, a few of which each token goes through.

Figures are those of `skein.model.decoder`: parameters of all experts, arithmetic and memory of the chosen ones.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from skein.errors import UserError
from skein.model.sparse.routing import RoutingSpec
from skein.types import Precision

INDEX_BYTES = 8
"""Places and numbers of experts are int64."""


class ExpertPlacement(StrEnum):
    """Devices of a worker that a block's experts are on: one, or all of a mesh, in parts."""

    STAGE = "stage"
    MESH = "mesh"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a block's experts in a family: the module that holds them, and the matrices of each."""

    module: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Experts of each block of a decoder."""

    num_experts: int
    num_chosen: int
    """Experts that each token goes through."""
    num_features: int
    """Hidden features of the decoder."""
    num_inner: int
    """Inner features of one expert."""
    is_normalised: bool
    """Whether the weights of a token's experts are divided by their sum."""
    names: ExpertNames
    routing: RoutingSpec = field(default_factory=RoutingSpec)

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Shapes of one expert's matrices, by name: outputs, inputs."""
        wide, narrow = (self.num_inner, self.num_features), (self.num_features, self.num_inner)
        return {self.names.gate: wide, self.names.up: wide, self.names.down: narrow}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a block's router and experts, by name within the block."""
        module = self.names.module
        router: dict[str, tuple[int, ...]] = {f"{module}.gate.weight": (self.num_experts, self.num_features)}
        return router | {
            f"{module}.experts.{expert}.{name}.weight": shape
            for expert in range(self.num_experts)
            for name, shape in self.matrices().items()
        }

    def even_choices(self, num_tokens: int) -> float:
        """Choices of so many tokens for each expert if all took as many, times the capacity if there is one."""
        return self.num_chosen * num_tokens / self.num_experts * (self.routing.capacity or 1.0)

    def most_choices(self, num_tokens: int) -> int | None:
        """Choices of a training microbatch of so many tokens that an expert takes at most; None: all of them."""
        return None if self.routing.capacity is None else math.ceil(self.even_choices(num_tokens))

    @property
    def num_resting_elements(self) -> int:
        """Elements of the matrices that a token is not multiplied by."""
        return (self.num_experts - self.num_chosen) * 3 * self.num_features * self.num_inner

    def activation_bytes(self, precision: Precision) -> int:
        """Per token: probabilities; each choice, its place and token, weight, input, inner features and result."""
        word, product = precision.word_bytes, precision.product_bytes
        routed = self.num_experts * word + self.num_chosen * (3 * INDEX_BYTES + word)
        if self.is_normalised:
            routed += (self.num_chosen + 1) * word
        return routed + self.num_chosen * (2 * self.num_features + 3 * self.num_inner) * product

    def pending_bytes(self, precision: Precision) -> int:
        """Per token: input and result's gradient of the router's product, and of those of each choice."""
        router = self.num_features + self.num_experts
        chosen = self.num_chosen * (2 * self.num_features + 3 * self.num_inner)
        return (router + chosen) * precision.product_bytes


def check_chosen(field: str, num_chosen: int, num_experts: int) -> None:
    """
    Raises:
        UserError: a token would have to go through more experts than there are; `field` says through how many.
    """
    if num_chosen > num_experts:
        raise UserError(field, num_chosen, f"there are {num_experts} experts: give at most so many")
