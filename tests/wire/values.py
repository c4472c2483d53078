"""Hypothesis strategies for any dataclass that travels, from its type hints."""

import dataclasses
import types
from enum import StrEnum
from math import inf
from typing import Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from skein.plan.changing.clauses import Clauses, parse_clauses
from skein.protocol.messages.ranges import Range, range_of
from skein.types import GroupId, parse_group

_SCALARS: dict[object, st.SearchStrategy[object]] = {
    int: st.integers(0, 2**32 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=12),
    bytes: st.binary(max_size=12),
    bool: st.booleans(),
    Clauses: st.text(max_size=12).map(parse_clauses),
    GroupId: st.sampled_from(("s0", "s12@w1", "tied", "x3", "x3.f1", "x3.0", "x3.all")).map(parse_group),
}


def members(hint: object) -> tuple[object, ...]:
    """The classes of a union, or the one class."""
    return get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)


def values(hint: object) -> st.SearchStrategy[object]:
    """Any value of type `hint`; integers fit 32 bits, numbers of messages are in their ranges."""
    while (supertype := getattr(hint, "__supertype__", None)) is not None:
        hint = supertype
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hint is type(None):
        return st.none()
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=3).map(tuple)
    if len(members(hint)) > 1:
        return st.one_of([values(member) for member in members(hint)])
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(sorted(hint))
    assert isinstance(hint, type)
    assert dataclasses.is_dataclass(hint)
    hints = get_type_hints(hint)
    name = hint.__name__
    return st.builds(
        hint, **{field.name: _field(name, field.name, hints) for field in dataclasses.fields(hint)}
    )


def _field(message: str, name: str, hints: dict[str, object]) -> st.SearchStrategy[object]:
    """Values of a field, its numbers within their range."""
    row = range_of(message, name)
    return values(hints[name]) if row is None else _numbers(hints[name], row)


def _numbers(hint: object, row: Range) -> st.SearchStrategy[object]:
    """As `values`, of a type that may have numbers in it; all are within `row`."""
    while (supertype := getattr(hint, "__supertype__", None)) is not None:
        hint = supertype
    if hint is int:
        return st.integers(int(row.least), int(min(row.most, 2**32 - 1)))
    if hint is float:
        finite = st.floats(row.least, row.most)
        return finite | st.sampled_from((inf, -inf)) if row.may_be_not_finite else finite
    if get_origin(hint) is tuple:
        return st.lists(_numbers(get_args(hint)[0], row), max_size=3).map(tuple)
    if len(members(hint)) > 1:
        return st.one_of([_numbers(member, row) for member in members(hint)])
    return values(hint)
