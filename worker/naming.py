"""A worker's name on this machine: one process has it, and its successor proves that it is the same worker.

Rules of this file
- The proof is a secret in a file that only its owner can read. The file is locked while the process lives, so that a
  second process of that name ends, and not the first one; the kernel gives the lock back whatever a process dies of.
- The file is that of one machine and one coordinator: machines may share a home, and coordinators know nothing of each
  other's workers.
"""

import fcntl
import hashlib
import os
import re
import secrets
import socket
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
    place = hashlib.sha256(f"{socket.gethostname()} {join}".encode()).hexdigest()[:12]
    path = state_dir / "workers" / f"{name}-{place}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        return _without_proof(path, error)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 64, 0).decode(errors="replace").partition("\n")[2].strip() or "unknown"
        os.close(lock)
        hint = f"process {holder} on this machine is that worker; end it first, or give another name"
        raise UserError("name", name, hint) from error
    try:
        return TakenName(_secret_in(lock), lock=lock, warning=None)
    except OSError as error:
        os.close(lock)
        return _without_proof(path, error)


def _secret_in(lock: int) -> str:
    """The secret in the locked file; a new one in a new file. The second line names the process, for people."""
    os.fchmod(lock, 0o600)
    found = os.pread(lock, 32, 0).decode(errors="replace")
    secret = found if _SECRET.fullmatch(found) else secrets.token_hex(16)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{secret}\n{os.getpid()}\n".encode(), 0)
    os.fsync(lock)
    return secret


def _without_proof(path: Path, error: OSError) -> TakenName:
    why = (
        f"{path}: {error.strerror}: started again, this worker waits until its name is free; give --state-dir"
    )
    return TakenName("", lock=None, warning=why)
