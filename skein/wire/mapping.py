"""Turns frozen dataclasses into proto messages and back, by name.

`Codec` reads the type hints of a dataclass and the descriptor of its message once, checks that they have the same
fields, and keeps closures, so that no reflection is left per call:

    int, float, str, bytes, bool, NewType   scalar
    StrEnum                                 enum; member X of Phase is PHASE_X
    dataclass                               message, which must be present
    T | None                                optional field
    tuple[T, ...]                           repeated field
    A | B of dataclasses                    oneof of the field's name; members are found by message name
    GroupId, Clauses                        string, their `str`

Text that is no Unicode, as the names of some files, travels with its bytes spelt out.

A value that comes from elsewhere and does not fit raises `RemoteError`; so does a number that is outside what
`skein.protocol.messages.ranges` has for its field.
"""

import dataclasses
import importlib
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from skein.errors import LocalError, RemoteError
from skein.plan.changing.clauses import Clauses, parse_clauses
from skein.protocol.messages.ranges import COUNT, Range, range_of
from skein.types import GroupId, parse_group

D = TypeVar("D")
M = TypeVar("M", bound=Message)

Fill = Callable[[Message, object], None]
"""Writes a domain value into an empty message."""
Read = Callable[[Message], object]
"""Makes a domain value of a message."""
RangeOf = Callable[[str, str], Range | None]
"""Gives the range that a field of a message may have; None: any number that fits."""

READ_TEXT: dict[object, Callable[[str], object]] = {GroupId: parse_group, Clauses: parse_clauses}
"""Types that travel as their `str`, and the functions that read that."""

_KINDS = {
    int: {FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_INT32},
    float: {FieldDescriptor.CPPTYPE_DOUBLE},
    str: {FieldDescriptor.CPPTYPE_STRING},
    bytes: {FieldDescriptor.CPPTYPE_STRING},
    bool: {FieldDescriptor.CPPTYPE_BOOL},
}


class Codec(Generic[D, M]):
    """Maps values of one dataclass, or of a union of dataclasses, to one message type.

    `hint` is the type, or where it is found: module and name, with a dot between.

    A union's message has a single oneof named `body`. With `is_ours` numbers may be whatever fits: what this process
    has written it can read again, whichever release it was.
    """

    def __init__(self, hint: type[D] | UnionType | str, message: type[M], *, is_ours: bool = False) -> None:
        self._hint: object = hint
        self.message = message
        self._is_ours = is_ours

    @property
    def hint(self) -> object:
        """The type, which is imported now if it was given by its name."""
        if isinstance(self._hint, str):
            module, _, name = self._hint.rpartition(".")
            self._hint = getattr(importlib.import_module(module), name)
        return self._hint

    def encode(self, value: D) -> M:
        """The message of `value`."""
        fill, _ = self._closures()
        message = self.message()
        fill(message, value)
        return message

    def decode(self, message: M) -> D:
        """The value of `message`.

        Raises:
            RemoteError: an enum value, a oneof member or a required message is missing or unknown, or a number is
                outside its range.
        """
        _, read = self._closures()
        return read(message)  # type: ignore[return-value]

    def to_bytes(self, value: D) -> bytes:
        """`value` in proto's binary form; equal values give equal bytes within one build."""
        return self.encode(value).SerializeToString(deterministic=True)

    def from_bytes(self, data: bytes) -> D:
        """The value whose binary form is `data`.

        Raises:
            RemoteError: as for `decode`, or the bytes are not such a message at all.
        """
        try:
            message = self.message.FromString(data)
        except DecodeError as error:
            raise RemoteError(f"{self.message.DESCRIPTOR.name}: not a message: {error}") from error
        return self.decode(message)

    def check(self) -> None:
        """Compile now.

        Raises:
            LocalError: the dataclass and the message do not have the same fields.
        """
        self._closures()

    def _closures(self) -> tuple[Fill, Read]:
        return _compiled(self.hint, self.message.DESCRIPTOR, _any_number if self._is_ours else range_of)


def check_request(message: Message) -> None:
    """Look at the numbers of a request that has no dataclass; messages in it are left alone.

    Raises:
        OutOfRangeError: one is outside its range.
    """
    name = message.DESCRIPTOR.name
    for field in message.DESCRIPTOR.fields:
        row = range_of(name, field.name)
        if row is not None and field.message_type is None:
            row.check(f"{name}.{field.name}", getattr(message, field.name))


def _any_number(_message: str, _field: str) -> Range | None:
    return None


@cache
def _compiled(hint: object, descriptor: Descriptor, ranges: RangeOf) -> tuple[Fill, Read]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass(hint, descriptor, ranges)
    return _oneof(hint, descriptor, "body", ranges)


