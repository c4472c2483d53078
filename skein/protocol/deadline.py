"""Event that tells both machines of time."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The deadline may have come."""
