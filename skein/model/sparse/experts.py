"""Experts of a sparse decoder: feed-forwards side by side in a block, a few of which each token goes through.

Figures are those of `skein.model.decoder`: parameters of all experts, arithmetic and memory of the chosen ones.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from skein.errors import UserError
from skein.model.sparse.choices import Choices
from skein.model.sparse.routing import RouterKind, RoutingSpec
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

    def router_matrices(self) -> dict[str, tuple[int, int]]:
        """Shapes of a block's router, by name below the experts' module: outputs, inputs."""
        return self.routing.router.row.matrices(self.routing, self.num_experts, self.num_features)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a block's router and experts, by name within the block."""
        module = self.names.module
        router: dict[str, tuple[int, ...]] = {
            f"{module}.{name}.weight": shape for name, shape in self.router_matrices().items()
        }
        return router | {
            f"{module}.experts.{expert}.{name}.weight": shape
            for expert in range(self.num_experts)
            for name, shape in self.matrices().items()
        }

    @property
    def num_scores(self) -> int:
        """Numbers that the router makes of each token."""
        return list(self.router_matrices().values())[-1][0]

    @property
    def num_slots(self) -> int:
        """Slots of all experts together, where they take mixtures."""
        return self.num_experts * self.routing.num_slots

    def even_choices(self, num_tokens: int) -> float:
        """Choices of so many tokens for each expert if all took as many, times the capacity if there is one."""
        return self.num_chosen * num_tokens / self.num_experts * (self.routing.capacity or 1.0)

    def most_choices(self, num_tokens: int) -> int | None:
        """Choices of a training microbatch of so many tokens that an expert takes at most; None: all of them."""
        return None if self.routing.capacity is None else math.ceil(self.even_choices(num_tokens))

    def best_tokens(self, num_tokens: int) -> int:
        """Tokens of a microbatch of so many that each expert takes, where experts choose."""
        return min(num_tokens, math.ceil(self.even_choices(num_tokens)))

    def choices_of(self, num_tokens: int) -> Choices | None:
        """Form of a layer's choices of so many tokens of a microbatch; None: its router makes none."""
        row = self.routing.router.row
        if self.mixes_tokens:
            return None
        if row.tokens_choose:
            # A second expert that chance leaves out is counted higher by as many as there are.
            num_values = self.num_experts * (2 if self.routing.random_second else 1)
            return Choices(shape=(num_tokens, self.num_chosen), most=num_values - 1)
        return Choices(shape=(self.num_experts, self.best_tokens(num_tokens)), most=num_tokens - 1)

    @property
    def divides_weights(self) -> bool:
        """Whether a token's weights are divided by their sum: only softmax_topk leaves that to the family."""
        return self.is_normalised and self.routing.router is RouterKind.SOFTMAX_TOPK

    # --- what it costs ---

    @property
    def num_resting_elements(self) -> int:
        """Elements of the matrices that a token is not multiplied by."""
        num_busy = 0 if self.mixes_tokens else self.num_chosen
        return (self.num_experts - num_busy) * 3 * self.num_features * self.num_inner

    def mixing_flops(self, num_tokens: int) -> int:
        """FLOPs of the slots of a sample of so many tokens: of mixing them, of experts, and of mixing the results.

        Costs are those of a sample, so slots count as if each sample had its own.
        """
        each = 3 * self.num_features * self.num_inner + 2 * num_tokens * self.num_features
        return 2 * each * self.num_slots if self.mixes_tokens else 0

    def mixing_bytes(self, precision: Precision) -> int:
        """Bytes of a sample's slots that are kept: input, inner features and result; likewise what is put aside."""
        return self.num_slots * self._row_elements * precision.product_bytes if self.mixes_tokens else 0

    def activation_bytes(self, precision: Precision) -> int:
        """Per token: all of the router's; of each choice the input, inner features and result."""
        num_rows = 0 if self.mixes_tokens else self.num_chosen
        return self._router_bytes(precision) + num_rows * self._row_elements * precision.product_bytes

    def spared_bytes(self, precision: Precision, size: int) -> int:
        """Per token: bytes of these that each of so many devices has less, where experts are in parts over them.

        About: as if as many rows came to each. It makes the product of inner features anew.
        """
        anew = self.num_chosen * self.num_inner * precision.product_bytes
        rows = self.num_chosen * self._row_elements * precision.product_bytes - anew
        places = 2 * INDEX_BYTES * self.num_chosen
        return anew + (rows + places) * (size - 1) // size

    def _router_bytes(self, precision: Precision) -> int:
        """Per token: chances or scores of all experts, and each choice, its place and token, and weight.

        A balance loss keeps chances beside scores. Where experts choose, any may be a token's, so it has a place at
        each. Mixtures have a weight of each slot there and back, in the dtype of products too. Tokens that are compared
        with experts are kept, and their length.
        """
        word, product, routing = precision.word_bytes, precision.product_bytes, self.routing
        row, chances = routing.router.row, self.num_experts * word
        if row.mixes_tokens:
            return 2 * self.num_slots * (word + (product if product != word else 0))
        if not row.tokens_choose:
            return chances + (self.num_experts + self.num_chosen) * INDEX_BYTES
        routed = chances + self.num_chosen * (3 * INDEX_BYTES + word)
        routed += chances if routing.balance_coefficient and not row.weighs_by_chances else 0
        routed += (self.num_chosen + 1) * word if self.divides_weights else 0
        # What was drawn, and all that the router makes.
        routed += (self.num_experts + self.num_scores) * word if self.routing.noise is not None else 0
        return routed + ((self._num_compared + 1) * word if self._num_compared else 0)

    def pending_bytes(self, precision: Precision) -> int:
        """Per token: input and result's gradient of the router's products, and of those of each choice."""
        product = precision.product_bytes
        (first, _), *others = self.router_matrices().values()
        router = (self.num_features + first) * product
        if others:
            router += (self._num_compared + self.num_experts) * precision.word_bytes
        num_rows = 0 if self.mixes_tokens else self.num_chosen
        return router + num_rows * self._row_elements * product

    @property
    def mixes_tokens(self) -> bool:
        """Whether experts take means of all tokens."""
        return self.routing.router.row.mixes_tokens

    @property
    def _num_compared(self) -> int:
        """Features in which tokens are compared with experts; 0: they are scored as they are."""
        (first, _), *others = self.router_matrices().values()
        return first if others else 0

    @property
    def _row_elements(self) -> int:
        """Elements of an expert's input, two inner features and their product, and result."""
        return 2 * self.num_features + 3 * self.num_inner


def check_chosen(field: str, num_chosen: int, num_experts: int) -> None:
    """
    Raises:
        UserError: a token would have to go through more experts than there are; `field` says through how many.
    """
    if num_chosen > num_experts:
        raise UserError(field, num_chosen, f"there are {num_experts} experts: give at most so many")
