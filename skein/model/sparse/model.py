"""Decoders with experts, whatever differs between families."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Self

from pydantic import model_validator

from skein.errors import UserError
from skein.model.decoder import DecoderModel, decoder_shape
from skein.model.sparse.choices import Choices
from skein.model.sparse.experts import ExpertPlacement, Experts
from skein.model.sparse.routing import RoutingSpec


class SparseModel(DecoderModel):
    """A language model whose blocks have experts: `routing` says how each token is sent to some of them."""

    has_experts: ClassVar[bool] = True
    divided: ClassVar[tuple[str, ...]] = ("num_attention_heads", "num_key_value_heads")

    routing: RoutingSpec = RoutingSpec()
    placement: ExpertPlacement = ExpertPlacement.STAGE
    """Experts of workers with several devices: `mesh` has them, and the tokens of a microbatch, in parts over the
    devices, and attention by heads; `stage` computes all of a block on one. Give `mesh` where experts are large."""

    @model_validator(mode="after")
    def _check_begins_alike(self) -> Self:
        if self.init_from is not None:
            self._check_known_outside("routing")
        self._check_second("routing")
        return self

    def begun(self, config: Mapping[str, object]) -> Self:
        made = super().begun(config)
        made._check_known_outside("model.routing")
        made._check_second("model.routing")
        return made

    def hugging_face(self) -> dict[str, object]:
        self._check_known_outside("model.routing")
        return super().hugging_face()

    def _check_known_outside(self, field: str) -> None:
        """
        Raises:
            UserError: transformers routes otherwise; `field` names the routing.
        """
        router, noise = self.routing.router, self.routing.noise
        if noise is not None:
            hint = "transformers has no noise on scores, so neither init_from nor exports have: leave it out for them"
            raise UserError(f"{field}.noise", noise, hint)
        is_known = router.row.is_exportable
        if is_known and router.row.always_divides and (self.shape is not None or self.preset is not None):
            is_known = self.experts.is_normalised
        if not is_known:
            hint = "transformers has no such router, so neither init_from nor exports have: give softmax_topk for them"
            raise UserError(f"{field}.router", router.value, hint)

    def _check_second(self, field: str) -> None:
        """
        Raises:
            UserError: a second expert shall be drawn, and tokens have not two; `field` names the routing.
        """
        if not self.routing.random_second or (self.shape is None and self.preset is None):
            return  # Sizes come with the weights that it begins from.
        if (num_chosen := self.experts.num_chosen) != 2:
            hint = f"it is the second of two, and num_experts_per_tok is {num_chosen}: give 2 of these, or leave it out"
            raise UserError(f"{field}.random_second", True, hint)

    @property
    def experts(self) -> Experts:
        experts = decoder_shape(self).experts
        assert experts is not None, "a sparse family without experts"
        return replace(experts, routing=self.routing)

    @property
    def tensor_divisor(self) -> int:
        if self.shape is None and self.preset is None:
            return 0
        if not self.is_spread:
            return 1
        num_heads = decoder_shape(self).num_key_value_heads
        most = min(num_heads, self.experts.num_experts)
        return max(size for size in range(1, most + 1) if num_heads % size == 0)

    @property
    def divided_words(self) -> str:
        if not self.is_spread:
            return ""
        return f"{super().divided_words}, with one of {self.num_experts} experts for each device at least,"

    @property
    def grid_sizes(self) -> Mapping[str, int]:
        return {}

    @property
    def is_spread(self) -> bool:
        return self.placement is ExpertPlacement.MESH

    @property
    def num_experts(self) -> int:
        return self.experts.num_experts

    def choices_of(self, num_tokens: int) -> Choices | None:
        return self.experts.choices_of(num_tokens)

    def check_microbatch(self, num_samples: int, sequence_tokens: int) -> None:
        if self.shape is None and self.preset is None and self.init_from is not None:
            return  # Sizes come with the weights that it begins from.
        num_tokens, capacity = num_samples * sequence_tokens, self.routing.capacity
        share = self.experts.even_choices(num_tokens)
        if capacity is not None and share < 1:
            least = math.ceil(1000 * capacity / share) / 1000
            hint = (
                f"experts would take {share:.2g} choices of a microbatch of {num_tokens} tokens, less than one: "
                f"give at least {least:g}"
            )
            raise UserError("model.routing.capacity", capacity, hint)
