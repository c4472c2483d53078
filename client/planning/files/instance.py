"""Instance files: one path-scheduling problem as JSON, read into a `Problem` and refused where it makes no sense.

The format is that of SkipPipe's published instances: workers are numbers, a link is what one boundary tensor takes on
it, memory is a number of slots, every origin sends `waves * memory` microbatches, the layout is `LOOP`.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from skein.config.explain import Words
from skein.errors import UserError
from skein.plan.route.problem import F64, Problem, Reduction
from skein.types import Layout

Instance = Mapping[str, object]
"""Contents of the JSON, not yet checked."""

MAX_SWAPS = 2
MAX_JUMP = 4
"""Bounds of swaps and jumps where an instance does not say: those of the reference."""

_REDUCTION = ("grad_bytes_per_stage", "latency_ms", "bandwidth_gib_s")
_READ = (
    "name", "n_nodes", "n_stages", "stage_sizes", "path_len", "memory", "waves", "max_swaps", "max_jump",
    "fwd_s", "bwd_s", "bwd_factor", "loss_s", "loss_factor", "comm_s", "locations", "activation_bytes", *_REDUCTION,
)  # fmt: skip
_TOLD = ("note", "seed", "skip_ratio", "mb_per_stage_cap", "agents", "microbatches", "fixed_overhead_s")
"""Keys that follow from the rest, or only explain it."""
_GIB = 2**30
_MAX_SHOWN = 80
_MAX_BITS = 128
_MOST = 1e100
"""Bound of any quantity: sums and products of what is below stay finite."""


def problem_of(instance: Instance) -> Problem:
    """The problem in an instance file.

    Aggregation is part of it if the file has gradient bytes, latencies and bandwidths; see `remarks`.

    Raises:
        UserError: the first thing that is wrong with it.
    """
    fields = _Fields(instance)
    num_workers = fields.whole("n_nodes", least=1)
    sizes = _stage_sizes(fields, num_workers)
    path_len = fields.whole("path_len", least=1, most=len(sizes))
    memory, waves = fields.whole("memory", least=1), fields.whole("waves", least=1)
    forward_s = fields.vector("fwd_s", num_workers)
    backward_s = fields.vector_or_factor("bwd_s", "bwd_factor", forward_s)
    loss_s = fields.vector_or_factor("loss_s", "loss_factor", forward_s)
    transfer_s = fields.matrix("comm_s", num_workers)
    problem = Problem(
        name=fields.text("name", default="instance"),
        layout=Layout.LOOP,
        stage_sizes=sizes,
        path_len=path_len,
        num_by_origin=(memory * waves,) * sizes[0],
        max_swaps=fields.whole("max_swaps", least=0, default=MAX_SWAPS),
        max_jump=fields.whole("max_jump", least=1, default=MAX_JUMP),
        forward_s=_per_stage(forward_s, sizes),
        backward_s=_per_stage(backward_s, sizes),
        loss_s=loss_s,
        transfer_s=transfer_s,
        wire_s=np.zeros_like(transfer_s),
        slots=np.full((num_workers, len(sizes)), memory, dtype=np.int64),
        reduction=_reduction(fields, num_workers, len(sizes)),
    )
    _check_reach(problem)
    return problem


def locations_of(instance: Instance) -> tuple[str, ...] | None:
    """Location of each worker; None if the instance does not say.

    Raises:
        UserError: they are no names, or not one for each worker.
    """
    given = instance.get("locations")
    if given is None:
        return None
    num_workers = _Fields(instance).whole("n_nodes", least=1)
    if not isinstance(given, list) or not all(isinstance(x, str) for x in given):
        raise UserError("locations", _shown(given), f"give a list of {num_workers} names")
    if len(given) != num_workers:
        raise UserError(
            "locations", Words(f"{len(given)} names"), f"give one for each of {num_workers} workers"
        )
    return tuple(given)


def activation_bytes_of(instance: Instance) -> int | None:
    """Bytes of one boundary tensor, if the instance says.

    Raises:
        UserError: it is no whole number of at least 1.
    """
    if instance.get("activation_bytes") is None:
        return None
    return _Fields(instance).whole("activation_bytes", least=1)


def remarks(instance: Instance) -> tuple[str, ...]:
    """Parts of an instance not read, a sentence each: keys that nobody knows, and why aggregation is left out."""
    unknown = [key for key in sorted(instance) if key not in (*_READ, *_TOLD)]
    found = [f"{key} is not read{_meant(key)}" for key in unknown]
    missing = [key for key in _REDUCTION if instance.get(key) is None]
    if missing:
        found.append(f"aggregation is left out: there is no {' and no '.join(missing)}")
    return tuple(found)


def _meant(key: str) -> str:
    close = difflib.get_close_matches(key, _READ, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _stage_sizes(fields: "_Fields", num_workers: int) -> tuple[int, ...]:
    sizes = fields.wholes("stage_sizes")
    if sum(sizes) != num_workers:
        hint = f"they sum to {sum(sizes)}; give sizes that sum to n_nodes, {num_workers}"
        raise UserError("stage_sizes", list(sizes), hint)
    num_stages = fields.whole("n_stages", least=1, default=len(sizes))
    if num_stages != len(sizes):
        raise UserError("n_stages", num_stages, f"stage_sizes has {len(sizes)} stages: give the same number")
    return sizes


def _per_stage(seconds: F64, sizes: Sequence[int]) -> F64:
    return np.repeat(seconds[:, None], len(sizes), axis=1)


def _reduction(fields: "_Fields", num_workers: int, num_stages: int) -> Reduction | None:
    if any(fields.is_missing(key) for key in _REDUCTION):
        return None
    bandwidth = fields.matrix("bandwidth_gib_s", num_workers, is_above_zero=True) * _GIB
    np.fill_diagonal(bandwidth, np.inf)
    return Reduction(
        num_bytes=np.full(num_stages, fields.number("grad_bytes_per_stage")),
        latency_s=fields.matrix("latency_ms", num_workers) / 1e3,
        bytes_per_s=bandwidth,
    )


def _check_reach(problem: Problem) -> None:
    """Refuses a jump limit under which the last stage is never visited though it must be."""
    if problem.num_stages == 1 or not problem.visits_by_stage[-1]:
        return
    least = math.ceil((problem.num_stages - 1) / (problem.path_len - 1))
    if problem.max_jump < least:
        where = f"in {problem.path_len} hops the last of {problem.num_stages} stages"
        hint = f"{where} is not reached: give at least {least}"
        raise UserError("max_jump", problem.max_jump, hint)


# --- reading ---


@dataclass(frozen=True, slots=True)
class _Fields:
    """Values of an instance by name, each checked when it is asked for. Null counts as missing."""

    instance: Instance

    def is_missing(self, key: str) -> bool:
        return self.instance.get(key) is None

    def whole(self, key: str, *, least: int, most: int | None = None, default: int | None = None) -> int:
        if default is not None and self.is_missing(key):
            return default
        value = self._value(key)
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        if not _is_whole(value) or value < least or (most is not None and value > most):
            raise UserError(key, _shown(value), f"give a whole number {limits}")
        return int(value)

    def wholes(self, key: str) -> tuple[int, ...]:
        value = self._value(key)
        if not isinstance(value, list) or not value or not all(_is_whole(x) and x >= 1 for x in value):
            raise UserError(key, _shown(value), "give a list of whole numbers of at least 1")
        return tuple(int(x) for x in value)

    def number(self, key: str) -> float:
        value = self._value(key)
        if not _is_number(value) or not 0 <= value <= _MOST:
            raise UserError(key, _shown(value), f"give a number from 0 to {_MOST:g}")
        return float(value)

    def text(self, key: str, *, default: str) -> str:
        value = default if self.is_missing(key) else self.instance[key]
        if not isinstance(value, str):
            raise UserError(key, _shown(value), "give text")
        return value

    def vector(self, key: str, length: int) -> F64:
        """(length,) numbers."""
        return _numbers(key, _listed(key, self._value(key), length, "worker"), is_above_zero=False)

    def vector_or_factor(self, key: str, factor_key: str, forward_s: F64) -> F64:
        """`key` for each worker, or `factor_key` times the forward."""
        if not self.is_missing(key):
            return self.vector(key, len(forward_s))
        if self.is_missing(factor_key):
            hint = f"give {key}, seconds for each worker, or {factor_key}, how many forwards it takes"
            raise UserError(factor_key, Words("missing"), hint)
        return self.number(factor_key) * forward_s

    def matrix(self, key: str, size: int, *, is_above_zero: bool = False) -> F64:
        """(size, size) numbers, row sends to column. A worker needs no link to itself: the diagonal becomes 0."""
        value = self._value(key)
        if not isinstance(value, list) or len(value) != size:
            found = Words(f"{len(value)} rows") if isinstance(value, list) else _shown(value)
            raise UserError(key, found, f"give a square matrix: {size} rows of {size} numbers")
        rows = np.zeros((size, size))
        for i, row in enumerate(value):
            others = list(_listed(f"{key}[{i}]", row, size, "receiver"))
            others[i] = 1.0
            rows[i] = _numbers(f"{key}[{i}]", others, is_above_zero=is_above_zero)
        np.fill_diagonal(rows, 0.0)
        return rows

    def _value(self, key: str) -> object:
        if self.is_missing(key):
            raise UserError(key, Words("missing"), f"an instance needs {key}")
        return self.instance[key]


def _listed(key: str, value: object, length: int, what: str) -> Sequence[object]:
    if not isinstance(value, list) or len(value) != length:
        found = Words(f"{len(value)} numbers") if isinstance(value, list) else _shown(value)
        raise UserError(key, found, f"give a list of {length} numbers, one for each {what}")
    return value


def _numbers(key: str, values: Sequence[object], *, is_above_zero: bool) -> F64:
    """`values` as they are, each finite and of at least 0."""
    limit = f"above 0 and at most {_MOST:g}" if is_above_zero else f"from 0 to {_MOST:g}"
    for i, value in enumerate(values):
        if not _is_number(value) or not 0 <= value <= _MOST or (is_above_zero and value == 0):
            raise UserError(f"{key}[{i}]", _shown(value), f"give a number {limit}")
    return np.array(values, dtype=np.float64)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> object:
    """The value for people: in JSON's words and never long."""
    match value:
        case None | bool():
            return Words({None: "null", True: "true", False: "false"}[value])
        case Mapping():
            return Words("an object")
        case int() if value.bit_length() > _MAX_BITS:
            return Words("a huge number")
        case list() if len(str(value)) > _MAX_SHOWN:
            return Words(f"a list of {len(value)}")
        case str() if len(value) > _MAX_SHOWN:
            return f"{value[: _MAX_SHOWN - 3]}..."
        case _:
            return value
