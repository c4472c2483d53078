"""Job files: YAML text into a `JobSpec`, or a list of what is wrong with it, one line each.

Rules: what a file says is taken as it stands (no numbers in quotes, no aliases, no YAML 1.1 surprises such as `no`
for false or `12:30` for 750), so every reader of the file sees the same job; and no key is silently ignored.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NoReturn

import yaml
from pydantic import ValidationError

from skein.config.explain import Words, explain_mistakes
from skein.config.job import JobSpec
from skein.errors import UserError

Document = dict[str, object]
"""A job file as plain values, not yet checked."""

MAX_CHARACTERS = 100_000
_SIGNS = ("*", "&", "!", "%", "@", "`")
"""Signs that begin no plain YAML value: what begins with one is text in an override, as `data.sources[0].glob=*.py`."""


class JobFileErrors(UserError):
    """All that is wrong with a job file. As a `UserError` it is the first mistake; its text has a line for each."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        first = errors[0]
        super().__init__(first.field, first.value, first.hint)
        self.args = ("\n".join(map(str, errors)),)
        self.errors = tuple(errors)


def parse_job(text: str, *, origin: str, overrides: Sequence[str] = ()) -> JobSpec:
    """The job that the YAML in `text` describes.

    Args:
        text: a mapping with the fields of `JobSpec`.
        origin: where the text is from, for people: it names the place of what is not YAML.
        overrides: see `apply_overrides`.

    Raises:
        JobFileErrors: all mistakes that could be found.

    >>> parse_job("{name: a, model: {family: llama}, budget: {}}", origin="job.yaml")
    Traceback (most recent call last):
    skein.config.load.JobFileErrors: data: missing: give a mapping with sources
    budget.steps: none: give steps, tokens or epochs, with hours beside them if wanted
    """
    return job_from_document(apply_overrides(parse_document(text, origin=origin), overrides))


def job_from_document(document: Document) -> JobSpec:
    """The job that plain values describe.

    Raises:
        JobFileErrors: all mistakes that could be found.
    """
    return job_from_json(json.dumps(document))


def job_from_json(text: str) -> JobSpec:
    """The job that JSON describes.

    Raises:
        JobFileErrors: all mistakes that could be found.
    """
    try:
        # JSON and strict: lists become tuples and words enums, but "5" is no number and true is not 1.
        return JobSpec.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise JobFileErrors(explain_mistakes(error, job_schema())) from error


