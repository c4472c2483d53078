"""Decoders with experts, whatever differs between families."""

import math
from dataclasses import replace
from typing import ClassVar

from skein.errors import UserError
from skein.model.decoder import DecoderModel, decoder_shape
from skein.model.sparse.experts import Experts
from skein.model.sparse.routing import RoutingSpec


class SparseModel(DecoderModel):
    """A language model whose blocks have experts: `routing` says how each token is sent to some of them."""

    has_experts: ClassVar[bool] = True

    routing: RoutingSpec = RoutingSpec()

    @property
    def experts(self) -> Experts:
        experts = decoder_shape(self).experts
        assert experts is not None, "a sparse family without experts"
        return replace(experts, routing=self.routing)

    def check_microbatch(self, num_samples: int, sequence_tokens: int) -> None:
        num_tokens, capacity = num_samples * sequence_tokens, self.routing.capacity
        share = self.experts.even_choices(num_tokens)
        if capacity is not None and share < 1:
            least = math.ceil(1000 * capacity / share) / 1000
            hint = f"experts would take {share:.2g} choices of a microbatch of {num_tokens} tokens: give {least:g}"
            raise UserError("model.routing.capacity", capacity, hint)
