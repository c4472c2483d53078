"""The torch thread: runs ops, and whatever else touches tensors, one after the other, off the event loop."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch

from skein.errors import UnfitError, UserError
from skein.protocol.worker.ops import Op, OpFailed, TensorKey
from worker.compute.operands import OperandError
from worker.compute.ops import Compute, Done
from worker.compute.payload import Payload
from worker.mesh.processes import MeshLostError

_log = logging.getLogger(__name__)
_MAX_REASON = 300

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """An op is over; it took so long."""

    op: Op
    done: Done
    seconds: float


def waited_s(thread: int, processes: Path = Path("/proc")) -> float:
    """Seconds that a thread of this process was ready to run and others had the processors; 0 where nobody counts them.

    Source: Linux, Documentation/scheduler/sched-stats.rst: the second number is time spent waiting on a run queue.
    """
    try:
        text = (processes / "self" / "task" / str(thread) / "schedstat").read_text()
        return int(text.split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Executor:
    """Daemon thread that owns `compute`, and a queue to it. It outlives any op that raises.

    Args:
        compute: runs ops.
        waited_s: seconds that a thread has waited for a processor so far.
    """

    def __init__(self, compute: Compute, waited_s: Callable[[int], float] = waited_s) -> None:
        self.compute = compute
        self._waited_s = waited_s
        self._waited_before_s: float | None = None
        """Seconds that the thread had waited for a processor when the running op began; None if none runs."""
        self._waited_last_s = 0.0
        """Seconds of the op that has ended, until the next one is asked for."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="torch", daemon=True)

    def start(self) -> None:
        """Begin to work on what was and will be asked."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End after what is queued; an op that takes longer than `timeout_s` is left to die with the process."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    @property
    def waited_s(self) -> float:
        """Seconds of the op in which others had the processors; after its end still, for who has not heard of that."""
        before_s, thread = self._waited_before_s, self._thread.native_id
        if before_s is None or thread is None:
            return self._waited_last_s
        return max(0.0, self._waited_s(thread) - before_s)

    def run(self, op: Op, operands: Mapping[TensorKey, Payload], on_ran: Callable[[Ran], None]) -> None:
        """Queue an op. `on_ran` is called on the torch thread; an exception becomes the outcome `OpFailed`.

        Where a device is lost it is not called: nothing of such an op may count, and the whole worker ends.
        """
        self._waited_last_s = 0.0
        self._jobs.put(lambda: self._tell(op, operands, on_ran))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue anything else that touches what is held."""
        future: Future[T] = Future()
        self._jobs.put(lambda: _fulfil(future, function))
        return future

    def tell(self, function: Callable[[], None]) -> None:
        """Queue what nobody waits for; what goes wrong with it is logged."""
        self.call(function).add_done_callback(_heed)

    def _serve(self) -> None:
        # OpenMP keeps the number of threads per calling thread.
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdecimal() and int(threads):
            torch.set_num_threads(int(threads))
        while (job := self._jobs.get()) is not None:
            job()
            del job  # or its operands live until the next one comes

    def _tell(self, op: Op, operands: Mapping[TensorKey, Payload], on_ran: Callable[[Ran], None]) -> None:
        try:
            ran = self._timed(op, operands)
        except MeshLostError as error:
            _log.error("op=%s: no outcome: %s", type(op).__name__, error)
        else:
            on_ran(ran)

    def _timed(self, op: Op, operands: Mapping[TensorKey, Payload]) -> Ran:
        began = time.perf_counter()
        thread = threading.get_native_id()
        self._waited_before_s = before_s = self._waited_s(thread)
        done = self._run(op, operands)
        self._waited_last_s = max(0.0, self._waited_s(thread) - before_s)
        self._waited_before_s = None
        return Ran(op=op, done=done, seconds=time.perf_counter() - began)

    def _run(self, op: Op, operands: Mapping[TensorKey, Payload]) -> Done:
        try:
            done = self.compute.run(op, operands)
            # On a GPU an op has ended when the device has done it, not when it was asked to.
            self.compute.synchronize()
            return done
        except UserError as error:
            is_unfit = isinstance(error, UnfitError)
            outcome = OpFailed(is_fatal=not is_unfit, reason=one_line(error), is_unfit=is_unfit)
            return Done(outcome=outcome)
        except OperandError as error:
            _log.error("op=%s: worker=%s sent %s", type(op).__name__, error.sender, error)
            return Done(outcome=OpFailed(is_fatal=False, reason=one_line(error), blamed=error.sender))
        except MeshLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the outermost loop of this thread: reports, and works on
            _log.error("op=%s failed", type(op).__name__, exc_info=True)
            return Done(outcome=OpFailed(is_fatal=False, reason=one_line(error)))


def _fulfil(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - whoever asked gets it
        future.set_exception(error)


def _heed(future: Future[None]) -> None:
    if (error := future.exception()) is not None:
        _log.error("what nobody waits for failed", exc_info=error)


def one_line(error: BaseException) -> str:
    """An error in one line of bounded length, its kind first unless it explains itself.

    >>> one_line(RuntimeError("out of memory\\nTried to allocate")), one_line(UserError("a", 1, "give 2"))
    ('RuntimeError: out of memory Tried to allocate', 'a: 1: give 2')
    """
    text = " ".join(str(error).split())
    if not isinstance(error, UserError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"
