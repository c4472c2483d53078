"""Makes the shared token, once: `make_token.py FILE`. A token that is there already stays."""

import os
import secrets
import sys
from pathlib import Path


def make_token(path: Path) -> bool:
    """True if `path` now holds a new token that only its owner can read; False if there was one.

    Raises:
        OSError: the folder cannot be written.
    """
    if path.exists():
        return False
    # Under a name of its own first: whoever finds the token finds all of it.
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{secrets.token_hex(32)}\n")
        file.flush()
        os.fsync(descriptor)
    draft.rename(path)
    return True


if __name__ == "__main__":
    print("made a token" if make_token(Path(sys.argv[1])) else "the token is there already")
