"""Exports that transformers opens, from stages' files; and what is refused."""

import json
import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from client.exporting.download import weight_files, weight_prefixes
from client.exporting.export import Dtype, write_huggingface
from skein.config.aggregation import AggregationSpec, AllReduce, DiLoCo, Gossip, Lsgd
from skein.config.load import job_from_json
from skein.errors import UserError
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.llama import LlamaModel
from skein.model.layers import AnyModel
from skein.model.parameters import parameter_shapes
from skein.model.rows import VocabularySplit
from skein.numeric.aggregate.diloco import GLOBAL
from skein.protocol.log.records import StageFiles, walker_prefix
from skein.protocol.messages.directives import CheckpointFile
from skein.types import JobId, Precision, StageIndex, Step
from skein.wire.extra import ManifestReply
from tests.support import extent
from tests.support.jobs import small_job
from tests.worker.model.builders import DECODERS, MODELS, assert_near, llama, part, samples, whole
from worker.model.weights import load_huggingface

BIG = 1 << 30
# The promise to users: float32 logits of order 1 to 10 after a chain of products.
SAME_LOGITS = 1e-5


def stage_files(
    model: AnyModel, cut: Sequence[int], directory: Path, *, precision: Precision = Precision.FP32
) -> list[Path]:
    """What a checkpoint of `model`, cut so, might hold: parameters, and the optimizer's state."""
    paths = []
    for index, (first, stop) in enumerate(pairwise(cut)):
        state = part(model, first, stop, precision=precision).state_dict()
        moments = {f"adamw.mean.{name}": torch.full_like(tensor, 9.0) for name, tensor in state.items()}
        paths.append(directory / f"stage-{index}.safetensors")
        save_file(state | moments | {"step": torch.tensor([3])}, paths[-1])
    return paths


def walker_files(
    model: AnyModel,
    cut: Sequence[int],
    directory: Path,
    *,
    walker: int,
    precision: Precision = Precision.FP32,
) -> list[Path]:
    """Parameters of one of several walkers, as a checkpoint names them."""
    paths = []
    for index, (first, stop) in enumerate(pairwise(cut)):
        state = part(model, first, stop, precision=precision, seed=walker).state_dict()
        paths.append(directory / f"stage-{index}.w{walker}.safetensors")
        save_file({f"{walker_prefix(walker)}{name}": tensor for name, tensor in state.items()}, paths[-1])
    return paths


