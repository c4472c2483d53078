"""JSON of views: what `--json` prints is what the coordinator's page is given."""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from enum import Enum

from skein.wire.views import JobEvent, JobStatus

_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


def plain(value: object) -> object:
    """`value` in what JSON has: dataclasses become objects with their fields, a job's specification included as one
    (null in a list, which has none); what is not finite becomes null.

    >>> plain({"a": (1, math.nan)})
    {'a': [1, None]}
    """
    match value:
        case Enum():
            return value.value
        case float() if not math.isfinite(value):
            return None
        case JobStatus():
            return _fields(value) | {"spec": json.loads(value.spec or "null")}
        case JobEvent():
            # Its kind goes before the kind's own fields.
            word = _CAPITAL.sub("_", type(value.body).__name__).lower()
            head = {
                "sequence": value.sequence,
                "line_number": value.line,
                "wall_s": value.wall_s,
                "event": word,
            }
            return head | _fields(value.body)
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(key): plain(entry) for key, entry in value.items()}
        case Iterable():
            return [plain(entry) for entry in value]
        case _ if dataclasses.is_dataclass(value):
            return _fields(value)
        case _:
            return str(value)


def _fields(value: object) -> dict[str, object]:
    assert dataclasses.is_dataclass(value)
    return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