def _dataclass(cls: type, descriptor: Descriptor, ranges: RangeOf) -> tuple[Fill, Read]:
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    _same(set(names), _field_names(descriptor), descriptor.name)
    plain = tuple(name for name in names if _is_plain(hints[name], descriptor, name))
    bounded = tuple(
        (name, f"{descriptor.name}.{name}", row)
        for name in plain
        if _is_number(hints[name]) and (row := ranges(descriptor.name, name)) is not None
    )
    rest = [(name, *_field(hints[name], descriptor, name, ranges)) for name in names if name not in plain]
    fills = tuple((name, fill) for name, fill, _ in rest)
    reads = tuple((name, read) for name, _, read in rest)

    def fill(message: Message, value: object) -> None:
        for name in plain:
            try:
                setattr(message, name, getattr(value, name))
            except UnicodeEncodeError:
                setattr(message, name, _sayable(getattr(value, name)))
        for name, fill_field in fills:
            fill_field(message, getattr(value, name))

    def read(message: Message) -> object:
        values = {name: getattr(message, name) for name in plain}
        for name, where, row in bounded:
            row.check(where, values[name])
        for name, read_field in reads:
            values[name] = read_field(message)
        return cls(**values)

    return fill, read


def _field_names(descriptor: Descriptor) -> set[str]:
    """Names of fields and of real oneofs (proto3 makes a hidden one of each optional field)."""
    names = {field.name for field in descriptor.fields if _real_oneof(field) is None}
    return names | {oneof for field in descriptor.fields if (oneof := _real_oneof(field)) is not None}


def _real_oneof(field: FieldDescriptor) -> str | None:
    oneof = field.containing_oneof
    return None if oneof is None or oneof.name.startswith("_") else oneof.name


def _same(ours: set[str], theirs: set[str], where: str) -> None:
    if ours != theirs:
        raise LocalError(f"{where}: domain only {sorted(ours - theirs)}, proto only {sorted(theirs - ours)}")


def _expect(claim: bool, where: str, hint: object) -> None:
    if not claim:
        raise LocalError(f"{where}: the proto field cannot hold {hint}")


def _is_plain(hint: object, descriptor: Descriptor, name: str) -> bool:
    """Needs no look at its value: reading and writing the attribute is all."""
    base = _base(hint)
    if base not in (float, str, bytes, bool, int):
        return False
    field = descriptor.fields_by_name[name]
    _expect(
        _fits(base, field) and not field.is_repeated and not field.has_presence,
        f"{descriptor.name}.{name}",
        hint,
    )
    return field.cpp_type != FieldDescriptor.CPPTYPE_UINT64


def _is_number(hint: object) -> bool:
    return _base(hint) in (int, float)


def _base(hint: object) -> object:
    """Type that a NewType stands for."""
    while (supertype := getattr(hint, "__supertype__", None)) is not None:
        hint = supertype
    return hint


def _fits(base: object, field: FieldDescriptor) -> bool:
    if base in (str, bytes) and (field.type == FieldDescriptor.TYPE_BYTES) != (base is bytes):
        return False
    return isinstance(base, type) and field.cpp_type in _KINDS.get(base, set())


def _field(hint: object, descriptor: Descriptor, name: str, ranges: RangeOf) -> tuple[Fill, Read]:
    """Closures over the parent message for a field that is more than an attribute."""
    where = f"{descriptor.name}.{name}"
    if hint not in READ_TEXT and get_origin(hint) in (UnionType, Union):
        alternatives = [argument for argument in get_args(hint) if argument is not type(None)]
        if len(alternatives) > 1:
            return _oneof(hint, descriptor, name, ranges)
        field = descriptor.fields_by_name[name]
        _expect(field.has_presence and field.containing_oneof is not None, where, hint)
        return _optional(*_single(alternatives[0], field, where, ranges), name)
    field = descriptor.fields_by_name[name]
    if get_origin(hint) is tuple:
        element, ellipsis = get_args(hint)
        _expect(field.is_repeated and ellipsis is Ellipsis, where, hint)
        return _repeated(element, field, where, ranges)
    _expect(not field.is_repeated, where, hint)
    fill, read = _single(hint, field, where, ranges)
    return (fill, _required(read, name, where)) if field.has_presence else (fill, read)


def _required(read: Read, name: str, where: str) -> Read:
    def read_required(message: Message) -> object:
        if not message.HasField(name):
            raise RemoteError(f"{where} is missing")
        return read(message)

    return read_required


def _optional(fill: Fill, read: Read, name: str) -> tuple[Fill, Read]:
    def fill_optional(message: Message, value: object) -> None:
        if value is not None:
            fill(message, value)

    def read_optional(message: Message) -> object:
        return read(message) if message.HasField(name) else None

    return fill_optional, read_optional


def _single(hint: object, field: FieldDescriptor, where: str, ranges: RangeOf) -> tuple[Fill, Read]:
    name = field.name
    if field.message_type is not None:
        fill_child, read_child = _child(hint, field.message_type, where, ranges)

        def fill_message(message: Message, value: object) -> None:
            child = getattr(message, name)
            child.SetInParent()
            fill_child(child, value)

        return fill_message, lambda message: read_child(getattr(message, name))
    to_wire, from_wire = _scalar(hint, field, where, ranges)

    def fill_scalar(message: Message, value: object) -> None:
        setattr(message, name, to_wire(value))

    return fill_scalar, lambda message: from_wire(getattr(message, name))


