"""Stages' weights put together into a directory that `transformers` opens.

No torch: a safetensors file is eight bytes of length, a JSON header and raw numbers, and these are copied in pieces.
Where an exported tensor is the mean of several, pieces of all of them are read side by side.
"""

import json
import math
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from skein.errors import UserError
from skein.model.layers import AnyModel
from skein.model.parameters import parameter_shapes
from skein.model.rows import made_of, whole_shapes

_PIECE_ELEMENTS = 1 << 19
_MAX_HEADER_BYTES = 100_000_000
_NUM_BYTES = {"F32": 4, "F64": 8}
_FORMATS = {"F32": "<f4", "F64": "<f8"}
_NAMES = {"fp32": "F32", "bf16": "BF16"}


class Dtype(StrEnum):
    """In what numbers weights are written, in the words of a job's precision."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one number."""
        return 4 if self is Dtype.FP32 else 2

    @property
    def in_torch(self) -> str:
        """Its name in configurations."""
        return "float32" if self is Dtype.FP32 else "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Place where the numbers of one tensor lie."""

    path: Path
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


_Sources = tuple[_Source, ...]
"""Tensors of one shape, of which the mean is wanted."""
_Blocks = tuple[_Sources, ...]
"""Sources of a tensor, or of its blocks of rows one after the other."""


