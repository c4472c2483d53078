"""Exports that transformers opens, from stages' files; and what is refused."""

import json
import struct
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from client.export import write_huggingface
from skein.config.job import DigitsCnnModel, LlamaModel, ModelSpec
from skein.errors import UserError
from skein.model.parameters import parameter_shapes
from skein.types import Precision
from tests.worker.model.builders import LLAMAS, MODELS, assert_near, llama, part, samples, whole
from worker.model.weights import load_huggingface

BIG = 1 << 30
# The promise to users: float32 logits of order 1 to 10 after a chain of products.
SAME_LOGITS = 1e-5


def stage_files(
    model: ModelSpec, cut: Sequence[int], directory: Path, *, precision: Precision = Precision.FP32
) -> list[Path]:
    """What a checkpoint of `model`, cut so, might hold: parameters, and the optimizer's state."""
    paths = []
    for index, (first, stop) in enumerate(pairwise(cut)):
        state = part(model, first, stop, precision=precision).state_dict()
        moments = {f"adamw.mean.{name}": torch.full_like(tensor, 9.0) for name, tensor in state.items()}
        paths.append(directory / f"stage-{index}.safetensors")
        save_file(state | moments | {"step": torch.tensor([3])}, paths[-1])
    return paths


def opened_logits(directory: Path, tokens: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert isinstance(model, LlamaForCausalLM)
    with torch.no_grad():
        logits = model(tokens).logits
    assert isinstance(logits, Tensor)
    return logits


@pytest.mark.parametrize("max_shard_bytes", [BIG, 8_000])
@pytest.mark.parametrize("name", LLAMAS)
def test_transformers_opens_the_export_with_the_same_logits(
    name: str, max_shard_bytes: int, tmp_path: Path
) -> None:
    model = MODELS[name]
    out = tmp_path / "out"
    files = stage_files(model, (0, 2, 4), tmp_path)
    paths = write_huggingface(files, model, out, max_shard_bytes=max_shard_bytes)
    assert sorted(paths) == sorted(out.iterdir())
    tokens, _ = samples(model)
    expected = whole(model, precision=Precision.FP32).logits(tokens).detach()
    assert_near(opened_logits(out, tokens), expected, tolerance=SAME_LOGITS)


def test_export_of_float64_is_rounded_to_float32(tmp_path: Path) -> None:
    model = llama(is_tied=False)
    files = stage_files(model, (0, 4), tmp_path, precision=Precision.FP64)
    write_huggingface(files, model, tmp_path / "out", max_shard_bytes=BIG)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in whole(model).named_parameters():
        assert torch.equal(exported[name], parameter.float())


def test_shards_are_numbered_listed_and_within_the_size(tmp_path: Path) -> None:
    model = llama(is_tied=False)
    limit = 8_000
    write_huggingface(stage_files(model, (0, 1, 4), tmp_path), model, tmp_path / "out", max_shard_bytes=limit)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("out/*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    held = {name: path.name for path in shards for name in load_file(path)}
    assert held == index["weight_map"]
    assert held.keys() == parameter_shapes(model).keys()
    for path in shards:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit
    assert index["metadata"]["total_size"] == sum(4 * y.numel() for y in whole(model).parameters())


def test_export_says_that_no_token_ends_a_text(tmp_path: Path) -> None:
    model = llama()
    write_huggingface(stage_files(model, (0, 4), tmp_path), model, tmp_path / "out", max_shard_bytes=BIG)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(opened.config, name) is None
        assert getattr(opened.generation_config, name) is None


def test_our_own_export_can_be_started_from(tmp_path: Path) -> None:
    for model in (llama(), MODELS["digits"]):
        out = tmp_path / model.family
        write_huggingface(stage_files(model, (0, 2, 4), tmp_path), model, out, max_shard_bytes=8_000)
        stage = whole(model, precision=Precision.FP32, seed=99)
        load_huggingface(out, stage)
        for name, parameter in whole(model, precision=Precision.FP32).named_parameters():
            assert torch.equal(stage.get_parameter(name), parameter)


def test_export_of_a_classifier_is_weights_and_configuration(tmp_path: Path) -> None:
    model = DigitsCnnModel(family="digits_cnn", channels=6, num_blocks=2)
    paths = write_huggingface(
        stage_files(model, (0, 1, 3, 4), tmp_path), model, tmp_path / "out", max_shard_bytes=BIG
    )
    assert [path.name for path in paths] == ["config.json", "model.safetensors"]
    with safe_open(paths[1], framework="pt") as tensors:
        assert set(tensors.keys()) == parameter_shapes(model).keys()
        assert tensors.metadata() == {"format": "pt"}


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    model = DigitsCnnModel(family="digits_cnn", channels=512, num_blocks=6)  # 57 MB in six matrices
    files = stage_files(model, (0, 8), tmp_path)
    tracemalloc.start()
    write_huggingface(files, model, tmp_path / "out", max_shard_bytes=BIG)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # One piece of 8 MiB, and what reading it takes.
    assert peak_bytes < 20e6


def test_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    model = llama()
    files = stage_files(model, (0, 4), tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="exists already; name a new or empty folder"):
        write_huggingface(files, model, out, max_shard_bytes=BIG)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="exists already"):
        write_huggingface(files, model, files[0], max_shard_bytes=BIG)


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    model = llama()
    (tmp_path / "out").mkdir()
    write_huggingface(stage_files(model, (0, 4), tmp_path), model, tmp_path / "out", max_shard_bytes=BIG)
    assert (tmp_path / "out" / "config.json").exists()


def test_incomplete_stages_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    model = llama()
    files = stage_files(model, (0, 2, 4), tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"none of them holds model\.layers\.1\."):
        write_huggingface(files[:1], model, tmp_path / "out", max_shard_bytes=BIG)
    with pytest.raises(
        UserError, match=r"stage-0.*q_proj\.weight is \[32, 32\] where the model has \[56, 32\]"
    ):
        write_huggingface(files, llama(head_dim=14), tmp_path / "out", max_shard_bytes=BIG)
    with pytest.raises(UserError, match="max_shard_bytes: 0"):
        write_huggingface(files, model, tmp_path / "out", max_shard_bytes=0)
    assert sorted(tmp_path.iterdir()) == before


def header(**entry: object) -> bytes:
    text = json.dumps({"model.norm.weight": entry}).encode()
    return struct.pack("<Q", len(text)) + text


MALFORMED = {
    "empty": (b"", "is not a safetensors file"),
    "text": (b"a file of another kind entirely", "the header is too long"),
    "header no JSON": (struct.pack("<Q", 2) + b"{x", "is not a safetensors file"),
    "header a list": (struct.pack("<Q", 2) + b"[]", "is not a safetensors file"),
    "no shape": (header(dtype="F32", data_offsets=[0, 4]), "is not a safetensors file"),
    "sizes disagree": (header(dtype="F32", shape=[2], data_offsets=[0, 4]), "sizes and offsets"),
    "before the file": (header(dtype="F32", shape=[1], data_offsets=[-4, 0]), "sizes and offsets"),
    "numbers missing": (header(dtype="F32", shape=[1], data_offsets=[0, 4]), "is cut short"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_file_that_is_not_what_a_stage_wrote_is_refused(case: str, tmp_path: Path) -> None:
    content, message = MALFORMED[case]
    path = tmp_path / "stage.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        write_huggingface([path], llama(), tmp_path / "out", max_shard_bytes=BIG)


def test_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent.*cannot be read: No such file"):
        write_huggingface([tmp_path / "absent"], llama(), tmp_path / "out", max_shard_bytes=BIG)


def test_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    files = stage_files(llama(), (0, 4), tmp_path)
    with pytest.raises(UserError, match=r"out: .*cannot be written: .*stage-0\.safetensors: File exists"):
        write_huggingface(files, llama(), files[0] / "out", max_shard_bytes=BIG)


def test_families_of_all_models_can_be_exported() -> None:
    assert {type(model) for model in MODELS.values()} == {LlamaModel, DigitsCnnModel}