def _repeated(element: object, field: FieldDescriptor, where: str, ranges: RangeOf) -> tuple[Fill, Read]:
    name = field.name
    if field.message_type is not None:
        fill_child, read_child = _child(element, field.message_type, where, ranges)

        def fill_messages(message: Message, value: object) -> None:
            add = getattr(message, name).add
            for item in value:  # type: ignore[attr-defined]
                fill_child(add(), item)

        return fill_messages, lambda message: tuple([read_child(child) for child in getattr(message, name)])
    to_wire, from_wire = _scalar(element, field, where, ranges)

    def fill_scalars(message: Message, value: object) -> None:
        getattr(message, name).extend([to_wire(item) for item in value])  # type: ignore[attr-defined]

    return fill_scalars, lambda message: tuple([from_wire(item) for item in getattr(message, name)])


def _child(hint: object, descriptor: Descriptor, where: str, ranges: RangeOf) -> tuple[Fill, Read]:
    is_same = dataclasses.is_dataclass(hint) and getattr(hint, "__name__", None) == descriptor.name
    _expect(is_same, where, hint)
    return _compiled(hint, descriptor, ranges)


def _scalar(
    hint: object, field: FieldDescriptor, where: str, ranges: RangeOf
) -> tuple[Callable[[object], object], Callable[[object], object]]:
    if hint in READ_TEXT:
        _expect(_fits(str, field), where, hint)
        return str, _reader(READ_TEXT[hint], where)
    base = _base(hint)
    if isinstance(base, type) and issubclass(base, StrEnum):
        return _enum(base, field, where)
    _expect(_fits(base, field), where, hint)
    row = ranges(where.partition(".")[0], field.name) if _is_number(hint) else None
    if row is None and field.cpp_type == FieldDescriptor.CPPTYPE_UINT64:
        row = COUNT
    if row is None:
        return (_sayable if base is str else _unchanged), _unchanged

    def bounded(value: object) -> object:
        row.check(where, value)  # type: ignore[arg-type]
        return value

    return _unchanged, bounded


def _unchanged(value: object) -> object:
    return value


def _sayable(text: object) -> object:
    r"""A text with what no message can hold spelt out: names of files may be bytes of any kind, and errors have them.

    >>> print(_sayable("caf\udce9: no such file"))
    caf\udce9: no such file
    """
    assert isinstance(text, str)
    return text.encode("utf-8", "backslashreplace").decode()


def _reader(read: Callable[[str], object], where: str) -> Callable[[object], object]:
    def from_wire(text: object) -> object:
        try:
            return read(str(text))
        except ValueError as error:
            raise RemoteError(f"{where}: {error}") from error

    return from_wire


def _enum(
    cls: type[StrEnum], field: FieldDescriptor, where: str
) -> tuple[Callable[[object], object], Callable[[object], object]]:
    enum = field.enum_type
    if enum is None or enum.name != cls.__name__:
        raise LocalError(f"{where}: the proto field cannot hold {cls}")
    values = {value.name: value.number for value in enum.values}
    prefix = next(name for name, number in values.items() if number == 0).removesuffix("UNSPECIFIED")
    _same(
        {prefix + member.name for member in cls}, {name for name, number in values.items() if number}, where
    )
    numbers: dict[object, object] = {member: values[prefix + member.name] for member in cls}
    members = {number: member for member, number in numbers.items()}

    def from_wire(number: object) -> object:
        member = members.get(number)
        if member is None:
            raise RemoteError(f"{where}: {number} is not a {cls.__name__} this release knows")
        return member

    return numbers.__getitem__, from_wire


def _oneof(hint: object, descriptor: Descriptor, name: str, ranges: RangeOf) -> tuple[Fill, Read]:
    """Closures over the message that holds the oneof."""
    where = f"{descriptor.name}.{name}"
    _expect(name in descriptor.oneofs_by_name, where, hint)
    classes = {cls.__name__: cls for cls in get_args(hint)}
    fields = descriptor.oneofs_by_name[name].fields
    _same(
        set(classes),
        {field.message_type.name if field.message_type else field.name for field in fields},
        where,
    )
    fills: dict[type, tuple[str, Fill]] = {}
    reads: dict[str, Read] = {}
    for field in fields:
        assert field.message_type is not None
        cls = classes[field.message_type.name]
        fill_child, reads[field.name] = _compiled(cls, field.message_type, ranges)
        fills[cls] = (field.name, fill_child)

    def fill(message: Message, value: object) -> None:
        member, fill_child = fills[type(value)]
        child = getattr(message, member)
        child.SetInParent()
        fill_child(child, value)

    def read(message: Message) -> object:
        member = message.WhichOneof(name)
        if member is None:
            raise RemoteError(f"{where} is missing or of a kind this release does not know")
        return reads[member](getattr(message, member))

    return fill, read
