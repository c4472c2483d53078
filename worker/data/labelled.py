"""Samples with a class each, in memory: scikit-learn's digits, arrays in a file, lines of JSON."""

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skein.config.data.sources import ArraysSource, DigitsSource, JsonlSource
from skein.config.data.spec import NEWEST_RULES
from skein.errors import UserError
from skein.model.layers import LabelledShape
from skein.storage.outside import call_moved
from skein.storage.roots import Roots
from skein.units import format_bytes
from worker.data.arrays import MOST_BYTES, Numbers, read_arrays
from worker.data.digits import open_digits
from worker.data.documents import GZIP, objects_of_json, value_of
from worker.data.files import open_files

_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSamples:
    """Samples (N, ...), float32, in the shape that the model takes, and their classes (N,), int64."""

    samples: NDArray[np.float32]
    labels: NDArray[np.int64]
    digest: str

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    @property
    def has_changed(self) -> bool:
        """False: they are in memory."""
        return False

    def read(self, sample: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """A sample and its class, a scalar."""
        return self.samples[sample], np.asarray(self.labels[sample])

    def read_many(self, samples: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Samples side by side, each as `read` has it."""
        places = np.asarray(samples, np.int64)
        return self.samples[places], self.labels[places]


def open_labelled(
    source: DigitsSource | ArraysSource | JsonlSource,
    shape: LabelledShape,
    *,
    field: str,
    roots: Roots,
    rules: int = NEWEST_RULES,
) -> LabelledSamples:
    """The samples of a source as a classifier takes them.

    Args:
        field: the source in the job file, such as `data.sources[0]`.
        rules: version of the rules by which files become samples.

    Raises:
        UserError: they cannot be read here, are not finite, or do not fit the model.
    """
    samples: Numbers
    labels: Numbers
    match source:
        case DigitsSource():
            samples, labels = open_digits(field=field)
        case ArraysSource():
            samples, labels = read_arrays(source, field=field, roots=roots)
        case JsonlSource():
            samples, labels = _lines(source, shape, field=field, roots=roots, rules=rules)
    path = f"{field}.format" if isinstance(source, DigitsSource) else f"{field}.path"
    value = source.format if isinstance(source, DigitsSource) else source.path
    return _fitted(samples, labels, shape, path, value)


def _fitted(
    samples: Numbers,
    labels: Numbers,
    shape: LabelledShape,
    field: str,
    value: str,
) -> LabelledSamples:
    num_features = math.prod(samples.shape[1:])
    if num_features != shape.num_features:
        hint = f"has samples of {num_features} numbers, the model takes {shape.num_features}: " + (
            "set model.num_features" if len(shape.sample) == 1 else f"give samples of {shape.sample}"
        )
        raise UserError(field, value, hint)
    wrong = np.flatnonzero((labels < 0) | (labels >= shape.num_classes))
    if len(wrong):
        row = int(wrong[0])
        hint = f"row {row} is of class {labels[row]}, the model has classes 0 to {shape.num_classes - 1}"
        raise UserError(field, value, hint)
    # A float64 too large for a float32 becomes infinite, and is told below.
    with np.errstate(over="ignore"):
        fitted = np.ascontiguousarray(samples.reshape(len(samples), *shape.sample), np.float32)
    finite = np.isfinite(fitted.reshape(len(fitted), -1)).all(axis=1)
    if not finite.all():
        hint = f"row {int(np.argmin(finite))} is not finite in float32: leave such rows out"
        raise UserError(field, value, hint)
    classes = labels.astype(np.int64)
    return LabelledSamples(samples=fitted, labels=classes, digest=_digest(fitted, classes))


def _digest(*arrays: NDArray[np.float32] | NDArray[np.int64]) -> str:
    total = hashlib.sha256()
    for array in arrays:
        content = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(content), _PIECE_BYTES):
            total.update(content[start : start + _PIECE_BYTES])
            call_moved()
    return total.hexdigest()


def _lines(
    source: JsonlSource, shape: LabelledShape, *, field: str, roots: Roots, rules: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    key = source.label
    assert key is not None, "a classifier reads lines with labels"
    patterns = ("**/*.jsonl", f"**/*.jsonl{GZIP}")
    files = open_files(source.path, patterns, field=field, roots=roots, rules=rules)
    samples: list[NDArray[np.float32]] = []
    labels: list[int] = []
    for where, found in objects_of_json(files, field):
        samples.append(_numbers(found, source.field, shape, where, field))
        labels.append(_class(found, key, where, field))
        if len(samples) * 4 * shape.num_features > MOST_BYTES:
            hint = f"holds more than {format_bytes(MOST_BYTES)} of samples: give fewer"
            raise UserError(f"{field}.path", source.path, hint)
    if not samples:
        raise UserError(f"{field}.path", source.path, "holds no line: give at least one sample")
    return np.stack(samples), np.array(labels, np.int64)


def _numbers(
    found: Mapping[str, object], key: str, shape: LabelledShape, where: str, field: str
) -> NDArray[np.float32]:
    value = value_of(found, key, where, f"{field}.field", wanted="numbers")
    hint = f"{where} has no list of {shape.num_features} numbers there: give one in every line"
    flat = _flattened(value)
    if len(flat) != shape.num_features:
        raise UserError(f"{field}.field", key, hint)
    with np.errstate(over="ignore"):
        return np.array(flat, np.float64).astype(np.float32)


def _flattened(value: object) -> list[float]:
    """The numbers in a list, or in lists of lists; none if there is anything else in it."""
    flat: list[float] = []
    waiting = [value]
    while waiting:
        now = waiting.pop()
        if isinstance(now, list):
            waiting.extend(reversed(now))
        elif isinstance(now, bool) or not isinstance(now, int | float) or abs(now) > sys.float_info.max:
            return []
        else:
            flat.append(float(now))
    return flat


def _class(found: Mapping[str, object], key: str, where: str, field: str) -> int:
    value = value_of(found, key, where, f"{field}.label", wanted="class")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise UserError(f"{field}.label", key, f"{where} has no class there: give a whole number from 0 on")
    return value
