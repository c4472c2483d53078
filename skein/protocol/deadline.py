"""Event that tells both machines of time."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The deadline may have come.

    `heard_until` is a time up to which all reports that had reached this process were handled; None: up to now. A
    driver that is busy hears late, and no worker is silent for that.
    """

    heard_until: float | None = None
