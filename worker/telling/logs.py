"""The worker's own log: to standard error, and its last lines on their way up the control stream."""

import logging
import sys
import time
from collections import deque

from skein.wire.extra import LogLevel, LogLine
from skein.wire.process.logs import LogFormat, formatter

_MAX_LINES = 500
_MAX_LINES_AT_ONCE = 100
_MAX_CHARACTERS = 2000
_ROOTS = ("worker", "skein", "asyncio")
"""Loggers of ours, and the one on which a loop tells of what nobody caught."""


class LogTail(logging.Handler):
    """The newest lines that nobody has taken yet; what does not fit is counted."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[LogLine] = deque()
        self._num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())[:_MAX_CHARACTERS]
        if len(self._lines) >= _MAX_LINES:
            self._lines.popleft()
            self._num_lost += 1
        self._lines.append(LogLine(level=_level(record.levelno), wall_s=record.created, text=text))

    def take(self) -> tuple[LogLine, ...]:
        """Some of the lines, oldest first; called once per beat, it keeps a talkative worker from flooding others."""
        lines = [self._lines.popleft() for _ in range(min(len(self._lines), _MAX_LINES_AT_ONCE))]
        if self._num_lost:
            text = f"{self._num_lost} lines of this log were too many to send"
            lines.append(LogLine(level=LogLevel.WARNING, wall_s=time.time(), text=text))
            self._num_lost = 0
        return tuple(lines)


def _level(number: int) -> LogLevel:
    """Level at or below a number of at least INFO's."""
    if number >= logging.ERROR:
        return LogLevel.ERROR
    return LogLevel.WARNING if number >= logging.WARNING else LogLevel.INFO


def begin_worker_log(log_format: LogFormat) -> LogTail:
    """Sends this process's log to standard error; gives the tail that also gets it."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(formatter(log_format))
    tail = LogTail()
    for name in _ROOTS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [stream, tail]
    return tail
