"""Values as text by their type hints, for files that this release alone reads again.

`text_shape(hint)` compiles an encoder and a decoder once. Dataclasses become the list of their fields' values, members
of a union of dataclasses their name and that list, enums their value, bytes base64, sets and mappings lists. `words`
says in one text how all of that is laid out: a file that was written under other words must not be decoded.

The files carry a digest of their own, so decoders do not check their input.
"""

import dataclasses
import json
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Generic, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from skein.config.job import JobSpec, read_spec
from skein.errors import LocalError

T = TypeVar("T")

Convert = Callable[[object], object]

_PLAIN: tuple[object, ...] = (int, float, str, bool, NoneType, Literal)
_SEQUENCES: Mapping[object, Callable[[list[object]], object]] = {list: list, Sequence: tuple, tuple: tuple}
_SETS: Mapping[object, Callable[[list[object]], object]] = {set: set, frozenset: frozenset, Set: frozenset}


@dataclasses.dataclass(frozen=True, slots=True)
class TextShape(Generic[T]):
    """Encoder and decoder of one type, and its layout in words."""

    encode: Callable[[T], object]
    decode: Callable[[object], T]
    words: str

    def to_text(self, value: T) -> str:
        """`value` as JSON."""
        return json.dumps(self.encode(value), separators=(",", ":"), ensure_ascii=False)

    def from_text(self, text: str) -> T:
        """The value that `to_text` made `text` of."""
        return self.decode(json.loads(text))


@cache
def text_shape(hint: object) -> TextShape[object]:
    """The shape of a type.

    Raises:
        LocalError: a part of the type has no shape here.

    >>> shape = text_shape(tuple[tuple[int, ...], frozenset[str]])
    >>> shape.to_text(((1, 2), frozenset({"b", "a"}))), shape.from_text('[[1,2],["a","b"]]')[0]
    ('[[1,2],["a","b"]]', (1, 2))
    """
    base = _base(hint)
    if base is JobSpec:
        return TextShape(
            lambda spec: cast("JobSpec", spec).canonical_json(), lambda text: read_spec(str(text)), "job"
        )
    if base is bytes:
        return TextShape(
            lambda data: b64encode(cast("bytes", data)).decode(), lambda text: b64decode(str(text)), "bytes"
        )
    if base in _PLAIN or get_origin(base) is Literal:
        return TextShape(_unchanged, _unchanged, getattr(base, "__name__", str(base)))
    if isinstance(base, type) and issubclass(base, Enum):
        members = ",".join(str(member.value) for member in base)
        return TextShape(lambda member: cast("Enum", member).value, base, f"{base.__name__}<{members}>")
    if isinstance(base, type) and dataclasses.is_dataclass(base):
        return _dataclass(base)
    return _generic(base)


def _generic(hint: object) -> TextShape[object]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _union(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _fixed(arguments)
    if origin in _SEQUENCES:
        return _listed(arguments[0], _SEQUENCES[origin], _as_read)
    if origin in _SETS:
        # Sorted, so that equal values make equal text.
        return _listed(arguments[0], _SETS[origin], lambda items: sorted(items, key=json.dumps))
    if origin in (dict, Mapping):
        pair = _fixed(arguments)
        return TextShape(
            lambda value: [pair.encode(item) for item in cast("Mapping[object, object]", value).items()],
            lambda items: dict(
                cast("tuple[object, object]", pair.decode(x)) for x in cast("list[object]", items)
            ),
            f"map({pair.words})",
        )
    if origin is deque:
        return _listed(arguments[0], deque, _as_read)
    raise LocalError(f"{hint} has no shape in a file")


def _base(hint: object) -> object:
    """Type that a NewType stands for."""
    while (supertype := getattr(hint, "__supertype__", None)) is not None:
        hint = supertype
    return hint


def _unchanged(value: object) -> object:
    return value


def _as_read(items: list[object]) -> list[object]:
    return items


def _listed(
    element: object, make: Callable[[list[object]], object], order: Callable[[list[object]], list[object]]
) -> TextShape[object]:
    shape = text_shape(element)
    encode, decode = shape.encode, shape.decode
    words = f"{getattr(make, '__name__', 'list')}({shape.words})"
    if encode is _unchanged:
        return TextShape(
            lambda value: order(list(cast("Sequence[object]", value))),
            lambda items: make(cast("list[object]", items)),
            words,
        )
    return TextShape(
        lambda value: order([encode(item) for item in cast("Sequence[object]", value)]),
        lambda items: make([decode(item) for item in cast("list[object]", items)]),
        words,
    )


def _fixed(elements: Sequence[object]) -> TextShape[object]:
    shapes = [text_shape(element) for element in elements]
    return TextShape(
        lambda value: [s.encode(x) for s, x in zip(shapes, cast("Sequence[object]", value), strict=True)],
        lambda items: tuple(
            [s.decode(x) for s, x in zip(shapes, cast("Sequence[object]", items), strict=True)]
        ),
        f"({';'.join(shape.words for shape in shapes)})",
    )


def _union(alternatives: Sequence[object]) -> TextShape[object]:
    others = [x for x in alternatives if x is not NoneType]
    if len(others) == 1:
        shape = text_shape(others[0])
        return TextShape(
            lambda value: None if value is None else shape.encode(value),
            lambda item: None if item is None else shape.decode(item),
            f"{shape.words}?",
        )
    if all(_base(x) in _PLAIN or get_origin(x) is Literal for x in others):
        return TextShape(_unchanged, _unchanged, "|".join(str(x) for x in alternatives))
    return _tagged([cast("type", x) for x in others], is_optional=len(others) < len(alternatives))


def _tagged(classes: Sequence[type], *, is_optional: bool) -> TextShape[object]:
    """A union of dataclasses: the name of the one that a value is, and its fields."""
    shapes = {cls.__name__: text_shape(cls) for cls in classes}

    def encode(value: object) -> object:
        if value is None and is_optional:
            return None
        name = type(value).__name__
        return [name, shapes[name].encode(value)]

    def decode(item: object) -> object:
        if item is None:
            return None
        name, fields = cast("Sequence[object]", item)
        return shapes[str(name)].decode(fields)

    words = "|".join(shape.words for shape in shapes.values())
    return TextShape(encode, decode, f"<{words}>{'?' if is_optional else ''}")


def _dataclass(cls: type) -> TextShape[object]:
    hints, fields = get_type_hints(cls), dataclasses.fields(cls)
    shapes = [(field.name, _of_field(hints[field.name], field)) for field in fields]

    def encode(value: object) -> object:
        return [shape.encode(getattr(value, name)) for name, shape in shapes]

    def decode(item: object) -> object:
        found = zip(shapes, cast("Sequence[object]", item), strict=True)
        return cls(**{name: shape.decode(x) for (name, shape), x in found})

    words = ",".join(f"{name}:{shape.words}" for name, shape in shapes)
    return TextShape(encode, decode, f"{cls.__name__}{{{words}}}")


def _of_field(hint: object, field: "dataclasses.Field[object]") -> TextShape[object]:
    """The shape of a field; a deque keeps the bound that its default has."""
    shape = text_shape(hint)
    if get_origin(hint) is not deque or field.default_factory is dataclasses.MISSING:
        return shape
    bound = cast("deque[object]", field.default_factory()).maxlen

    def decode(items: object) -> object:
        return deque(cast("deque[object]", shape.decode(items)), bound)

    return TextShape(shape.encode, decode, f"{shape.words}[{bound}]")
