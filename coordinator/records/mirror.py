"""Mirror of a run log's end, kept beside it: so that a log which lost its end cannot pass for a whole one.

Beside it lies the key, too, that positions told to workers are signed with: in a file of its own and in the mirror, so
that one of them may be lost.

Rules of this file
- The mirror may be behind the log, never ahead of what is durable: it is written after appends, now and then.
- It is replaced whole, by a rename, so it is never half written. A mirror that cannot be read proves nothing.
"""

import json
import os
import secrets
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.records.logfile import FIELD, Tail, digest_before, sync_directory
from skein.errors import UserError
from skein.types import Epoch

MIRROR_FILE = "run.position"
KEY_FILE = "run.key"
KEY_BYTES = 32
ACCEPT = "--accept-lost-log"


class LogLost(UserError):
    """The log is not the one that was written here, or not all of it."""

    def __init__(self, path: Path, what: str) -> None:
        cure = f"restore the directory from a backup; or give {ACCEPT}, which goes on without what was lost"
        super().__init__(FIELD, str(path), f"{what}; {cure}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """End of a log as it is remembered, and the log's key; b"" in what a release before this one wrote."""

    tail: Tail
    key: bytes


def write_mirror(directory: Path, mirror: Mirror) -> None:
    """Remember that the log of `directory` ends at the tail of `mirror` or later.

    Raises:
        OSError: the disk takes nothing; the mirror is as it was.
    """
    tail, key = mirror.tail, mirror.key.hex()
    position = {"entry": tail.entry, "epoch": tail.epoch, "digest": (tail.digest or b"").hex(), "key": key}
    replace_file(directory / MIRROR_FILE, json.dumps(position) + "\n")


def take_key(directory: Path, mirror: Mirror | None) -> tuple[bytes, bool]:
    """The key of the log in `directory`, from then on in its file; a new one if none is left, and whether it is.

    Raises:
        UserError: its file cannot be read.
        OSError: the disk takes nothing.
    """
    path = directory / KEY_FILE
    try:
        kept = _key_of(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        kept = b""
    except OSError as error:
        raise UserError(FIELD, str(path), f"{error.strerror}; let the coordinator read it") from error
    if kept:
        return kept, False
    mirrored = b"" if mirror is None else mirror.key
    key = mirrored or secrets.token_bytes(KEY_BYTES)
    replace_file(path, f"{key.hex()}\n")
    return key, not mirrored


def _key_of(text: str) -> bytes:
    """The key that a file has; b"" if it is damaged, which is as if it were lost."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        return b""
    return key if len(key) == KEY_BYTES else b""


def replace_file(path: Path, text: str) -> None:
    """Replace a file whole and durably, readable by its owner alone.

    Raises:
        OSError: the disk takes nothing; the file is as it was.
    """
    new = path.with_name(f".{path.name}-{os.getpid()}")
    with open(new, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_directory(path.parent)


def clear_unfinished(directory: Path) -> None:
    """Remove what owners left that were killed while they wrote."""
    for name in (MIRROR_FILE, KEY_FILE):
        for left in directory.glob(f".{name}-*"):
            with suppress(OSError):
                left.unlink()


def read_mirror(directory: Path) -> Mirror | None:
    """Mirror of the log of `directory`; None where nothing is remembered.

    Raises:
        ValueError: it is damaged.
    """
    try:
        found = json.loads((directory / MIRROR_FILE).read_text())
    except FileNotFoundError:
        return None
    match found:
        case {"entry": int(entry), "epoch": int(epoch), "digest": str(digest)}:
            tail = Tail(entry=entry, epoch=Epoch(epoch), digest=bytes.fromhex(digest) or None)
            return Mirror(tail=tail, key=_key_of(str(found.get("key", ""))))
        case _:
            raise ValueError("it has other fields")


def what_is_lost(connection: sqlite3.Connection, log: Tail, mirror: Tail) -> str | None:
    """Loss of a log that ends at `log`, in words; None for a log that has all the mirror knows."""
    if log.entry < mirror.entry:
        ends = f"the log ends at entry {log.entry} of epoch {log.epoch}" if log.entry else "the log is empty"
        return f"{ends}, but {MIRROR_FILE} beside it knows entry {mirror.entry} of epoch {mirror.epoch}"
    if mirror.digest is not None and digest_before(connection, mirror.entry + 1) != mirror.digest:
        return (
            f"entry {mirror.entry} is not the one that {MIRROR_FILE} beside the log knows: it is another log"
        )
    return None
