"""What attackers send: for each method of each service and each way of attack the messages of one call."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from skein import PROTOCOL_VERSION
from skein.protocol.messages.reports import Hello
from skein.topology.fleet import Profile
from skein.types import Epoch, Incarnation, SiteId, WorkerId
from skein.wire.channel import MAX_MESSAGE_BYTES
from skein.wire.codec import REPORT
from skein.wire.v1 import checkpoint_pb2, control_pb2, identity_pb2, jobs_pb2, peer_pb2, relay_pb2

SERVED = (control_pb2, jobs_pb2, checkpoint_pb2, identity_pb2, relay_pb2, peer_pb2, health_pb2)
MALLORY = "mallory"
"""The worker by whose certificate attackers are let in."""
_DEEPEST = 4
_REPEATS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One RPC: where it is served, and what it is sent."""

    path: str
    is_workers: bool
    request: type[Message]


def methods() -> Iterator[Method]:
    """Every method of every service, health included."""
    for file in SERVED:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield Method(
                    path=f"/{service.full_name}/{method.name}",
                    is_workers=file is peer_pb2,
                    request=GetMessageClass(method.input_type),
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuff:
    """Values that made-up messages are filled with, and how many of their fields."""

    names: tuple[str, ...] = ("", "w0", "nobody", MALLORY, "../../etc", "x" * 300, "s0", "sim-1", "\u2028")
    integers: tuple[int, ...] = (0, 1, 2, 255, 2**31, 2**32 - 1)
    floats: tuple[float, ...] = (0.0, -1.0, 1.0, 1e30, float("inf"), float("-inf"), float("nan"))
    share: float = 0.8


MADE_UP = Stuff()
NUMBERS = Stuff(
    integers=(2**31, 2**32 - 1), floats=(float("inf"), float("-inf"), float("nan"), -1e308), share=1.0
)
"""Numbers that are none, and of which no dtype, shape or length is right."""
STALE = Stuff(names=("w0", "w1", MALLORY, "1"), integers=(0, 1), floats=(0.0, 1.0), share=1.0)
"""Of the first epoch, generation, step and version, which are over."""
PATHS = Stuff(
    names=(
        *("../../../etc/passwd", "/etc/shadow", "a/../../b", "..", "~root/.ssh", "w0/../../state"),
        *("..\\..\\x", "%2e%2e/%2e%2e", "x\x00.pt", "file:///etc/passwd", "s3://a/../b", "-rf"),
    ),
    share=1.0,
)
FILLED = {"forged": MADE_UP, "numbers": NUMBERS, "stale": STALE, "paths": PATHS, "replayed": STALE}
"""Ways whose messages are well-formed, and what is in them."""
WAYS = ("malformed", "oversized", "silent", "slow", "streams", *FILLED)
DESTRUCTIVE = ("/Drain", "/Revoke")
"""Methods by which an operator may end others: nobody who is there is named."""


def messages(method: Method, way: str, draw: Random) -> list[bytes]:
    """What an attack in this way sends, in order."""
    hello = [greeting()] if way in FILLED and method.path.endswith("/Session") else []
    return hello + _said(method, way, draw)


def greeting() -> bytes:
    """The first words of a worker whom a job has no use for, for want of memory: what it says next is looked at."""
    profile = Profile(device="cpu", device_name="none", flops_per_s=1.0, memory_bytes=1)
    hello = Hello(
        worker=WorkerId(MALLORY),
        incarnation=Incarnation(MALLORY),
        protocol_version=PROTOCOL_VERSION,
        site=SiteId("elsewhere"),
        address="127.0.0.1:9",
        profile=profile,
        epoch=Epoch(0),
        secret=MALLORY,
    )
    return REPORT.encode(hello).SerializeToString()


def _said(method: Method, way: str, draw: Random) -> list[bytes]:
    match way:
        case "malformed":
            return [draw.randbytes(draw.randrange(1, 200)) for _ in range(3)]
        case "oversized":
            return [bytes(MAX_MESSAGE_BYTES + draw.randrange(1, 1 << 20))]
        case "silent" | "streams":
            return []
        case "slow":
            return [forged(method, draw).SerializeToString() for _ in range(3)]
        case "replayed":
            return [forged(method, draw, STALE).SerializeToString()] * _REPEATS
        case _:
            return [forged(method, draw, FILLED[way]).SerializeToString() for _ in range(_REPEATS)]


def forged(method: Method, draw: Random, stuff: Stuff = MADE_UP) -> Message:
    """A well-formed request of made-up content."""
    message = method.request()
    is_destructive = method.path.endswith(DESTRUCTIVE)
    names = tuple(name for name in stuff.names if not is_destructive or name not in ("", "w0", "w1", MALLORY))
    _fill(message, draw, stuff, names or ("nobody",))
    return message


def _fill(message: Message, draw: Random, stuff: Stuff, names: tuple[str, ...], *, depth: int = 0) -> None:
    for one in message.DESCRIPTOR.fields:
        assert isinstance(one, FieldDescriptor)
        oneof = one.containing_oneof
        is_there = draw.random() < (stuff.share if oneof is None else 1 / len(oneof.fields))
        if not is_there or (one.message_type is not None and depth == _DEEPEST):
            continue
        if one.message_type is not None:
            held = getattr(message, one.name)
            for _ in range(draw.randrange(3) if one.is_repeated else 1):
                child = held.add() if one.is_repeated else held
                child.SetInParent()
                _fill(child, draw, stuff, names, depth=depth + 1)
        elif one.is_repeated:
            values = [_value(one, draw, stuff, names) for _ in range(draw.randrange(4))]
            getattr(message, one.name).extend(values)
        else:
            setattr(message, one.name, _value(one, draw, stuff, names))


def _value(one: FieldDescriptor, draw: Random, stuff: Stuff, names: tuple[str, ...]) -> object:
    match one.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return draw.choice(stuff.floats)
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            assert one.enum_type is not None
            return draw.choice([value.number for value in one.enum_type.values])
        case FieldDescriptor.CPPTYPE_STRING if one.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.randrange(64))
        case FieldDescriptor.CPPTYPE_STRING:
            return draw.choice(names)
        case _:
            return draw.choice(stuff.integers)
