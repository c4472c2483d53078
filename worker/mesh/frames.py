"""Messages between a worker and its device processes: what is asked and answered, as JSON of known form, and tensors.

A frame is two lengths, a header, and the tensors' bytes one after the other. Both ends are of one release and one
machine; lengths are bounded all the same, and nothing that is read is ever run.
"""

import socket
import struct
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import torch
from pydantic import Discriminator, ValidationError
from torch import Tensor

from skein.config.mesh.tensor import MeshForm
from skein.errors import LocalError
from skein.plan.pieces.choice import TimedRows
from skein.plan.pieces.lanes import Pieces
from skein.spec import Spec
from skein.types import StageIndex, StageSpec
from skein.wire.extra import DType, TensorMeta
from worker.bundle import Limits, allocate, fault_of, split_tensors, to_torch, to_wire
from worker.mesh.traffic import Collective

_LENGTHS = struct.Struct("<IQ")
_MAX_HEADER_BYTES = 16 << 20
_LIMITS = Limits(max_bundle_bytes=1 << 40)
_LEAST_LEFT_S = 1e-3
"""Less is no time: clocks are no finer."""


class LinkClosedError(LocalError):
    """The other end of a link is closed."""


# --- what is asked ---


class SpeedAsk(Spec):
    """Measure the device's speed, on so many seconds' products."""

    kind: Literal["measure"] = "measure"
    seconds: float


class GroupAsk(Spec):
    """Form the groups in which so many devices share stages in this form; they meet in `folder`, under `epoch`."""

    kind: Literal["form"] = "form"
    folder: str
    epoch: int
    form: MeshForm


class StageAsk(Spec):
    """Make room for a stage of a job's model under the number `chunk`, shared in this form."""

    kind: Literal["build"] = "build"
    chunk: int
    job: str
    stage: tuple[int, int, int]
    """Index, first layer, layer after the last."""
    form: MeshForm

    @property
    def spec(self) -> StageSpec:
        """The stage."""
        index, first, stop = self.stage
        return StageSpec(index=StageIndex(index), first=first, stop=stop)


class LoadAsk(Spec):
    """Compute with these parameters from now on; their parts come along."""

    kind: Literal["load"] = "load"
    chunk: int


class VisitAsk(Spec):
    """Go through the stage, to its loss if `scores`, with the boundary that comes along.

    What the way back needs is kept under `ticket`; None: nothing is. `follows`: the input gets a gradient. `num_valid`:
    tokens of the microbatch that have a label, for experts; None: outside of training. `num_tokens`: of a sequence,
    without what pads it. `luck`: seed of what is drawn; None: nothing is. `pieces`: those in which rows go to
    experts, and their gradients on the way back.
    """

    kind: Literal["visit"] = "visit"
    chunk: int
    ticket: int | None
    follows: bool
    scores: bool
    num_valid: int | None
    num_tokens: int
    luck: int | None = None
    pieces: Pieces = Pieces()


class TimeRowsAsk(Spec):
    """Measure exchanges, and a layer of the stage's experts, on so many rows of each device."""

    kind: Literal["time_rows"] = "time_rows"
    chunk: int
    num_rows: tuple[int, ...]


class TimeSumsAsk(Spec):
    """Measure sums over the devices that share the stage, of so many elements."""

    kind: Literal["time_sums"] = "time_sums"
    chunk: int
    num_elements: tuple[int, ...]


class ReturnAsk(Spec):
    """Go back from the visit of this ticket, with the gradients that come along; or put those of weights aside."""

    kind: Literal["return"] = "return"
    chunk: int
    ticket: int
    puts_aside: bool


class AddUpAsk(Spec):
    """Add what was put aside under this ticket to the sums."""

    kind: Literal["add_up"] = "add_up"
    chunk: int
    ticket: int


class SumsAsk(Spec):
    """Hand the sums of gradients over, and begin at zero."""

    kind: Literal["give_sums"] = "give_sums"
    chunk: int


class DropAsk(Spec):
    """Drop what is kept under these tickets, the sums of `sums`, and all of these chunks."""

    kind: Literal["drop"] = "drop"
    tickets: tuple[int, ...]
    sums: tuple[int, ...]
    chunks: tuple[int, ...]


Asked = (
    SpeedAsk
    | GroupAsk
    | StageAsk
    | LoadAsk
    | VisitAsk
    | TimeRowsAsk
    | TimeSumsAsk
    | ReturnAsk
    | AddUpAsk
    | SumsAsk
    | DropAsk
)


# --- what is answered ---


class DeviceSpeed(Spec):
    """A device, as measured."""

    name: str
    flops_per_s: float
    memory_bytes: int
    spread: float


