"""Collectives that the devices of a mesh have carried out together, counted by kind."""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum


class Collective(StrEnum):
    """An operation of all devices on one tensor of each."""

    SUM = "sum"
    """All have the sum."""
    GATHER = "gather"
    """All have the parts of all."""
    SCATTER = "scatter"
    """Each has its part of the sum."""
    SPREAD = "spread"
    """All have the tensor of one."""
    REDUCE = "reduce"
    """The sum is with one of them; what others send counts as elements of theirs."""
    EXCHANGE = "exchange"
    """Each has rows from each."""
    GRADIENT = "gradient"
    """All have the sum, which was under way beside exchanges."""

    @property
    def is_waited_for(self) -> bool:
        """Whether devices do nothing else meanwhile."""
        return self not in (Collective.EXCHANGE, Collective.GRADIENT)


class CollectiveCount:
    """Number of collectives of one device, and of elements that came to it with them at least, by kind."""

    def __init__(self) -> None:
        self.counts: Counter[Collective] = Counter()
        self.elements: Counter[Collective] = Counter()
        self.waited_s = 0.0
        """Seconds that the device has waited for them; not for what it computes beside, as long as it does."""

    def count(self, kind: Collective, num_elements: int) -> None:
        """Add one."""
        self.counts[kind] += 1
        self.elements[kind] += num_elements

    def taken(self) -> tuple[Mapping[Collective, int], Mapping[Collective, int]]:
        """Both, since this was asked last."""
        found = dict(self.counts), dict(self.elements)
        self.counts.clear()
        self.elements.clear()
        return found
