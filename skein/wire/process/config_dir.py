"""Place of a user's own identity."""

import os
from pathlib import Path

IDENTITY_VARIABLE = "SKEIN_IDENTITY"


def default_identity_file() -> Path:
    """The file that SKEIN_IDENTITY names, or identity.json below XDG_CONFIG_HOME or what stands for it."""
    if named := os.environ.get(IDENTITY_VARIABLE):
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "skein" / "identity.json"
