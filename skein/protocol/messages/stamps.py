"""Epoch and generation that directives carry: a lower one is refused."""

from dataclasses import dataclass, replace
from typing import TypeVar

from skein.types import Epoch, Generation

NO_GENERATION = Generation(0)
"""Number that no generation has."""
_UNSENT = Epoch(0), NO_GENERATION


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDirective:
    """Directive of one coordinator. Its maker leaves the epoch out: `stamped` puts it in where it is sent."""

    epoch: Epoch = _UNSENT[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDirective(EpochDirective):
    """Directive within a generation, refused under any other."""

    generation: Generation = _UNSENT[1]


D = TypeVar("D")


def stamped(directive: D, *, epoch: Epoch, generation: Generation) -> D:
    """A directive as of this epoch and generation, as far as it is of any."""
    if isinstance(directive, GenerationDirective):
        return replace(directive, epoch=epoch, generation=generation)
    return replace(directive, epoch=epoch) if isinstance(directive, EpochDirective) else directive
