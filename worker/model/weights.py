"""Weights from a Hugging Face directory, as far as a stage needs them."""

import json
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from skein.errors import LocalError, UnfitError, UserError
from skein.model.decoder import HEAD
from skein.model.parameters import parameter_shapes
from skein.model.rows import made_of, parse_block, whole_shapes
from skein.storage.outside import call_moved
from skein.storage.roots import EVERYTHING, Roots
from worker.data.files import readable
from worker.model.base import Stage

_FIELD = "model.init_from"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_Shapes = Mapping[str, tuple[int, ...]]
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def load_huggingface(directory: str | Path, stage: Stage, roots: Roots = EVERYTHING) -> None:
    """Fills the parameters of `stage` from safetensors in `directory`, one file or several with an index.

    Only the tensors of the stage are read, one at a time, and cast to the dtype of its parameters. After an error the
    stage holds a mixture and must be thrown away. All of them lie in `roots`, or are what these offer.

    Raises:
        UnfitError: something is missing or cannot be read on this machine.
        UserError: something is of another shape, no safetensors, or of a model that computes differently.
    """
    stage.spec.check_config(_read_object(f"{directory}/config.json", roots))
    parameter_by_name = dict(stage.named_parameters())
    shapes = whole_shapes(parameter_shapes(stage.spec))
    with readable(_FIELD, directory):
        file_by_whole = _files(str(directory), {_whole(name) for name in parameter_by_name}, roots)
    file_by_name = {name: file_by_whole[_whole(name)] for name in parameter_by_name}
    for path, names in groupby(
        sorted(parameter_by_name, key=file_by_name.__getitem__), file_by_name.__getitem__
    ):
        _load_file(path, {name: parameter_by_name[name] for name in names}, shapes, roots)


def load_parameters(tensors: Mapping[str, torch.Tensor], stage: Stage) -> None:
    """Fills the parameters of `stage` by name, cast to their dtype; blocks of rows from whole tensors, or the reverse.

    Raises:
        LocalError: one is of another shape.
    """
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            source = _put_together(name, tensors)
            if source.shape != parameter.shape:
                wanted, found = tuple(parameter.shape), tuple(source.shape)
                raise LocalError(f"{name} should be {wanted}, found {found}")
            parameter.copy_(source)


def _put_together(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor of that name, or what it is made of."""
    if name in tensors:
        return tensors[name]
    block = parse_block(name)
    parts = [tensors[x] for x in made_of(name, tensors)]
    return torch.cat(parts) if block is None else parts[0][block.rows.start : block.rows.stop]


def _whole(name: str) -> str:
    """Name of the whole tensor."""
    block = parse_block(name)
    return name if block is None else block.whole


def _files(directory: str, names: Iterable[str], roots: Roots) -> dict[str, str]:
    """File that holds each of `names`, by name."""
    single, index = f"{directory}/{_SINGLE}", f"{directory}/{_INDEX}"
    if _is_file(single, roots):
        return dict.fromkeys(names, single)
    if not _is_file(index, roots):
        hint = f"has neither {_SINGLE} nor {_INDEX}; save_pretrained of transformers writes them"
        raise UnfitError(_FIELD, directory, hint)
    weight_map = _read_object(index, roots).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise UserError(_FIELD, index, "has no weight_map")
    return {name: f"{directory}/{_indexed(index, name, weight_map.get(name))}" for name in names}


def _is_file(path: str, roots: Roots) -> bool:
    return roots.find(path, field=_FIELD).path.is_file()


def _indexed(index: str, name: str, file_name: object) -> str:
    if file_name is None:
        raise UserError(_FIELD, index, f"does not list {name}")
    # The index may come from anywhere: it must not lead out of the directory.
    if not isinstance(file_name, str) or Path(file_name).name != file_name:
        raise UserError(_FIELD, index, f"{file_name!r} is not the name of a file beside it")
    return file_name


def _check_known(path: str, held: Iterable[str], known: Collection[str]) -> None:
    """Refuses tensors that the model does not compute with: without them its numbers would be others."""
    for name in sorted(held):
        # Tables that old releases saved, and a head that is tied and so never used.
        if name not in known and not name.endswith(".rotary_emb.inv_freq") and name != HEAD:
            raise UserError(_FIELD, path, f"holds {name}, which the model does not have")


def _load_file(
    path: str, parameter_by_name: Mapping[str, torch.nn.Parameter], shapes: _Shapes, roots: Roots
) -> None:
    try:
        with (
            readable(_FIELD, path),
            roots.find(path, field=_FIELD).open() as file,
            safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt") as tensors,
        ):
            held = frozenset(tensors.keys())
            _check_known(path, held, shapes.keys())
            for name, parameter in parameter_by_name.items():
                whole, block = _whole(name), parse_block(name)
                if whole not in held:
                    raise UserError(_FIELD, path, f"does not hold {whole}")
                part = tensors.get_slice(whole)
                _check(path, whole, tuple(part.get_shape()), part.get_dtype(), shapes[whole])
                with torch.no_grad():
                    rows = slice(None) if block is None else slice(block.rows.start, block.rows.stop)
                    parameter.copy_(part[rows])
                call_moved()
    except SafetensorError as error:
        raise UserError(_FIELD, path, f"cannot be read as safetensors: {error}") from error


def _check(path: str, name: str, theirs: tuple[int, ...], dtype: str, ours: tuple[int, ...]) -> None:
    if theirs != ours:
        raise UserError(_FIELD, path, f"{name} is {list(theirs)} where the model has {list(ours)}")
    if dtype not in _FLOATS:
        raise UserError(_FIELD, path, f"{name} is {dtype}; floating-point numbers are needed")


def _read_object(path: str, roots: Roots) -> Mapping[str, object]:
    with readable(_FIELD, path), roots.find(path, field=_FIELD).open() as file:
        content = file.read()
    try:
        value: object = json.loads(content.decode())
    except ValueError as error:
        raise UserError(_FIELD, path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(_FIELD, path, "is not a JSON object")
    return value
