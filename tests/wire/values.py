"""Hypothesis strategies for any dataclass that travels, from its type hints."""

import dataclasses
import types
from enum import StrEnum
from typing import Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

_SCALARS: dict[object, st.SearchStrategy[object]] = {
    int: st.integers(0, 2**32 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=12),
    bytes: st.binary(max_size=12),
    bool: st.booleans(),
}


def members(hint: object) -> tuple[object, ...]:
    """The classes of a union, or the one class."""
    return get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)


def values(hint: object) -> st.SearchStrategy[object]:
    """Any value of type `hint`; integers fit 32 bits, floats are numbers or infinite."""
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
    return st.builds(hint, **{field.name: values(hints[field.name]) for field in dataclasses.fields(hint)})
