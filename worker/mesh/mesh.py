"""A mesh: several devices of one worker that compute each op together, as the worker sees them.

Rules of this file
- Asked on torch's thread alone. All devices are asked, then all answers are awaited: one that waits for another's sum
  is never waited for first.
- An op that does not end within what such ops take ends the mesh, and so does any end of a process.
"""

import itertools
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from skein.config.mesh.tensor import MeshForm
from skein.plan.clock.holding import StageForm
from skein.plan.mesh.profile import mesh_profile
from skein.plan.pieces.collectives import CollectiveTimes
from skein.plan.pieces.lanes import Pieces
from skein.protocol.worker.mesh.losing import HUNG
from skein.protocol.worker.mesh.patience import LEAST_PATIENCE_S, DevicePatience
from skein.topology.fleet import Profile
from worker.mesh.frames import (
    AddUpAsk,
    Asked,
    DeviceAnswer,
    DeviceSpeed,
    DropAsk,
    GroupAsk,
    LeftS,
    LinkClosedError,
    LoadAsk,
    ReturnAsk,
    SpeedAsk,
    SumsAsk,
    VisitAsk,
)
from worker.mesh.processes import DeviceProcesses
from worker.mesh.traffic import CollectiveCount
from worker.probe import measure_device

_NEWS_S = 10.0
"""Within which all processes end once one is no good."""
_LEAST_SHARE = 0.1
"""Least share of the time since devices were asked in which they count as having had the processors."""
_CPU = torch.device("cpu")
_DROPPING = ("drop",)
"""Takes no time, from the first."""

Answers = Sequence[tuple[DeviceAnswer, Mapping[str, Tensor]]]


@dataclass(slots=True, kw_only=True)
class _Owed:
    """Since when devices owe answers, which of them is waited for, and seconds that each had waited for processors."""

    began_s: float
    before_s: tuple[float, ...]
    device: int = 0