def write_huggingface(
    stage_files: Sequence[Path],
    model: AnyModel,
    out: Path,
    *,
    max_shard_bytes: int,
    prefixes: Sequence[str] = ("",),
    dtype: Dtype = Dtype.FP32,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> list[Path]:
    """Writes configuration and weights to `out`; gives the files' paths.

    The weights are one `model.safetensors`, or where that would be above `max_shard_bytes`, shards of at most that size
    (or of one tensor) with an index. Memory stays at a few MiB. `out` appears at once, complete, or not at all.

    Args:
        stage_files: safetensors with float32 or float64 parameters under their Hugging Face names; what else they hold
            is left out, and of a tensor in several files (tied, in two stages) the first is taken.
        model: what the job trained.
        out: a directory that does not exist, or is empty.
        max_shard_bytes: at least 1.
        prefixes: before a parameter's name, of the tensors whose mean is written, summed in float64 in this order.
        dtype: of the written numbers, rounded to nearest, ties to even.
        beside: further files by name; they take the place of what would be written under their names.

    Raises:
        UserError: `out` is in use or cannot be written; or the files lack a tensor, or hold one of another shape.
    """
    if max_shard_bytes < 1:
        raise UserError("max_shard_bytes", max_shard_bytes, "give at least 1")
    require_unused("out", out)
    sources_by_name = _sources(stage_files, model, prefixes)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as parent:
            directory = Path(parent) / "complete"
            directory.mkdir()
            names = set(_write_weights(directory, sources_by_name, max_shard_bytes, dtype))
            names |= _write_configs(directory, model, dtype)
            for name, content in beside.items():
                (directory / name).write_bytes(content)
            names |= beside.keys()
            directory.replace(out)
    except OSError as error:
        raise UserError(
            "out", str(out), f"cannot be written: {error.filename or out}: {error.strerror}"
        ) from error
    return [out / name for name in sorted(names)]


def require_unused(field: str, folder: Path) -> None:
    """Returns if `folder` does not exist, or is empty.

    Raises:
        UserError: something is there; the error names `field`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(field, str(folder), "exists already; name a new or empty folder")


def _sources(stage_files: Sequence[Path], model: AnyModel, prefixes: Sequence[str]) -> dict[str, _Blocks]:
    """Sources that every tensor of `model` is made of, in the order of its layers."""
    found: dict[str, _Source] = {}
    for path in stage_files:
        for name, source in _header(path).items():
            found.setdefault(name, source)
    shapes = parameter_shapes(model)
    for name, shape in ((f"{prefix}{name}", shape) for name, shape in shapes.items() for prefix in prefixes):
        if name not in found:
            raise UserError("stage_files", [str(path) for path in stage_files], f"none of them holds {name}")
        if found[name].shape != shape:
            hint = f"{name} is {list(found[name].shape)} where the model has {list(shape)}"
            raise UserError("stage_files", str(found[name].path), hint)
    return {
        whole: tuple(tuple(found[f"{prefix}{x}"] for prefix in prefixes) for x in made_of(whole, shapes))
        for whole in whole_shapes(shapes)
    }


def _header(path: Path) -> dict[str, _Source]:
    """The float tensors in a safetensors file."""
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > _MAX_HEADER_BYTES:
                raise ValueError("the header is too long")
            header = json.loads(file.read(header_bytes))
            num_bytes = os.fstat(file.fileno()).st_size
        sources = {
            name: _source(path, entry, 8 + header_bytes)
            for name, entry in header.items()
            if name != "__metadata__" and entry["dtype"] in _NUM_BYTES
        }
    except OSError as error:
        raise UserError("stage_files", str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError("stage_files", str(path), f"is not a safetensors file: {error}") from error
    if any(x.offset + x.num_bytes > num_bytes for x in sources.values()):
        raise UserError("stage_files", str(path), "is cut short")
    return sources


def _source(path: Path, entry: Mapping[str, object], start: int) -> _Source:
    """Source in one entry of a header; `start` is where the numbers of the file begin."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise ValueError("an entry of the header is malformed")
    begin, end = (int(offset) for offset in offsets)
    if begin < 0 or end - begin != math.prod(shape) * _NUM_BYTES[dtype]:
        raise ValueError("sizes and offsets in the header disagree")
    return _Source(path=path, offset=start + begin, num_bytes=end - begin, dtype=dtype, shape=tuple(shape))


def _write_weights(
    directory: Path, sources_by_name: Mapping[str, _Blocks], max_shard_bytes: int, dtype: Dtype
) -> list[str]:
    shards = list(_shards(sources_by_name, max_shard_bytes, dtype))
    if len(shards) == 1:
        _write_safetensors(directory / "model.safetensors", shards[0], dtype)
        return ["model.safetensors"]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(directory / file_name, shard, dtype)
        weight_map |= dict.fromkeys(shard, file_name)
    num_parameters = sum(_num_elements(blocks) for blocks in sources_by_name.values())
    metadata = {"total_parameters": num_parameters, "total_size": num_parameters * dtype.num_bytes}
    _write_json(directory / "model.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})
    return [*sorted(set(weight_map.values())), "model.safetensors.index.json"]


def _num_elements(blocks: _Blocks) -> int:
    return sum(math.prod(sources[0].shape) for sources in blocks)


def _shards(
    sources_by_name: Mapping[str, _Blocks], max_shard_bytes: int, dtype: Dtype
) -> Iterator[dict[str, _Blocks]]:
    """Tensors in order, as many together as fit; one that is too big by itself is alone."""
    shard: dict[str, _Blocks] = {}
    shard_bytes = 0
    for name, blocks in sources_by_name.items():
        num_bytes = _num_elements(blocks) * dtype.num_bytes
        if shard and shard_bytes + num_bytes > max_shard_bytes:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = blocks
        shard_bytes += num_bytes
    yield shard


def _write_safetensors(path: Path, sources_by_name: Mapping[str, _Blocks], dtype: Dtype) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, blocks in sources_by_name.items():
        begin, end = end, end + _num_elements(blocks) * dtype.num_bytes
        shapes = [sources[0].shape for sources in blocks]
        shape = list(shapes[0]) if len(blocks) == 1 else [sum(x[0] for x in shapes), *shapes[0][1:]]
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # numbers begin at a multiple of 8 bytes
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for blocks in sources_by_name.values():
            for sources in blocks:
                _write_mean(sources, file, dtype)
        file.flush()
        os.fsync(file.fileno())


def _write_mean(sources: _Sources, target: BinaryIO, dtype: Dtype) -> None:
    """Appends the mean of `sources` to `target`, little-endian; of one that is its own numbers."""
    num_elements = math.prod(sources[0].shape)
    with ExitStack() as opened:
        files = [opened.enter_context(source.path.open("rb")) for source in sources]
        for source, file in zip(sources, files, strict=True):
            file.seek(source.offset)
        for start in range(0, num_elements, _PIECE_ELEMENTS):
            count = min(_PIECE_ELEMENTS, num_elements - start)
            total = np.zeros(count, np.float64)
            for source, file in zip(sources, files, strict=True):
                total += np.frombuffer(file.read(count * _NUM_BYTES[source.dtype]), _FORMATS[source.dtype])
            mean = (total / len(sources)).astype("<f4")
            target.write((mean if dtype is Dtype.FP32 else _bfloat16(mean)).tobytes())


def _bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32 numbers, rounded to nearest, ties to even; what is no number stays none."""
    bits = numbers.view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint32(0x7FC0), rounded).astype("<u2")


def _write_configs(directory: Path, model: AnyModel, dtype: Dtype) -> set[str]:
    config = model.hugging_face()
    if "dtype" in config:
        config["dtype"] = dtype.in_torch
    _write_json(directory / "config.json", config)
    if model.vocab_size is None:
        return {"config.json"}
    generation = {name: token for name, token in config.items() if name.endswith("_token_id")}
    _write_json(directory / "generation_config.json", generation)
    return {"config.json", "generation_config.json"}


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
