"""Where a run log ended, kept beside it: so that a log which lost its end cannot pass for a whole one.

Rules of this file
- The mirror may be behind the log, never ahead of what is durable: it is written after appends, now and then.
- It is replaced whole, by a rename, so it is never half written. A mirror that cannot be read proves nothing.
"""

import json
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from coordinator.logfile import FIELD, Tail, digest_before, sync_directory
from skein.errors import UserError
from skein.types import Epoch

MIRROR_FILE = "run.position"
ACCEPT = "--accept-lost-log"


class LogLost(UserError):
    """The log is not the one that was written here, or not all of it."""

    def __init__(self, path: Path, what: str) -> None:
        cure = f"restore the directory from a backup; or give {ACCEPT}, which goes on without what was lost"
        super().__init__(FIELD, str(path), f"{what}; {cure}")


def write_mirror(directory: Path, tail: Tail) -> None:
    """Remember that the log of `directory` ends at `tail` or later.

    Raises:
        OSError: the disk takes nothing; the mirror is as it was.
    """
    text = json.dumps({"entry": tail.entry, "epoch": tail.epoch, "digest": (tail.digest or b"").hex()})
    path = directory / MIRROR_FILE
    new = path.with_name(f".{MIRROR_FILE}-{os.getpid()}")
    with open(new, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_directory(directory)


def clear_unfinished(directory: Path) -> None:
    """Remove what owners left that were killed while they wrote."""
    for left in directory.glob(f".{MIRROR_FILE}-*"):
        with suppress(OSError):
            left.unlink()


def read_mirror(directory: Path) -> Tail | None:
    """What is remembered; None where nothing is.

    Raises:
        ValueError: it is damaged.
    """
    try:
        found = json.loads((directory / MIRROR_FILE).read_text())
    except FileNotFoundError:
        return None
    match found:
        case {"entry": int(entry), "epoch": int(epoch), "digest": str(digest)}:
            return Tail(entry=entry, epoch=Epoch(epoch), digest=bytes.fromhex(digest) or None)
        case _:
            raise ValueError("it has other fields")


def what_is_lost(connection: sqlite3.Connection, log: Tail, mirror: Tail) -> str | None:
    """What is missing of a log that ends at `log`, in words; None for a log that has all the mirror knows."""
    if log.entry < mirror.entry:
        ends = f"the log ends at entry {log.entry} of epoch {log.epoch}" if log.entry else "the log is empty"
        return f"{ends}, but {MIRROR_FILE} beside it knows entry {mirror.entry} of epoch {mirror.epoch}"
    if mirror.digest is not None and digest_before(connection, mirror.entry + 1) != mirror.digest:
        return (
            f"entry {mirror.entry} is not the one that {MIRROR_FILE} beside the log knows: it is another log"
        )
    return None
