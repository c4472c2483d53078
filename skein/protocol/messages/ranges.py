"""Ranges of the numbers in messages. One table for all messages, applied wherever one comes in.

Rules of this file
- Each range has its fields: a name, or `Message.field` where one message has another range than the rest.
- A field of numeric type without a range is refused by a test: who adds a field says what it may be.
- A number is in its range or the whole message is refused: nothing is clamped, for nobody would learn of it.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

from skein.errors import OutOfRangeError
from skein.types import GroupId

MAX_INTEGER = 2**63 - 1
"""Above this a uint64 is refused: SQLite and numpy hold signed integers."""

Number = int | float
_NUMBER = (int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Interval from `least` to `most`, both included; `hint` says so in words.

    `may_be_not_finite`: infinities and NaN are honest too, as the loss of a model that diverges.
    """

    least: Number
    most: Number
    hint: str
    may_be_not_finite: bool = False

    def check(self, where: str, value: Number) -> None:
        """Refuse a number outside.

        Raises:
            OutOfRangeError: naming the field, the value, and what would be right.
        """
        if self.least <= value <= self.most or (self.may_be_not_finite and not math.isfinite(value)):
            return
        raise OutOfRangeError(where, value, f"give {self.hint}")


COUNT = Range(least=0, most=MAX_INTEGER, hint=f"a whole number of at most {MAX_INTEGER}")
INDEX = Range(least=0, most=2**16 - 1, hint="a whole number below 65536")
MICROBATCH = Range(least=0, most=2**24 - 1, hint="a microbatch's number, below 16777216")
PRIORITY = Range(least=-1000, most=1000, hint="a whole number from -1000 to 1000")
WORD = Range(least=0, most=2**32 - 1, hint="a whole number of 32 bits")
BYTES = Range(least=0, most=2**60, hint="a number of bytes up to 2^60")
SECONDS = Range(least=0.0, most=1e9, hint="seconds, from 0 to 1e9")
WALL = Range(least=0.0, most=1e12, hint="Unix seconds, from 0 to 1e12")
RATE = Range(least=0.0, most=1e18, hint="so many a second, from 0 to 1e18")
SPEED = Range(least=1.0, most=1e21, hint="operations a second, from 1 to 1e21")
BANDWIDTH = Range(least=1e-6, most=1e18, hint="bytes a second, above 0 and up to 1e18")
STATISTIC = Range(least=0.0, most=1e300, hint="a finite number of at least 0")
FACTOR = Range(least=-1e30, most=1e30, hint="a finite factor, from -1e30 to 1e30")
SKETCH = Range(least=-1e300, most=1e300, hint="a number within 1e300, or not finite", may_be_not_finite=True)
LEARNING_RATE = Range(least=0.0, most=1e9, hint="a learning rate, from 0 to 1e9")
# What diverges goes through all that a float holds before it is not finite, and its worker does nothing wrong.
LOSS = Range(
    least=-1e300, most=sys.float_info.max, hint="nats, from -1e300 on, or not finite", may_be_not_finite=True
)
NORM = Range(least=0.0, most=1.7e308, hint="a norm of at least 0, or not finite", may_be_not_finite=True)

