"""Mistakes that validation found, in words: the field, what it holds, and what would be right by the JSON Schema."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from skein.errors import UserError

Schema = Mapping[str, object]

_MAX_SHOWN = 80


class Words(str):
    """A value described in words; an error shows it without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain_mistakes(error: ValidationError, schema: Schema) -> list[UserError]:
    """The mistakes in `error`, in the order of the schema's fields as pydantic checks them.

    Args:
        error: from validating JSON in strict mode.
        schema: of the model that was validated, as pydantic writes it.
    """
    book = _Book(schema)
    found = [book.mistake(details) for details in error.errors(include_url=False)]
    # A value that fits none of several types is a mistake at each of them.
    return list({str(mistake): mistake for mistake in found if mistake is not None}.values())


class _Book:
    """Looks fields up in one schema."""

    def __init__(self, schema: Schema) -> None:
        self._root = schema
        self._definitions = cast("Mapping[str, Schema]", schema.get("$defs", {}))

    def mistake(self, details: ErrorDetails) -> UserError | None:
        """Mistake in words; None for one that only follows from another."""
        loc, kind, value = details["loc"], details["type"], details["input"]
        field, schema = self._at(loc)
        context = details.get("ctx", {})
        match kind:
            case "extra_forbidden":
                return UserError(field, _shown(value), self._unknown_key(field, loc))
            case "missing" if isinstance(loc[-1], int):
                field, schema = self._at(loc[:-1])
                return UserError(field, _shown(value), f"give {self._wanted(schema)}")
            case "missing":
                return UserError(field, Words("missing"), f"give {self._wanted(schema)}")
            case "union_tag_not_found" | "union_tag_invalid" if isinstance(value, dict):
                return self._tag(field, schema, value)
            case "value_error" if isinstance(reason := context.get("error"), UserError):
                return UserError(
                    f"{field}.{reason.field}" if field else reason.field, reason.value, reason.hint
                )
            case "too_short" if isinstance(value, list) and value:
                return None
            case "json_invalid":
                return UserError(
                    "job", Words("not JSON"), f"{details['msg']}: write plain values and UTF-8 text"
                )
            case _:
                meant = _meant(value, _choices(schema), cutoff=0.8)
                return UserError(field, _shown(value), f"give {self._wanted(schema)}{meant}")

    def _at(self, loc: Sequence[int | str]) -> tuple[str, Schema]:
        """The dotted path that users know of pydantic's `loc`, and the schema there ({} where the path is unknown)."""
        path, schema = "", self._resolved(self._root)
        for part in loc:
            mapping = self._forms(schema)
            if isinstance(part, str) and part in mapping:
                schema = mapping[part]
                continue
            if self._types(schema) and part not in _fields(schema):
                # pydantic's name for one of the types that the field may have.
                continue
            path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
            schema = self._inside(schema, part)
        return path, schema

    def _inside(self, schema: Schema, part: int | str) -> Schema:
        if isinstance(part, str):
            others = schema.get("additionalProperties")
            return self._resolved(_fields(schema).get(part, others if isinstance(others, dict) else {}))
        entries = cast("Sequence[Schema]", schema.get("prefixItems", ()))
        return self._resolved(
            entries[part] if part < len(entries) else cast("Schema", schema.get("items", {}))
        )

    def _resolved(self, schema: Schema) -> Schema:
        """Follows a reference, and leaves out null where a field may also be null."""
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._definitions[reference.rpartition("/")[2]]
        options = [self._resolved(x) for x in cast("Sequence[Schema]", schema.get("anyOf", ()))]
        others = [x for x in options if x.get("type") != "null"]
        return {**others[0], "nullable": True} if len(others) == 1 else schema

    def _forms(self, schema: Schema) -> Mapping[str, Schema]:
        """The forms of a field that has several, by their name."""
        key = self._telling(schema)
        return dict(sorted((str(_fields(form)[key]["const"]), form) for form in self._options(schema)))

    def _types(self, schema: Schema) -> list[Schema]:
        """The types that a field may have beside null, if there are several."""
        return [self._resolved(option) for option in cast("Sequence[Schema]", schema.get("anyOf", ()))]

    def _options(self, schema: Schema) -> list[Schema]:
        return [self._resolved(option) for option in cast("Sequence[Schema]", schema.get("oneOf", ()))]

    def _telling(self, schema: Schema) -> str:
        """The key whose value tells the forms of a field apart: each has it, with one value; empty without forms."""
        keys = [{name for name, x in _fields(form).items() if "const" in x} for form in self._options(schema)]
        return min(set.intersection(*keys)) if keys else ""

    def _tag(self, field: str, schema: Schema, value: Mapping[str, object]) -> UserError:
        key = self._telling(schema)
        given = _shown(value[key]) if key in value else Words("missing")
        return UserError(
            f"{field}.{key}",
            given,
            f"give {_either(self._forms(schema))}{_meant(given, self._forms(schema))}",
        )

    def _unknown_key(self, field: str, loc: Sequence[int | str]) -> str:
        key, known = str(loc[-1]), _fields(self._at(loc[:-1])[1])
        forms, form = self._forms(self._at(loc[:-2])[1]), str(loc[-2]) if len(loc) > 1 else ""
        having = [name for name, other in forms.items() if key in _fields(other)] if form in forms else []
        if having:
            tag = self._telling(self._at(loc[:-2])[1])
            belongs = f"it belongs to {tag}: {_either(having)}"
            return f"no such key: {belongs}; with {tag}: {form} here are {', '.join(known)}"
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        paths = dict.fromkeys(self._paths(self._resolved(self._root), ""))
        elsewhere = [path for path in paths if path.endswith(f".{key}") and path != field]
        question = [*elsewhere, *close] if len(elsewhere) == 1 else close
        meant = f"did you mean {question[0]}? " if question else ""
        return f"no such key: {meant}here are {', '.join(known)}"

    def _paths(self, schema: Schema, prefix: str) -> Iterator[str]:
        """Paths of all fields that lie in mappings; where those have several forms, of every form."""
        for name, field in _fields(schema).items():
            yield f"{prefix}{name}"
            inside = self._resolved(field)
            for form in (inside, *self._options(inside)):
                yield from self._paths(form, f"{prefix}{name}.")

    def _wanted(self, schema: Schema) -> str:
        """Words for what would be right, after "give"."""
        suffix = ", or null" if schema.get("nullable") else ""
        if "const" in schema:
            return f"{schema['const']}{suffix}"
        if "enum" in schema:
            return _either(_choices(schema)) + suffix
        types = [self._wanted(one) for one in self._types(schema) if one.get("type") != "null"]
        if types:
            return _either(types) + suffix
        forms = self._forms(schema)
        if forms:
            return f"a mapping whose {self._telling(schema)} is {_either(forms)}{suffix}"
        return self._of_type(schema) + suffix

    def _of_type(self, schema: Schema) -> str:
        match schema.get("type"):
            case "integer":
                return f"a whole number{_bounds(schema)}"
            case "number":
                return f"a number{_bounds(schema)}"
            case "boolean":
                return "true or false"
            case "string":
                return f"text: {schema['description']}" if "pattern" in schema else "text"
            case "array":
                return self._list(schema)
            case "object":
                required, known = cast("Sequence[str]", schema.get("required", ())), _fields(schema)
                if not known:
                    return "a mapping"
                return (
                    f"a mapping with {', '.join(required)}"
                    if required
                    else f"a mapping of {', '.join(known)}"
                )
            case _:
                return "another value"

    def _list(self, schema: Schema) -> str:
        entries = cast("Sequence[Schema]", schema.get("prefixItems", ()))
        if entries:
            return f"a list of {len(entries)}, each {self._wanted(self._resolved(entries[0]))}"
        entry = self._wanted(self._resolved(cast("Schema", schema.get("items", {}))))
        return f"a list of {schema.get('minItems', 0)} to {schema['maxItems']}, each {entry}"


