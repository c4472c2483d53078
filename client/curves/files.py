"""Curves in files: CSV for tables, event files for TensorBoard, a history for Weights & Biases."""

import csv
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO, TextIO

from skein.errors import UserError
from skein.wire.shown.points import Point, measures

COLUMNS = tuple(field.name for field in fields(Point))
HISTORY, CONFIG, SUMMARY = "history.jsonl", "config.json", "summary.json"


def write_csv(points: Iterable[Point], file: TextIO) -> None:
    """Write one row for each point under a row of names; what is not known is empty."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for point in points:
        values = (getattr(point, name) for name in COLUMNS)
        writer.writerow(["" if value is None else value for value in values])


@contextmanager
def _writing(folder: Path, name: str) -> Iterator[BinaryIO]:
    """A file of that name that is there, complete, at the end, or not at all."""
    part = folder / f".{name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            yield file
        part.replace(folder / name)
    except OSError as error:
        raise UserError("folder", str(folder), f"cannot be written: {error.strerror}") from error


# --- TensorBoard ---


def write_tensorboard(points: Sequence[Point], folder: Path, *, name: str) -> Path:
    """An event file in `folder` with a scalar for each of `MEASURES`; gives its path. What was there is replaced.

    Source: TensorFlow's formats of records (`record_writer.h`) and events (`event.proto`, `summary.proto`).

    Raises:
        UserError: `folder` cannot be written.
    """
    # TensorBoard takes a file for one of its own by this word in its name; a fixed time makes it the same each time.
    path = folder / f"events.out.tfevents.0000000000.{name}"
    began_s = points[0].wall_s if points else 0.0
    with _writing(folder, path.name) as file:
        file.write(_framed(_double(1, began_s) + _text(3, "brain.Event:2")))
        for point in points:
            values = b"".join(
                _message(1, _text(1, f"train/{measure}") + _float(2, value))
                for measure, value in measures(point).items()
            )
            file.write(_framed(_double(1, point.wall_s) + _integer(2, point.step) + _message(5, values)))
    return path


def _framed(event: bytes) -> bytes:
    """A record: length, its checksum, content, its checksum."""
    length = struct.pack("<Q", len(event))
    return length + _checksum(length) + event + _checksum(event)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, turned by 15 bits and moved, so that checksums of data with checksums in it stay good."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC = tuple(map(_crc_of, range(256)))


def _varint(number: int) -> bytes:
    digits = []
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    kept = value if abs(value) <= 3.4e38 or not math.isfinite(value) else math.copysign(math.inf, value)
    return _varint(field << 3 | 5) + struct.pack("<f", kept)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


# --- Weights & Biases ---


def write_history(points: Sequence[Point], folder: Path, *, name: str, config: str) -> None:
    """Write what `wandb.init` and `Run.log` take, to be replayed where that package and its service are.

    `history.jsonl` has a line for each point, with `_step` and `_timestamp` as in a history of W&B; `config.json` the
    job, `summary.json` the last value of each curve and the run's name. It is not W&B's own binary file of a run.

    Args:
        points: in order.
        folder: made if it is not there.
        name: of the run.
        config: JSON of what was trained.

    Raises:
        UserError: `folder` cannot be written.
    """
    last: dict[str, float] = {}
    with _writing(folder, HISTORY) as file:
        for point in points:
            last |= measures(point)
            row = {"_step": point.step, "_timestamp": point.wall_s, **_named(measures(point))}
            file.write(json.dumps(row).encode() + b"\n")
    for other, value in ((CONFIG, json.loads(config)), (SUMMARY, {"name": name, **_named(last)})):
        with _writing(folder, other) as file:
            file.write(json.dumps(value, indent=1).encode() + b"\n")


def _named(values: Mapping[str, float]) -> dict[str, float | str]:
    """With the names that curves have there; numbers that JSON lacks as W&B writes them."""
    return {
        f"train/{name}": value if math.isfinite(value) else _word(value) for name, value in values.items()
    }


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