class Mesh:
    """Device processes, the group that they sum in, and how long they take.

    Args:
        devices: of each process.
        least_patience_s: an op that was timed before is waited for at least so long.
        clock: seconds.
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        least_patience_s: float = LEAST_PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.processes = DeviceProcesses(devices)
        self.traffic = CollectiveCount()
        """Collectives over all devices so far, as the first one tells."""
        self.device_bytes = sys.maxsize
        """Memory of each device, as it was before there was anything on it; of processors, its share of the host's."""
        self.times = CollectiveTimes()
        """Seconds of collectives so far, predicted and measured."""
        self.forms: dict[int, StageForm] = {}
        """Forms of chunks that are there, by number."""
        self.pieces: Pieces | None = None
        """Pieces in which tokens go to experts on other devices; None: chosen by measured times."""
        self._patience = DevicePatience(least_s=least_patience_s)
        self._patience.took(_DROPPING, 0.0)
        self._clock = clock
        self._formed = MeshForm(size=1)
        self._epochs = itertools.count(1)
        self._numbers = itertools.count(1)
        self._owed: _Owed | None = None
        """Question that the devices have not answered yet; None: there is none."""
        self._tickets: deque[int] = deque()
        self._sums: deque[int] = deque()
        self._chunks: deque[int] = deque()

    @property
    def devices(self) -> tuple[str, ...]:
        """All that there are."""
        return self.processes.devices

    def close(self) -> None:
        """End the processes."""
        self.processes.close()

    def new_number(self) -> int:
        """A number for a chunk, or a ticket, that was never given before."""
        return next(self._numbers)

    def bound_memory(self, memory_bytes: int) -> None:
        """Let stages count on no more of each device than plans do, which know of so much together."""
        self.device_bytes = min(self.device_bytes, memory_bytes // len(self.devices))

    # --- whatever is not needed any more; by whichever thread finds that ---

    def drop_ticket(self, ticket: int) -> None:
        """Note that nobody will come back with this one."""
        self._tickets.append(ticket)

    def drop_sums(self, chunk: int) -> None:
        """Note that the sums of a chunk are void."""
        self._sums.append(chunk)

    def drop_chunk(self, chunk: int) -> None:
        """Note that nobody holds a chunk any more."""
        self.forms.pop(chunk, None)
        self._chunks.append(chunk)

    def ended_for_turned_away(self) -> bool:
        """Whether a device has owed an answer for long, when the worker is turned away: then that is why.

        The mesh ends then, and `processes.lost` tells of that device.
        """
        owed = self._owed
        if owed is None or not self._patience.is_hung(self._owed_s(owed)):
            return False
        self.processes.blame(owed.device, HUNG)
        return True

    # --- on torch's thread ---

    def form(self, form: MeshForm) -> None:
        """Let the first devices share what is built from now on in this form.

        Raises:
            MeshLostError: a device is lost.
        """
        formed = form.model_copy(update={"in_sequence": False})
        if formed == self._formed:
            return
        # Only its owner can look into it, and nobody needs it once all have met.
        folder = Path(tempfile.mkdtemp(prefix="skein-mesh-"))
        try:
            asked = GroupAsk(folder=str(folder), epoch=next(self._epochs), form=form)
            self._exchange([(asked, {})] * len(self.devices))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._formed = formed

    def ask(self, size: int, asked: Asked, tensors: Mapping[str, Tensor] | None = None) -> Answers:
        """Ask the first `size` devices the same; their answers, in order.

        Raises:
            MeshLostError: a device is lost.
        """
        return self.ask_each([(asked, tensors or {})] * size)

    def ask_each(self, asked: Sequence[tuple[Asked, Mapping[str, Tensor]]]) -> Answers:
        """Ask each of the first devices something of the same kind; their answers, in order.

        Raises:
            MeshLostError: a device is lost.
        """
        if self._tickets or self._sums or self._chunks:
            dropped = DropAsk(
                tickets=_taken(self._tickets), sums=_taken(self._sums), chunks=_taken(self._chunks)
            )
            self._exchange([(dropped, {})] * len(self.devices))
        return self._exchange(asked)

    def measure(self, seconds: float = 0.5) -> Profile:
        """Profile of all devices at once, and of what the worker's own process needs beside them.

        Raises:
            MeshLostError: a device is lost.
        """
        answers = self._exchange([(SpeedAsk(seconds=seconds), {})] * len(self.devices))
        speeds = [answer.speed for answer, _ in answers if answer.speed is not None]
        host = measure_device(_CPU, seconds=0.01)
        is_host = self.devices[0] == "cpu"
        if self.device_bytes == sys.maxsize:
            self.device_bytes = min(x.memory_bytes for x in speeds) // (len(speeds) if is_host else 1)
        each = [_profile_of(device, speed) for device, speed in zip(self.devices, speeds, strict=True)]
        return mesh_profile(self.devices, each, host_bytes=host.memory_bytes)

    def _exchange(self, asked: Sequence[tuple[Asked, Mapping[str, Tensor]]]) -> Answers:
        kind = asked_kind(asked[0][0])
        num_bytes = sum(x.nbytes for _, tensors in asked for x in tensors.values())
        bound_s = self._patience.bound_s(kind, num_bytes=num_bytes)
        self._owed = owed = _Owed(began_s=self._clock(), before_s=self.processes.waited_s())
        try:
            answers = self._answers(asked, owed, lambda: max(0.0, bound_s - self._owed_s(owed)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the next answers would be those to this
            self._fail(owed.device, error)
        self.traffic.counts.update(answers[0][0].collectives)
        self.traffic.elements.update(answers[0][0].elements)
        self._patience.took(kind, self._owed_s(owed))
        self._owed = None
        return answers

    def _answers(
        self, asked: Sequence[tuple[Asked, Mapping[str, Tensor]]], owed: _Owed, left_s: LeftS
    ) -> Answers:
        links, answers = self.processes.links[: len(asked)], []
        for owed.device, (link, (message, tensors)) in enumerate(zip(links, asked, strict=True)):
            link.send(message, tensors, left_s)
        for owed.device, link in enumerate(links):
            answer, given = link.receive(_CPU, left_s)
            assert isinstance(answer, DeviceAnswer)
            answers.append((answer, given))
        return answers

    def _owed_s(self, owed: _Owed) -> float:
        """Seconds that an answer takes so far; those in which others had the processors are nobody's fault."""
        now_s = zip(self.processes.waited_s(), owed.before_s, strict=True)
        waiting_s = max(0.0, *(after_s - before_s for after_s, before_s in now_s))
        asked_s = self._clock() - owed.began_s
        # Waits of several threads are added up, which may be longer than all of it.
        return max(asked_s - waiting_s, _LEAST_SHARE * asked_s)

    def _fail(self, index: int, error: Exception) -> NoReturn:
        """
        Raises:
            MeshLostError: always, once all processes have ended.
        """
        match error:
            case TimeoutError():
                self.processes.blame(index, HUNG)
            case LinkClosedError():
                pass  # Whose process has ended is known in a moment.
            case _:
                self.processes.blame(index, f"was not understood: {type(error).__name__}: {error}")
        try:
            lost = self.processes.lost.result(_NEWS_S)
        except FutureTimeoutError:
            self.processes.blame(index, "closed its link")
            lost = self.processes.lost.result(_NEWS_S)
        raise lost from error


def _profile_of(device: str, speed: DeviceSpeed) -> Profile:
    return Profile(
        device=device,
        device_name=speed.name,
        flops_per_s=speed.flops_per_s,
        memory_bytes=speed.memory_bytes,
        spread=speed.spread,
    )


def asked_kind(asked: Asked) -> tuple[object, ...] | None:
    """Kind of ask that takes about equally long each time; None: how long it takes has nothing to do with the last.

    >>> asks = [ReturnAsk(chunk=chunk, ticket=ticket, puts_aside=False) for chunk, ticket in ((1, 7), (1, 8), (2, 9))]
    >>> [asked_kind(asked) for asked in asks]
    [('return', 1, False), ('return', 1, False), ('return', 2, False)]
    """
    match asked:
        case VisitAsk():
            return asked.kind, asked.chunk, asked.scores, asked.ticket is None, asked.pieces
        case LoadAsk() | SumsAsk() | AddUpAsk():
            return asked.kind, asked.chunk
        case ReturnAsk():
            return asked.kind, asked.chunk, asked.puts_aside
        case DropAsk():
            return _DROPPING
        case _:
            return None


def _taken(dropped: deque[int]) -> tuple[int, ...]:
    """All that is in it; it is empty then, but for what comes meanwhile."""
    return tuple(dropped.popleft() for _ in range(len(dropped)))
