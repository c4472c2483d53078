"""Weights that transformers wrote, in our stages; and what is refused."""

import json
import re
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skein.errors import UnfitError, UserError
from skein.model.decoder import DecoderModel
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.rows import VocabularySplit
from skein.storage.roots import Roots
from skein.types import Precision
from tests.support import extent
from tests.worker.model.builders import DECODERS, MODELS, assert_near, cuts, llama, part, samples, whole
from worker.model.weights import load_huggingface, load_parameters

# The promise to users: float32 logits of order 1 to 10 after a chain of products.
SAME_LOGITS = 1e-5


def reference(model: DecoderModel) -> PreTrainedModel:
    """transformers' own model, with numbers large enough for a difference to show."""
    torch.manual_seed(5)
    config = {key: value for key, value in model.hugging_face().items() if key != "model_type"}
    built = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.for_model(model.family, **config)
    )
    assert isinstance(built, PreTrainedModel)
    with torch.no_grad():
        for parameter in built.parameters():
            # Biases begin at 0.
            parameter.mul_(torch.rand_like(parameter) + 0.5).add_(torch.rand_like(parameter), alpha=0.1)
    return built


def written(model: DecoderModel, directory: Path, *, max_shard_size: str = "1GB") -> Tensor:
    """Saves a reference of `model`; gives its logits for `samples`."""
    built = reference(model)
    built.save_pretrained(directory, max_shard_size=max_shard_size)
    with torch.no_grad():
        logits = built(samples(model)[0]).logits
    assert isinstance(logits, Tensor)
    return logits


@pytest.mark.parametrize(
    ("name", "max_shard_size"), extent.part(list(product(DECODERS, ("1GB", "8KB"))), every=3)
)
def test_any_cut_of_what_transformers_saved_gives_its_logits(
    name: str, max_shard_size: str, tmp_path: Path
) -> None:
    model = MODELS[name]
    assert isinstance(model, DecoderModel)
    expected = written(model, tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "8KB")
    for cut in cuts(model):
        x, _ = samples(model)
        for first, stop in pairwise(cut):
            stage = part(model, first, stop, precision=Precision.FP32)
            load_huggingface(tmp_path, stage)
            x = stage.logits(x) if stage.has_head else stage(x)
        assert_near(x.detach(), expected, tolerance=SAME_LOGITS, what=str(cut))


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("split", [VocabularySplit.OUTPUT, VocabularySplit.BOTH])
def test_shards_of_the_vocabulary_take_their_rows_of_whole_tensors(
    name: str, split: VocabularySplit, tmp_path: Path
) -> None:
    model = MODELS[name]
    assert isinstance(model, DecoderModel)
    expected = written(model, tmp_path)
    cut = whole(model.with_rows(split), precision=Precision.FP32)
    load_huggingface(tmp_path, cut)
    assert_near(cut.logits(samples(model)[0]).detach(), expected, tolerance=SAME_LOGITS)

    # A checkpoint of either is a beginning for the other.
    plain = whole(model, precision=Precision.FP32)
    load_parameters(dict(cut.named_parameters()), plain)
    again = whole(model.with_rows(split), precision=Precision.FP32, seed=9)
    load_parameters(dict(plain.named_parameters()), again)
    for key, tensor in again.named_parameters():
        assert torch.equal(tensor, cut.get_parameter(key)), key


def test_weights_are_cast_to_the_dtype_of_the_stage(tmp_path: Path) -> None:
    model = llama()
    reference(model).bfloat16().save_pretrained(tmp_path)
    stage = whole(model, precision=Precision.FP64)
    load_huggingface(tmp_path, stage)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(stage.get_parameter(name), tensor.double())


def test_only_the_files_that_a_stage_needs_are_opened(tmp_path: Path) -> None:
    model = llama()
    written(model, tmp_path, max_shard_size="8KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    stage = part(model, 1, 2)
    needed = {index[name] for name, _ in stage.named_parameters()}
    for path in tmp_path.glob("*.safetensors"):
        if path.name not in needed:
            path.unlink()
    load_huggingface(tmp_path, stage)
    with pytest.raises(UnfitError, match="cannot be read on this worker"):
        load_huggingface(tmp_path, part(model, 2, 3))


def test_classifier_weights_load_by_the_same_names(tmp_path: Path) -> None:
    model = DigitsCnnModel(family="digits_cnn", channels=6, num_blocks=2)
    original, copy = whole(model, seed=1), whole(model, seed=2)
    save_file(original.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.hugging_face()))
    load_huggingface(tmp_path, copy)
    x, _ = samples(model)
    assert torch.equal(original.logits(x), copy.logits(x))


