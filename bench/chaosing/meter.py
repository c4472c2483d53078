"""How much of the machine other programs took meanwhile: without that, two paces cannot be compared."""

import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil

_EVERY_S = 1.0


class Meter:
    """Counts while it is entered. What a process did in its last second is not known to be ours."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._count, name="meter", daemon=True)
        self._own_s_by_process: dict[int, float] = {}
        self._others_s = self._lasted_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def others_cores(self) -> float:
        """Cores that programs other than this one and those below it kept busy, on average."""
        return self._others_s / self._lasted_s if self._lasted_s else 0.0

    def _count(self) -> None:
        total_s, idle_s = _machine_s()
        _ = self._own_s()
        while not self._is_over.wait(_EVERY_S):
            before_s, before_idle_s = total_s, idle_s
            total_s, idle_s = _machine_s()
            busy_s = (total_s - before_s) - (idle_s - before_idle_s)
            self._others_s += max(0.0, busy_s - self._own_s())
            self._lasted_s += (total_s - before_s) / (psutil.cpu_count() or 1)

    def _own_s(self) -> float:
        """Processor seconds of our processes since the last time this was asked."""
        here, spent_s = psutil.Process(), 0.0
        for process in (here, *here.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                times = process.cpu_times()
                own_s = times.user + times.system
                spent_s += own_s - self._own_s_by_process.get(process.pid, 0.0)
                self._own_s_by_process[process.pid] = own_s
        return spent_s


def _machine_s() -> tuple[float, float]:
    """Processor seconds of all cores since they began, and the idle ones of them."""
    times = psutil.cpu_times()
    return sum(times), times.idle + times.iowait
