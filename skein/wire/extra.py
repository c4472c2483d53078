"""Values that only drivers exchange: log lines, tensors in parts, state, checkpoint files, probes, relayed bytes.

The machines know none of these. Field names are those of protos/skein/wire/v1.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from skein.protocol.log.records import StageFiles
from skein.protocol.messages.directives import Directive
from skein.protocol.messages.reports import Report
from skein.protocol.messages.tensors import Envelope, Refusal
from skein.types import Incarnation, JobId, StageIndex, Step, WorkerId
from skein.wire.greeting import Coordinators

# --- control ---


class LogLevel(StrEnum):
    """Importance of a log line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """Line of a log, without its line break; `wall_s` is Unix time."""

    level: LogLevel
    wall_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """Lines of a worker's log on their way to `skein logs`. Losing them changes nothing."""

    lines: tuple[LogLine, ...]


# --- tensors ---


class DType(StrEnum):
    """Element types that may travel; values are torch's names."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT64 = "int64"
    INT32 = "int32"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return int("".join(filter(str.isdecimal, self)) or "8") // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Name, element type and shape of one tensor of a bundle."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements, to be compared with a limit before anything is allocated.

        >>> TensorMeta(name="x", dtype=DType.BFLOAT16, shape=(3, 5)).num_bytes
        30
        """
        size = self.dtype.num_bytes
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStart:
    """Announces a bundle that follows as one run of `num_bytes` bytes; `tensor` names it on this stream."""

    tensor: int
    envelope: Envelope
    tensors: tuple[TensorMeta, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorData:
    """Bytes of a bundle from `offset` on, and what `worker.transport.checksum` says of them."""

    tensor: int
    offset: int
    data: bytes
    checksum: int


TensorPart = TensorStart | TensorData


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditGranted:
    """The sender may send so many more bytes of `TensorData.data`."""

    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAccepted:
    """The whole bundle arrived and its checksums fit."""

    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRefused:
    """The bundle was not taken."""

    tensor: int
    reason: Refusal
    text: str


PartReply = CreditGranted | TensorAccepted | TensorRefused


# --- state of a chunk ---


class StateKind(StrEnum):
    """Kind of state asked for: parameters and optimizer state after `version` steps, or what step `version` applied."""

    STATE = "state"
    RESULT = "result"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStateRequest:
    """Asks for a chunk's state, or for what a step applied to it, by group; no `names`: all tensors."""

    job: JobId
    stage: StageIndex
    version: Step
    names: tuple[str, ...]
    kind: StateKind
    door: str = field(default="", repr=False)
    """The giver's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor's bytes follow."""

    meta: TensorMeta
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateData:
    """The next bytes of the tensor."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensorEnd:
    """The tensor is complete; hex SHA-256 of its bytes."""

    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEnd:
    """All tensors were sent; a stream that ends without this was cut off."""

    num_tensors: int


StatePart = StateTensor | StateData | StateTensorEnd | StateEnd

# --- checkpoint files ---


@dataclass(frozen=True, slots=True, kw_only=True)
class PutStart:
    """A file of a checkpoint follows."""

    job: JobId
    version: Step
    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileData:
    """The next bytes of the file."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEnd:
    """The file is complete; hex SHA-256 of all of it."""

    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PutReply:
    """Size and hash of a file that was stored."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRequest:
    """Asks for a file from `offset` on."""

    job: JobId
    version: Step
    name: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GetStart:
    """A file follows; its whole size."""

    num_bytes: int


PutPart = PutStart | FileData | FileEnd
GetPart = GetStart | FileData | FileEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRequest:
    """Asks what a checkpoint consists of; no `version`: the newest."""

    job: JobId
    version: Step | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReply:
    """A complete checkpoint: `spec` is the job's canonical JSON; no `url`: the files are at the coordinator."""

    job: JobId
    version: Step
    spec: str
    url: str | None
    stages: tuple[StageFiles, ...]
    wall_s: float
    data_fingerprint: str = ""


# --- probes ---


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBack:
    """A process, and where it believes that peers reach it."""

    worker: WorkerId
    incarnation: Incarnation
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePart:
    """Answered at once by a reply that carries `reply_bytes` bytes."""

    sequence: int
    data: bytes
    reply_bytes: int
    door: str = field(default="", repr=False)
    """The receiver's, in the first part."""
    dial_back: DialBack | None = None
    """Process that the receiver is to dial before it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReply:
    """Bytes received since the stream began, and seconds from the first part's arrival to this one's."""

    sequence: int
    num_bytes: int
    elapsed_s: float
    data: bytes
    incarnation: Incarnation
    """The receiver's: another process may have the address."""
    is_dialled: bool = False
    """Whether the receiver reached the process that it was to dial."""


# --- relays ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenRequest:
    """Tells a relay who is to be called by the stream that this opens."""

    worker: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A caller waits for the connection to be answered."""

    connection: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPeer:
    """First part of a caller: whom it wants."""

    worker: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCall:
    """First part of whoever is called: which connection it answers."""

    connection: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedBytes:
    """The next bytes of a connection."""

    data: bytes


CarryPart = CallPeer | AnswerCall | CarriedBytes

Upward = Report | LogLines
"""Messages that a control stream carries up."""

Downward = Directive | Coordinators
"""Messages that a control stream carries down."""
