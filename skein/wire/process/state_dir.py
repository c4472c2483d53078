"""Default folder for what outlives a service's process."""

import os
from pathlib import Path


def default_state_dir(name: str = "skein") -> Path:
    """The folder `name` below XDG_STATE_HOME, or below the place that stands for it."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / name
