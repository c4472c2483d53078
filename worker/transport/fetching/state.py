"""A chunk's state as a stream of parts: made from tensors here, checked and put together there. No I/O."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import assert_never

from skein.errors import RemoteError
from skein.wire.extra import StateData, StateEnd, StatePart, StateTensor, StateTensorEnd, TensorMeta
from worker.bundle import Limits, WireTensor, allocate, fault_of
from worker.transport.parts import outgoing


def state_parts(tensors: Mapping[str, WireTensor], names: Iterable[str]) -> Iterator[StatePart]:
    """The parts of the tensors in `names`, in that order; nothing is copied before it is asked for."""
    count = 0
    for name in names:
        tensor = tensors[name]
        digest = hashlib.sha256()
        yield StateTensor(meta=tensor.meta, num_bytes=len(tensor.data))
        for part in outgoing((tensor,)):
            data = part.data()
            digest.update(data)
            yield StateData(data=data)
        yield StateTensorEnd(sha256=digest.hexdigest())
        count += 1
    yield StateEnd(num_tensors=count)


class StateAssembly:
    """State, as far as one FetchState stream has brought it.

    `tensors` holds those that are complete and fit their hash, `spoilt` the names of those that do not.
    """

    def __init__(self, names: Iterable[str], limits: Limits) -> None:
        self.tensors: dict[str, WireTensor] = {}
        self.spoilt: set[str] = set()
        self.is_complete = False
        self._names = frozenset(names)
        self._limits = limits
        self._num_bytes = 0
        self._meta: TensorMeta | None = None
        self._buffer = memoryview(b"")
        self._filled = 0
        self._digest = hashlib.sha256()

    def take(self, part: StatePart) -> None:
        """Take the next part.

        Raises:
            RemoteError: the parts are not those of the tensors that were asked for, or too large.
        """
        if self.is_complete:
            raise RemoteError("sent more state after its end")
        match part:
            case StateTensor():
                self._began(part)
            case StateData():
                self._filled_by(part.data)
            case StateTensorEnd():
                self._ended(part)
            case StateEnd():
                self._completed(part)
            case _:
                assert_never(part)

    def _began(self, part: StateTensor) -> None:
        name = part.meta.name
        if self._meta is not None:
            raise RemoteError(f"began tensor {name} before {self._meta.name} had ended")
        if name in self.tensors or name in self.spoilt or (self._names and name not in self._names):
            raise RemoteError(f"sent tensor {name}, which was not asked for")
        if (fault := fault_of((part.meta,), part.num_bytes, self._limits)) is not None:
            raise RemoteError(f"announced tensor {name}: {fault.text}")
        self._num_bytes += part.num_bytes
        if self._num_bytes > self._limits.max_state_bytes:
            raise RemoteError(f"sent {self._num_bytes} bytes, the limit is {self._limits.max_state_bytes}")
        self._meta = part.meta
        self._buffer = allocate(part.num_bytes)
        self._filled = 0
        self._digest = hashlib.sha256()

    def _filled_by(self, data: bytes) -> None:
        end = self._filled + len(data)
        if self._meta is None or not data or end > len(self._buffer):
            raise RemoteError(f"sent {len(data)} bytes of state that belong nowhere")
        self._buffer[self._filled : end] = data
        self._filled = end
        self._digest.update(data)

    def _ended(self, part: StateTensorEnd) -> None:
        meta, self._meta = self._meta, None
        if meta is None or self._filled != len(self._buffer):
            raise RemoteError(f"ended a tensor after {self._filled} of {len(self._buffer)} bytes")
        if self._digest.hexdigest() != part.sha256:
            self.spoilt.add(meta.name)
            return
        self.tensors[meta.name] = WireTensor(
            name=meta.name, dtype=meta.dtype, shape=meta.shape, data=self._buffer
        )

    def _completed(self, part: StateEnd) -> None:
        received = len(self.tensors) + len(self.spoilt)
        is_short = self._names and received != len(self._names)
        if self._meta is not None or part.num_tensors != received or is_short:
            raise RemoteError(f"ended the state after {received} tensors, {part.num_tensors} were announced")
        self.is_complete = True