_FIELDS = {
    COUNT: (
        "epoch generation number step version from_version to_version checkpoint_version keeps "
        "JobResumed.steps ResumeRequest.steps last_good due_step taken_at drops_before total_steps "
        "samples_after num_late_samples progress sequence since until since_line line entry tensor seed num_tokens "
        "tokens num_train_samples num_validation_samples num_incidents num_files num_steps_lost num_steps "
        "num_choices Balance.num_dropped num_updates num_rewinds num_local_steps num_rows num_set_aside num_by_chance "
        "num_steps_beside passes next_version num_steps_wanted num_collectives num_fits num_jobs assigned"
    ),
    WORD: (
        "protocol_version num_rerouted num_retried num_samples_repeated num_dropped num_tensors "
        "num_workers num_holders num_asked limit checksum reply_bytes uses part num_parts counts num_faults "
        "CandidatesPicked.groups num_picks trial trials row num_devices num_known"
    ),
    INDEX: "stage stages index first stop hop split shard num_shards fragment walker walkers leader parents members",
    PRIORITY: "priority",
    MICROBATCH: (
        "microbatch microbatches num_microbatches ledger forwards pending outputs gradients slots num_paths "
        "num_evaluation_paths evaluation_paths planned_peaks held_peaks"
    ),
    BYTES: "num_bytes row_bytes memory_bytes missing_bytes fixed_bytes slot_bytes offset shape used most",
    SECONDS: (
        "seconds forward_s backward_s loss_s weight_s latency_s running_s elapsed_s lease_s beat_s beat_age_s "
        "measured_age_s link_s silent_s fenced_s step_s measured_step_s predicted_step_s lower_bound_s life_s "
        "predicted_s measured_s"
    ),
    WALL: "wall_s submitted_wall_s opened_s origin_s waiting_since_wall_s since_s ends_s revoked_s",
    SPEED: "flops_per_s",
    STATISTIC: "spread predicted_spread planned_bubble bubble Count.value drop_ratio speedup overhead largest_weight "
    "busiest_expert idlest_expert",
    BANDWIDTH: "bytes_per_s",
    RATE: "tokens_per_s",
    LOSS: "loss loss_sum probe_loss evaluation_loss balance_loss",
    NORM: "squared_norm gradient_norm clip farness chance_farness",
    SKETCH: "SketchTaken.values",
    LEARNING_RATE: "learning_rate learning_rate_ratio",
    FACTOR: "weight weights scales r_squared",
}

RANGES: Mapping[str, Range] = {field: row for row, fields in _FIELDS.items() for field in fields.split()}


def range_of(message: str, field: str) -> Range | None:
    """The range of a field; None: it has none."""
    return RANGES.get(f"{message}.{field}") or RANGES.get(field)


# --- of domain values, for who has no message: the simulator ---

Check = Callable[[object], None]


def check_numbers(value: object) -> None:
    """Look at every number in a dataclass that travels.

    Raises:
        OutOfRangeError: one is outside its range.
    """
    kind: type = type(value)
    for name, check in _checks_of(kind):
        check(getattr(value, name))


@cache
def _checks_of(cls: type) -> tuple[tuple[str, Check], ...]:
    """Checks of those fields of a class that have numbers in them, each with the field's name."""
    hints = get_type_hints(cls)
    return tuple(
        (name, check)
        for name, hint in hints.items()
        if (check := _check_hint(hint, cls.__name__, name)) is not None
    )


def _check_hint(hint: object, message: str, field: str) -> Check | None:
    while (supertype := getattr(hint, "__supertype__", None)) is not None:
        hint = supertype
    if hint in (int, float):
        return _check_number(message, field)
    if hint == GroupId:
        return None  # A text on the wire: which there are, the plan says.
    if get_origin(hint) is tuple:
        inner = _check_hint(get_args(hint)[0], message, field)
        return None if inner is None else _check_each(inner)
    if get_origin(hint) in (UnionType, Union):
        inner = next((_check_hint(h, message, field) for h in get_args(hint) if h in (int, float)), None)
        return _check_if_any(inner or check_numbers)
    return check_numbers if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def _check_number(message: str, field: str) -> Check | None:
    row, where = range_of(message, field), f"{message}.{field}"
    if row is None:
        return None
    least, most = row.least, row.most

    def check(value: object) -> None:
        assert isinstance(value, _NUMBER)
        if not least <= value <= most:
            row.check(where, value)

    return check


def _check_each(inner: Check) -> Check:
    def check(values: object) -> None:
        for value in values:  # type: ignore[attr-defined]
            inner(value)

    return check


def _check_if_any(inner: Check) -> Check:
    def check(value: object) -> None:
        if value is not None:
            inner(value)

    return check
