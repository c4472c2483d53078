"""Text and signals that are given to a command. Imports nothing heavy."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from skein.errors import UserError

STANDARD_INPUT = (Path("-"), Path("/dev/stdin"))


def read_text(field: str, path: Path, *, hint: str) -> str:
    """Text of a file, or of standard input.

    Raises:
        UserError: it cannot be read; names `field`, and says what to give instead.
    """
    is_input = path in STANDARD_INPUT
    try:
        with open(sys.stdin.fileno() if is_input else path, encoding="utf-8", closefd=not is_input) as file:
            return file.read()
    except OSError as error:
        raise UserError(field, str(path), f"{error.strerror}; {hint}") from error
    except UnicodeDecodeError as error:
        raise UserError(field, str(path), f"byte {error.start} is not UTF-8; save it as UTF-8") from error


@contextmanager
def ended_by(*numbers: signal.Signals) -> Iterator[None]:
    """These signals end what this process does as Ctrl-C would, so that what it started ends too."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)
