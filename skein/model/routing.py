"""Routing of tokens to experts, as a job asks for it: settings that no Hugging Face configuration has."""

from typing import Annotated

from pydantic import Field

from skein.spec import Spec


class RoutingSpec(Spec):
    """Settings of every router of a sparse model."""

    balance_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Factor of each layer's balance loss in its gradient, per valid token; 0: it is only told. 0.01 is usual: raise
    this if few experts take most tokens, lower it if the loss suffers."""
