"""Choices of routers, as they travel: small integers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Form of what a layer's router has chosen: experts of each token, or tokens of each expert."""

    shape: tuple[int, int]
    most: int
    """The largest number that may be among them."""

    @property
    def is_narrow(self) -> bool:
        """Whether a byte holds each."""
        return self.most < 256
