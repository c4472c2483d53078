"""Decoders with experts, whatever differs between families."""

from dataclasses import replace
from typing import ClassVar

from skein.model.decoder import DecoderModel, decoder_shape
from skein.model.experts import Experts
from skein.model.routing import RoutingSpec


class SparseModel(DecoderModel):
    """A language model whose blocks have experts: `routing` says how each token is sent to some of them."""

    has_experts: ClassVar[bool] = True

    routing: RoutingSpec = RoutingSpec()

    @property
    def experts(self) -> Experts:
        experts = decoder_shape(self).experts
        assert experts is not None, "a sparse family without experts"
        return replace(experts, routing=self.routing)
