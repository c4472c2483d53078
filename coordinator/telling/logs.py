"""The coordinator's own log: a file in the state directory, which the launcher shows as it grows."""

import logging
import os
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from skein.wire.process.logs import LogFormat, formatter

LOG_FILE = "coordinator.log"
"""Log file of a coordinator that was not started as a standby."""
_MAX_BYTES = 10 << 20
_NUM_OLDER = 3
_POLL_S = 0.1


def begin_coordinator_log(path: Path, log_format: LogFormat) -> None:
    """Sends what this process logs to the file at `path`."""
    file = RotatingFileHandler(path, maxBytes=_MAX_BYTES, backupCount=_NUM_OLDER)
    file.setFormatter(formatter(log_format))
    for name in ("coordinator", "skein", "grpc", "asyncio"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [file]


class LogFollower:
    """Shows what is added to the log file from now on, until `close`; the file may be replaced meanwhile."""

    def __init__(self, path: Path, out: TextIO) -> None:
        self._path = path
        self._out = out
        self._position = self._path.stat().st_size if self._path.exists() else 0
        self._inode = self._path.stat().st_ino if self._path.exists() else 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log-follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show the rest and end."""
        self._closing.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._closing.wait(_POLL_S):
            self._show()
        self._show()

    def _show(self) -> None:
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._position = inode, 0
                file.seek(self._position)
                added = file.read()
        except FileNotFoundError:
            return
        self._position += len(added)
        if added:
            self._out.write(added.decode(errors="replace"))
            self._out.flush()