class Metered(Spec):
    """Layers of experts: how many, seconds from the first exchange of each to its last, and of these those that
    experts computed for; none where the host cannot tell."""

    num_layers: int = 0
    layers_s: float = 0.0
    experts_s: float = 0.0
    waited_s: float = 0.0
    """Seconds that the device has waited for collectives other than exchanges."""


class DeviceAnswer(Spec):
    """An ask is carried out; it took so many collectives over devices, and elements that came with them."""

    kind: Literal["answer"] = "answer"
    collectives: Mapping[Collective, int] = {}
    elements: Mapping[Collective, int] = {}
    metered: Metered = Metered()
    row_times: tuple[TimedRows, ...] = ()
    sum_times: tuple[float, ...] = ()
    num_tokens: int = 0
    """Valid labels of a visit that scores."""
    expert_counts: tuple[tuple[int, ...], ...] = ()
    """Choices of each expert of those layers."""
    num_choices: int = 0
    num_dropped: int = 0
    """Choices of all those layers that found their expert full."""
    speed: DeviceSpeed | None = None


class _Meta(Spec):
    name: str
    dtype: DType
    shape: tuple[int, ...]


class _Header(Spec):
    body: Annotated[Asked | DeviceAnswer, Discriminator("kind")]
    tensors: tuple[_Meta, ...]


Named = Mapping[str, Tensor]
LeftS = Callable[[], float]
"""Seconds for which the other end is waited for from now on; asked again once they are over, for there may be more."""


class DeviceLink:
    """End of the connection between a worker and a device process; it blocks. Not for two threads at once."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def close(self) -> None:
        """Close this end; whoever reads at the other finds that nothing more comes."""
        self._end.close()

    def send(self, body: Asked | DeviceAnswer, tensors: Named, left_s: LeftS | None = None) -> None:
        """Hand a message over, however long that takes without `left_s`.

        Raises:
            TimeoutError: no time is left, and nobody has taken it.
            LinkClosedError: nobody will.
        """
        bundle = [to_wire(name, tensor) for name, tensor in tensors.items()]
        metas = tuple(_Meta(name=x.name, dtype=x.dtype, shape=x.shape) for x in bundle)
        head = _Header(body=body, tensors=metas).model_dump_json().encode()
        num_bytes = sum(len(x.data) for x in bundle)
        self._wait(left_s)
        self._write(_LENGTHS.pack(len(head), num_bytes) + head, left_s)
        for wired in bundle:
            self._write(wired.data, left_s)

    def receive(
        self, device: torch.device, left_s: LeftS | None = None
    ) -> tuple[Asked | DeviceAnswer, dict[str, Tensor]]:
        """The next message, and its tensors on `device`; waited for as long as it takes without `left_s`.

        Raises:
            TimeoutError: no time is left, and none has begun, or gone on.
            LinkClosedError: none will come.
            LocalError: it is none that this release writes.
        """
        self._wait(left_s)
        lengths = self._read(_LENGTHS.size, left_s)
        num_head, num_bytes = _LENGTHS.unpack(lengths)
        if num_head > _MAX_HEADER_BYTES:
            raise LocalError(f"a header of {num_head} bytes")
        try:
            header = _Header.model_validate_json(bytes(self._read(num_head, left_s)))
        except ValidationError as error:
            raise LocalError(f"no message of a mesh: {error}") from error
        metas = [TensorMeta(name=x.name, dtype=x.dtype, shape=x.shape) for x in header.tensors]
        if (fault := fault_of(metas, num_bytes, _LIMITS)) is not None:
            raise LocalError(fault.text)
        bundle = split_tensors(metas, self._read(num_bytes, left_s))
        return header.body, {x.name: to_torch(x).to(device) for x in bundle}

    def _wait(self, left_s: LeftS | None) -> None:
        """
        Raises:
            TimeoutError: no time is left.
        """
        seconds = None if left_s is None else left_s()
        if seconds is not None and seconds < _LEAST_LEFT_S:
            raise TimeoutError
        self._end.settimeout(seconds)

    def _write(self, data: memoryview | bytes, left_s: LeftS | None) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._end.send(rest) :]
            except TimeoutError:
                self._wait(left_s)
            except OSError as error:
                raise LinkClosedError(f"the other end is gone: {error}") from error

    def _read(self, num_bytes: int, left_s: LeftS | None) -> memoryview:
        data = allocate(num_bytes)
        at = 0
        while at < num_bytes:
            try:
                count = self._end.recv_into(data[at:])
            except TimeoutError:
                self._wait(left_s)
                continue
            except OSError as error:
                raise LinkClosedError(f"the other end is gone: {error}") from error
            if not count:
                raise LinkClosedError("the other end is closed")
            at += count
        return data
