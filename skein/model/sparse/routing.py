"""Routing of tokens to experts, as a job asks for it: settings that no Hugging Face configuration has."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from skein.spec import Spec


class DropOrder(StrEnum):
    """Order in which an expert takes those who chose it, until it is full.

    First all first choices by token, then all second ones; token by token; or by weight, the highest first.
    """

    CHOICE_MAJOR = "choice_major"
    TOKEN_MAJOR = "token_major"  # noqa: S105 - of tokens that are words
    PROBS = "probs"


class RoutingSpec(Spec):
    """Settings of every router of a sparse model."""

    balance_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Factor of each layer's balance loss in its gradient, per valid token; 0: it is only told. 0.01 is usual: raise
    this if few experts take most tokens, lower it if the loss suffers."""
    capacity: Annotated[float, Field(gt=0, le=1024)] | None = None
    """Choices that an expert takes of a training microbatch, over what it would take if all took as many; null: all of
    them. Give 1 to 2 where the busiest expert of a microbatch takes too much time or memory."""
    drop: DropOrder = DropOrder.CHOICE_MAJOR
    """Choices that go first where there is a `capacity`; what comes after is dropped, and adds nothing."""
