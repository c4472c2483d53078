"""`python -m bench.recovering.worker ADDRESS NAME FOLDER`: a worker that can be told things by files in FOLDER.

NAME.orders tells it where to end, MODE what its boundary log keeps; what it writes to NAME.moments is when it came to
where. All of it is read and written in every mode alike, so that none is dearer than another.
"""

import sys
import time
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from bench.recovering.fate import Fate
from bench.stub import run_stub
from skein.protocol.worker.ops import HopKey
from skein.types import Step
from worker.boundary import MEMORY_BYTES, BoundaryLog
from worker.bundle import Bundle
from worker.process import WorkerSetting

MODE_FILE = "mode"
SPILLING_BYTES = 1 << 20
"""A few boundary tensors: what is being written has to fit in, too."""
WELCOMED, FETCHED = "after DirectiveArrived Welcome", "after PrefetchEnded followed"
CONTRIBUTED = frozenset({"after OpEnded Backward", "after OpEnded Loss"})
"""A share of the step is accumulated."""


class Mode(StrEnum):
    """What a boundary log keeps until its step commits: all in memory, all on disk but a few, or nothing."""

    MEMORY = "memory"
    DISK = "disk"
    NOTHING = "nothing"


class TurnedLog(BoundaryLog):
    """A boundary log that is another after each step, if the file says so.

    One that keeps nothing has a tensor until it is sent, as any worker must.
    """

    def __init__(self, mode: Path) -> None:
        super().__init__()
        self._mode_file = mode
        self._mode = Mode.MEMORY

    def get(self, key: HopKey) -> Bundle | None:
        """See `BoundaryLog`."""
        bundle = super().get(key)
        if self._mode is Mode.NOTHING:
            self._remove(key)
        return bundle

    def drop_steps(self, step: Step) -> None:
        """See `BoundaryLog`."""
        super().drop_steps(step)
        if self._mode_file.exists():
            self._mode = Mode(self._mode_file.read_text(encoding="utf-8"))
            self._memory_bytes = SPILLING_BYTES if self._mode is Mode.DISK else MEMORY_BYTES


class Diary:
    """Writes down when the worker came to moments that somebody asks about."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._last = ""

    def moment(self, name: str) -> None:
        """It has come; of many alike in a row the first counts."""
        is_known = name in (WELCOMED, FETCHED) or name in CONTRIBUTED
        if is_known and (name != self._last or name == FETCHED):
            self._file.write(f"{time.time()} {name}\n")
            self._last = name


def told(folder: Path, name: str, setting: WorkerSetting) -> WorkerSetting:
    """`setting` of a worker that is told things by files."""
    fate, diary = Fate(folder / f"{name}.orders"), Diary(folder / f"{name}.moments")

    def watch(moment: str) -> None:
        diary.moment(moment)
        fate.moment(moment)

    return replace(setting, watch=watch, boundary_log=partial(TurnedLog, folder / MODE_FILE))


def main() -> int:
    """Be that worker."""
    join, name, folder = sys.argv[1:]
    return run_stub(partial(told, Path(folder), name), join=join, name=name)


if __name__ == "__main__":
    sys.exit(main())
