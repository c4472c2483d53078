"""Checks of contributions: how often a worker's part of a step is computed again by others."""

from typing import Annotated

from pydantic import Field

from skein.spec import Spec


class ChecksSpec(Spec):
    """Checks by which a worker that sends wrong gradients or activations is found and gets no more work."""

    fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the steps that are computed again without one worker, drawn by chance; 0: none, and no gate either.
    Raise it where workers are not yours: of n workers a liar is found within s steps with a probability of at
    least 1 - (1 - fraction / n)^s, and each check takes the time of two more steps."""