def _fields(schema: Schema) -> Mapping[str, Schema]:
    return cast("Mapping[str, Schema]", schema.get("properties", {}))


def _bounds(schema: Schema) -> str:
    """Limits in words, as they read after a noun; empty without limits.

    >>> _bounds({"minimum": 1, "maximum": 5}), _bounds({"exclusiveMinimum": 0, "maximum": 0.5}), _bounds({})
    (' from 1 to 5', ' above 0 and at most 0.5', '')
    """
    low, high, above, below = (
        schema.get(key) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    )
    if low is not None and high is not None:
        return f" from {low} to {high}"
    named = (("of at least", low), ("above", above), ("at most", high), ("below", below))
    limits = [f"{words} {limit}" for words, limit in named if limit is not None]
    return f" {' and '.join(limits)}" if limits else ""


def _either(names: Sequence[str] | Mapping[str, object]) -> str:
    """
    >>> _either(["a", "b", "c"])
    'a, b or c'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _choices(schema: Schema) -> list[str]:
    return [str(x) for x in cast("Sequence[object]", schema.get("enum", ()))]


def _meant(given: object, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A question after what is wanted.

    >>> _meant("DiLoCo", ["diloco", "lsgd"]), _meant("int3", ["int4", "int8"], cutoff=0.8)
    ('; did you mean diloco?', '')
    """
    close = difflib.get_close_matches(str(given).lower(), list(names), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def _shown(value: object) -> object:
    """The value for people, in YAML's words and never long."""
    match value:
        case None:
            return Words("null")
        case bool():
            return Words(str(value).lower())
        case dict():
            return Words("a mapping")
        case list():
            return value if len(str(value)) <= _MAX_SHOWN else Words("a list")
        case str() if len(value) > _MAX_SHOWN:
            return f"{value[: _MAX_SHOWN - 3]}..."
        case int() if value.bit_length() > 256:
            return Words("a huge number")
        case _:
            return value
