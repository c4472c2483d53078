"""What the .proto files say, with their comments."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

from protos.generate import PACKAGE, PROTOS


class Described(NamedTuple):
    """Something with a name in a .proto file; `location` is how descriptor.proto says where it stands."""

    name: str
    location: tuple[int, ...]
    kind: str


def described_files(folder: Path) -> list[FileDescriptorProto]:
    """Our .proto files; `folder` takes a temporary file."""
    target = folder / "described.binpb"
    files = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / PACKAGE).glob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    sources = [f"--proto_path={PROTOS}", f"--proto_path={well_known}", *files]
    assert protoc.main(["protoc", "--include_source_info", f"--descriptor_set_out={target}", *sources]) == 0
    return list(FileDescriptorSet.FromString(target.read_bytes()).file)


def described(file: FileDescriptorProto) -> Iterator[Described]:
    """Everything in `file` that has a name."""
    for index, service in enumerate(file.service):
        yield Described(service.name, (6, index), "service")
        yield from (
            Described(method.name, (6, index, 2, at), "method") for at, method in enumerate(service.method)
        )
    yield from _enums(file.enum_type, (5,))
    yield from _messages(file.message_type, (4,))


def commented(file: FileDescriptorProto) -> set[tuple[int, ...]]:
    """Locations in `file` that have a comment before them or behind them."""
    locations = file.source_code_info.location
    return {tuple(at.path) for at in locations if at.leading_comments or at.trailing_comments}


def _messages(messages: Iterable[DescriptorProto], location: tuple[int, ...]) -> Iterator[Described]:
    for index, message in enumerate(messages):
        here = (*location, index)
        yield Described(message.name, here, "message")
        yield from (Described(field.name, (*here, 2, at), "field") for at, field in enumerate(message.field))
        yield from _messages(message.nested_type, (*here, 3))
        yield from _enums(message.enum_type, (*here, 4))


def _enums(enums: Iterable[EnumDescriptorProto], location: tuple[int, ...]) -> Iterator[Described]:
    for index, enum in enumerate(enums):
        here = (*location, index)
        yield Described(enum.name, here, "enum")
        yield from (Described(value.name, (*here, 2, at), "value") for at, value in enumerate(enum.value))