@cache
def job_schema() -> Document:
    """JSON Schema of a job file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **JobSpec.model_json_schema()}


# --- YAML ---


def parse_document(text: str, *, origin: str) -> Document:
    """The values in the YAML mapping `text`.

    Raises:
        JobFileErrors: it is no YAML, no mapping, or gives a key twice.
    """
    if len(text) > MAX_CHARACTERS:
        hint = f"is no job file: those have at most {MAX_CHARACTERS} characters"
        raise JobFileErrors([UserError(origin, Words(f"{len(text)} characters"), hint)])
    node, value = _read(text, origin)
    repeated = [] if node is None else list(_repeated_keys(node, ""))
    if repeated:
        raise JobFileErrors(repeated)
    if not isinstance(value, dict):
        found = "nothing" if value is None else "a list" if isinstance(value, list) else "a plain value"
        hint = "give a mapping of fields to values; `skein job schema` lists a job's"
        raise JobFileErrors([UserError(origin, Words(found), hint)])
    return {str(key): entry for key, entry in value.items()}


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """`document` with some values replaced. Each override is `path=value`, the value in YAML.

    Raises:
        JobFileErrors: an override has no `=`, its value is no YAML, or its path leads through a plain value.

    >>> apply_overrides({"data": {"sources": [{}]}}, ["seed=3", "data.sources[0].path=/books"])
    {'data': {'sources': [{'path': '/books'}]}, 'seed': 3}
    """
    changed: Document = json.loads(json.dumps(document))
    for override in overrides:
        path, separator, text = override.partition("=")
        keys = re.findall(r"[^.\[\]\s]+", path)
        if not separator or not keys:
            hint = "give a field and a value, for example budget.steps=500"
            raise JobFileErrors([UserError("--set", override, hint)])
        is_plain = text.startswith(_SIGNS)
        _replace(changed, keys, text if is_plain else _read(text, f"--set {path}")[1], override)
    return changed


def _replace(document: Document, keys: Sequence[str], value: object, override: str) -> None:
    """Sets the value at `keys`, making mappings on the way where there is nothing."""
    place: object = document
    for number, key in enumerate(keys):
        is_last = number == len(keys) - 1
        if isinstance(place, dict):
            if is_last:
                place[key] = value
            elif place.get(key) is None:
                place[key] = {}
            place = place[key]
        elif isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            if is_last:
                place[int(key)] = value
            place = place[int(key)]
        else:
            found = f"list of {len(place)}" if isinstance(place, list) else "plain value"
            hint = f"{'.'.join(keys[:number])} is a {found} and has no {key}"
            raise JobFileErrors([UserError("--set", override, hint)])


def _read(text: str, origin: str) -> tuple[yaml.Node | None, object]:
    """The nodes and the values of the one YAML document in `text`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise JobFileErrors([_syntax_error(error, text, origin)]) from error
    except yaml.YAMLError as error:  # only the reader's, about characters
        hint = f"{str(error).splitlines()[0]}; write plain UTF-8 text"
        raise JobFileErrors([UserError(origin, Words("not YAML"), hint)]) from error
    except RecursionError as error:
        raise JobFileErrors([UserError(origin, Words("not a job"), "is nested too deeply")]) from error
    except ValueError as error:
        hint = f"holds a value that cannot be read: {str(error).partition(';')[0]}"
        raise JobFileErrors([UserError(origin, Words("not a job"), hint)]) from error


def _syntax_error(error: yaml.MarkedYAMLError, text: str, origin: str) -> UserError:
    mark = error.problem_mark or error.context_mark
    hint = ", ".join(filter(None, (error.context, error.problem)))
    if "'\\t'" in hint:
        hint += ": indent with spaces, never with tabs"
    elif not isinstance(error, _NotRead):
        hint += ": check indentation, colons, brackets and quotes there"
    if mark is None:
        return UserError(origin, Words("not YAML"), hint)
    lines = text.splitlines()
    line = lines[mark.line].strip() if mark.line < len(lines) else Words("end of text")
    return UserError(f"{origin} line {mark.line + 1} column {mark.column + 1}", line[:80], hint)


def _repeated_keys(node: yaml.Node, path: str) -> Iterator[UserError]:
    if isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            yield from _repeated_keys(entry, f"{path}[{index}]")
    if not isinstance(node, yaml.MappingNode):
        return
    line_by_key: dict[str, int] = {}
    for key, value in node.value:
        name = str(key.value)
        inner = f"{path}.{name}" if path else name
        line = key.start_mark.line + 1
        if name in line_by_key:
            hint = f"keep one: it stands in line {line_by_key[name]} and again in line {line}"
            yield UserError(inner, Words("given twice"), hint)
        line_by_key.setdefault(name, line)
        yield from _repeated_keys(value, inner)


class _NotRead(yaml.MarkedYAMLError):
    """Proper YAML that no job file needs."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core types and nothing else: no aliases, dates, binary, sets or tags of one's own."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (as the parent declares it)
    yaml_constructors = {  # noqa: RUF012
        f"tag:yaml.org,2002:{kind}": yaml.SafeLoader.yaml_constructors[f"tag:yaml.org,2002:{kind}"]
        for kind in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _NotRead(problem="aliases are not read: write the value out", problem_mark=mark)
        return super().compose_node(parent, index)

    def refuse_tag(self, node: yaml.Node) -> NoReturn:
        raise _NotRead(problem=f"no tag {node.tag} is read: leave it out", problem_mark=node.start_mark)


_Loader.add_constructor(None, _Loader.refuse_tag)
for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", "-+0123456789"),
    ("float", r"[-+]?[0-9_]*(\.[0-9]+|[0-9]\.|[0-9](?=[eE]))([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
):
    # The empty string is the first character of an empty value.
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), [*_first, ""])
