"""What both machines hear of time."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The deadline may have come."""