def _remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def _write(name: str, text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / name).write_text(text)

    return write


def _change_tensor(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return rewrite


def _set_config(key: str, value: object) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {key: value}))

    return rewrite


def _index(text: str) -> Callable[[Path], None]:
    def replace(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        (directory / "model.safetensors.index.json").write_text(text)

    return replace


NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
REFUSALS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (
        _remove("config.json"),
        r"model\.init_from: .*config\.json.*: cannot be read on this worker \(No such file",
    ),
    "config no JSON": (_write("config.json", "{"), r"config\.json.*: is not JSON"),
    "config a list": (_write("config.json", "[]"), r"config\.json.*: is not a JSON object"),
    "no weights": (_remove("model.safetensors"), r"has neither model\.safetensors nor .*save_pretrained"),
    "cut short": (_write("model.safetensors", "abc"), r"model\.safetensors': cannot be read as safetensors"),
    "no such tensor": (_change_tensor(lambda x: x.pop(NORM)), r"does not hold model\.norm\.weight"),
    "other shape": (
        _change_tensor(lambda x: x.update({NORM: torch.ones(31)})),
        r"model\.norm\.weight is \[31\] where the model has \[32\]",
    ),
    "whole numbers": (
        _change_tensor(lambda x: x.update({NORM: torch.ones(32, dtype=torch.int32)})),
        r"model\.norm\.weight is I32; floating-point numbers are needed",
    ),
    "other angles": (
        _set_config("rope_parameters", {"rope_theta": 7.0}),
        r"model\.rope_theta: 500\.0: .*7\.0",
    ),
    "other ties": (_set_config("tie_word_embeddings", False), r"model\.tie_word_embeddings: true: .*false"),
    "other family": (_set_config("model_type", "mamba"), r"config\.model_type: 'mamba': only 'llama'"),
    "bias of another family": (
        _change_tensor(lambda x: x.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})),
        r"holds model\.layers\.0\.self_attn\.q_proj\.bias, which the model does not have",
    ),
    "window": (_set_config("sliding_window", 8), r"config\.sliding_window: 8: is not known here"),
    "index no map": (_index("{}"), r"index\.json': has no weight_map"),
    "index lacks one": (_index('{"weight_map": {}}'), r"index\.json': does not list"),
    "index leads out": (
        _index(json.dumps({"weight_map": {EMBEDDING: "../other.safetensors", NORM: "../other.safetensors"}})),
        r"'\.\./other\.safetensors' is not the name of a file beside it",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_weights_that_do_not_fit_are_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    spoil, message = REFUSALS[case]
    model = llama()
    written(model, tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=message):
        load_huggingface(tmp_path, part(model, 3, 4))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_what_one_worker_lacks_is_its_own_trouble(missing: str, tmp_path: Path) -> None:
    written(llama(), tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(UnfitError, match=re.escape(str(tmp_path))):
        load_huggingface(tmp_path, part(llama(), 0, 1))


def test_weights_outside_the_roots_are_the_workers_own_trouble(tmp_path: Path) -> None:
    written(llama(), tmp_path / "elsewhere")
    roots = Roots(option="--data-root", folders=(tmp_path / "root",))
    with pytest.raises(UnfitError, match="leads out of the data root"):
        load_huggingface(tmp_path / "elsewhere", part(llama(), 0, 1), roots)


def test_weights_that_a_worker_offers_are_found_by_name(tmp_path: Path) -> None:
    model = llama()
    written(model, tmp_path)
    roots = Roots.of("--data-root", [], usual="data", offers={"begun": tmp_path})
    load_huggingface("data://begun", part(model, 0, 1), roots)
    with pytest.raises(UnfitError, match="which offers data://begun"):
        load_huggingface("data://other", part(model, 0, 1), roots)


def test_absent_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match="No such file"):
        load_huggingface(tmp_path / "absent", part(llama(), 0, 1))