def opened_logits(directory: Path, tokens: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        logits = model(tokens).logits
    assert isinstance(logits, Tensor)
    return logits


@pytest.mark.parametrize(
    ("name", "max_shard_bytes"), extent.part(list(product(DECODERS, (BIG, 8_000))), every=3)
)
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


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_blocks_of_a_vocabulary_are_exported_as_whole_tensors(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    cut = model.with_rows(VocabularySplit.BOTH)
    inner, num_layers = cut.inner_layers, len(cut.layer_parameters())
    # The last shard's file comes first: rows are put in their order.
    files = stage_files(cut, (0, inner.start, inner.stop + 1, num_layers - 1, num_layers), tmp_path)
    write_huggingface([*reversed(files)], cut, tmp_path / "cut", max_shard_bytes=BIG)
    write_huggingface(stage_files(model, (0, 2, 4), tmp_path), model, tmp_path / "plain", max_shard_bytes=BIG)
    weights = [load_file(tmp_path / out / "model.safetensors") for out in ("cut", "plain")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items())


def test_export_of_float64_is_rounded_to_float32(tmp_path: Path) -> None:
    model = llama(is_tied=False)
    files = stage_files(model, (0, 4), tmp_path, precision=Precision.FP64)
    write_huggingface(files, model, tmp_path / "out", max_shard_bytes=BIG)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in whole(model).named_parameters():
        assert torch.equal(exported[name], parameter.float())


def test_export_in_bfloat16_is_rounded_as_torch_does(tmp_path: Path) -> None:
    model = llama(is_tied=False)
    files = stage_files(model, (0, 2, 4), tmp_path)
    write_huggingface(files, model, tmp_path / "out", max_shard_bytes=4_000, dtype=Dtype.BF16)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    exported: dict[str, Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(path)
    for name, parameter in whole(model, precision=Precision.FP32).named_parameters():
        assert torch.equal(exported[name], parameter.bfloat16())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in exported.values())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert opened.dtype == torch.bfloat16


def test_bfloat16_of_numbers_at_the_edges_is_torchs(tmp_path: Path) -> None:
    model = DigitsCnnModel(family="digits_cnn", channels=6, num_blocks=2)
    state = whole(model, precision=Precision.FP32).state_dict()
    # Halfway between two (to even, down and up), too large, none, tiny.
    edges = torch.tensor([1.00390625, 1.01171875, 3.4e38, float("nan"), float("-inf"), 1e-45])
    state["norm.weight"] = edges
    save_file(state, tmp_path / "stage.safetensors")
    write_huggingface(
        [tmp_path / "stage.safetensors"], model, tmp_path / "out", max_shard_bytes=BIG, dtype=Dtype.BF16
    )
    exported = load_file(tmp_path / "out" / "model.safetensors")["norm.weight"]
    assert torch.equal(exported.isnan(), edges.isnan())
    assert torch.equal(exported.nan_to_num(), edges.bfloat16().nan_to_num())


def test_what_training_leaves_alone_comes_out_as_it_went_in(tmp_path: Path) -> None:
    source = llama().hugging_face() | {"bos_token_id": 1, "eos_token_id": [2, 7], "use_cache": False}
    model = LlamaModel(init_from="/begun").begun(source)
    files, out = stage_files(model, (0, 4), tmp_path), tmp_path / "out"
    beside = {"generation_config.json": b'{"temperature": 0.6}', "README.md": b"# card"}
    paths = write_huggingface(files, model, out, max_shard_bytes=BIG, beside=beside)
    assert sorted(paths) == sorted(out.iterdir())
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert (config.bos_token_id, config.eos_token_id, config.use_cache) == (1, [2, 7], False)
    assert (out / "generation_config.json").read_bytes() == beside["generation_config.json"]


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
    for model in (llama(), MODELS["digits"], MODELS["mlp"]):
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


@pytest.mark.parametrize("num_walkers", [1, 3])
def test_memory_does_not_grow_with_the_tensors_or_how_many_are_averaged(
    tmp_path: Path, num_walkers: int
) -> None:
    model = DigitsCnnModel(family="digits_cnn", channels=512, num_blocks=6)  # 57 MB in six matrices
    files = [
        path for walker in range(num_walkers) for path in walker_files(model, (0, 8), tmp_path, walker=walker)
    ]
    prefixes = [walker_prefix(walker) for walker in range(num_walkers)]
    tracemalloc.start()
    write_huggingface(files, model, tmp_path / "out", max_shard_bytes=BIG, prefixes=prefixes)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A sum of 4 MiB, and what reading, dividing and rounding it takes.
    assert peak_bytes < 20e6


def test_export_is_the_mean_of_all_walkers_rounded_once(tmp_path: Path) -> None:
    model = llama(is_tied=False)
    # Two in float32 and one in float64: the mean is of the numbers, not of the formats.
    precisions = (Precision.FP32, Precision.FP64, Precision.FP32)
    files = [
        path
        for walker, precision in enumerate(precisions)
        for path in walker_files(model, (0, 2, 4), tmp_path, walker=walker, precision=precision)
    ]
    prefixes = [walker_prefix(walker) for walker in range(3)]
    write_huggingface(files, model, tmp_path / "out", max_shard_bytes=BIG, prefixes=prefixes)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    states = [
        part(model, 0, 4, precision=precision, seed=walker).state_dict()
        for walker, precision in enumerate(precisions)
    ]
    for name, tensor in exported.items():
        mean = sum((state[name].double() for state in states), torch.zeros((), dtype=torch.float64)) / 3
        assert torch.equal(tensor, mean.float())
    table = "model.embed_tokens.weight"
    assert not torch.equal(exported[table], states[0][table])


def test_export_of_other_tensors_under_a_prefix_takes_those(tmp_path: Path) -> None:
    model = llama(is_tied=False)
    shared = {f"global_params.{name}": x for name, x in part(model, 0, 4, seed=8).state_dict().items()}
    save_file(shared, tmp_path / "state.safetensors")
    files = [*stage_files(model, (0, 4), tmp_path), tmp_path / "state.safetensors"]
    write_huggingface(files, model, tmp_path / "out", max_shard_bytes=BIG, prefixes=["global_params."])
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(x, shared[f"global_params.{name}"].float()) for name, x in exported.items())


def test_a_walker_that_is_not_in_the_files_is_named(tmp_path: Path) -> None:
    files = walker_files(llama(), (0, 4), tmp_path, walker=0)
    with pytest.raises(UserError, match="none of them holds walker1/model"):
        write_huggingface(files, llama(), tmp_path / "out", max_shard_bytes=BIG, prefixes=["", "walker1/"])


# --- which files an export needs ---

RULES: dict[str, tuple[AggregationSpec, tuple[str, ...], set[str]]] = {
    "one": (AllReduce(), ("",), {"s0.model", "s1.model"}),
    "diloco": (DiLoCo(rule="diloco"), ("global_params.",), {"s0.state", "s1.state"}),
    "gossip": (
        Gossip(rule="gossip"),
        ("", "walker1/", "walker2/"),
        {f"s{stage}{walker}.model" for stage in (0, 1) for walker in ("", ".w1", ".w2")},
    ),
    "lsgd": (
        Lsgd(rule="lsgd"),
        ("", "walker1/", "walker2/"),
        {f"s{stage}{walker}.model" for stage in (0, 1) for walker in ("", ".w1", ".w2")},
    ),
    "lsgd leader": (Lsgd(rule="lsgd", export="leader"), ("",), {"s0.model", "s1.model"}),
}


def kept(rule: AggregationSpec, *, num_walkers: int) -> ManifestReply:
    """A checkpoint of two stages, of as many walkers."""
    job = small_job(steps=60).model_copy(update={"aggregation": rule})
    names = list(parameter_shapes(job.model))

    def files(stage: int) -> Iterator[CheckpointFile]:
        held = names[: len(names) // 2] if stage == 0 else names[len(names) // 2 :]
        slots = ("exp_avg.", "global_params.") if isinstance(rule, DiLoCo) else ("exp_avg.",)
        state = [f"{slot}{name}" for slot in slots for name in held]
        for walker in range(num_walkers):
            base = f"s{stage}.w{walker}" if walker else f"s{stage}"
            for what, inside in (("model", held), ("state", state)):
                tensors = tuple(f"{walker_prefix(walker)}{name}" for name in inside)
                yield CheckpointFile(name=f"{base}.{what}", num_bytes=1, sha256="", tensors=tensors)

    stages = tuple(StageFiles(stage=StageIndex(s), files=tuple(files(s))) for s in range(2))
    return ManifestReply(
        job=JobId("j"), version=Step(1), spec=job.canonical_json(), url=None, stages=stages, wall_s=0.0
    )


@pytest.mark.parametrize("name", RULES)
def test_an_export_fetches_what_its_rule_is_made_of_and_no_more(name: str) -> None:
    rule, prefixes, files = RULES[name]
    manifest = kept(rule, num_walkers=1 if name == "one" else 3)
    job = job_from_json(manifest.spec)
    assert weight_prefixes(manifest, job) == prefixes
    assert {file.name for file in weight_files(manifest, job)} == files


def test_a_checkpoint_from_before_walkers_were_saved_is_exported_as_it_is() -> None:
    manifest = kept(Gossip(rule="gossip"), num_walkers=1)
    assert weight_prefixes(manifest, job_from_json(manifest.spec)) == ("",)


def test_what_diloco_exports_is_what_its_walkers_agree_on() -> None:
    manifest = kept(DiLoCo(rule="diloco"), num_walkers=2)
    assert weight_prefixes(manifest, job_from_json(manifest.spec)) == (f"{GLOBAL}.",)


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
