"""A worker's name on this machine: one process has it, and its successor proves that it is the same worker.

Rules of this file
- The proof is a secret in a file that only its owner can read. It is that of one name on one machine, for machines may
  share a home; it is the same for all coordinators, for one may go on at another address.
- A lock is held while the process lives, so that a second process of that name ends, and not the first one. The kernel
  gives it back whatever a process dies of. It is that of one coordinator: they know nothing of each other's workers.
"""

import fcntl
import hashlib
import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from skein.errors import UserError
from skein.types import WorkerId

_SECRET = re.compile(r"[0-9a-f]{32}")


class TakenName:
    """The right to a name, until `close`.

    `secret`: what the next process of this name shows to take it at once. `warning`: why it cannot, in one line.
    """

    def __init__(self, secret: str, *, lock: int | None, warning: str | None) -> None:
        self.secret = secret
        self.warning = warning
        self._lock = lock

    def close(self) -> None:
        """Let another process have the name."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def take_name(state_dir: Path, name: WorkerId, join: str) -> TakenName:
    """The right to be worker `name` of the coordinator that is joined at `join`.

    Raises:
        UserError: another process on this machine is that worker.
    """
    host = socket.gethostname()
    secret_file = _file(state_dir, name, "secret", host)
    lock_file = _file(state_dir, name, "lock", host, join)
    try:
        secret_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret, lock = _secret_in(secret_file), _open(lock_file)
    except OSError as error:
        return _without_proof(secret_file, error)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        hint = f"process {holder} on this machine is that worker; end it first, or give another name"
        raise UserError("name", name, hint) from error
    # The lock counts; what it says is for people, and on a full disk nobody can say it.
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return TakenName(secret, lock=lock, warning=None)


def _file(state_dir: Path, name: WorkerId, kind: str, *places: str) -> Path:
    place = hashlib.sha256(" ".join(places).encode()).hexdigest()[:12]
    return state_dir / "workers" / f"{name}-{place}.{kind}"


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _secret_in(path: Path) -> str:
    """The secret in a file; a new one in a new file, or in one that is damaged."""
    file = _open(path)
    try:
        # Of two who find none one makes it.
        fcntl.flock(file, fcntl.LOCK_EX)
        os.fchmod(file, 0o600)
        found = os.pread(file, 64, 0).decode(errors="replace").strip()
        if _SECRET.fullmatch(found):
            return found
        secret = secrets.token_hex(16)
        os.ftruncate(file, 0)
        os.pwrite(file, f"{secret}\n".encode(), 0)
        os.fsync(file)
        return secret
    finally:
        os.close(file)


def _without_proof(path: Path, error: OSError) -> TakenName:
    why = (
        f"{path}: {error.strerror}: started again, this worker waits until its name is free; give --state-dir"
    )
    return TakenName("", lock=None, warning=why)
