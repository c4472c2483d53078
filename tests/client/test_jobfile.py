"""Job files made ready: paths, sizes of what a job begins from, and what is refused without asking anybody."""

import json
from pathlib import Path

import pytest

from client.documents import end_of_documents
from client.jobfile import prepare_job, read_job, read_job_text
from skein.config.aggregation import Gossip
from skein.config.data.sources import JsonlSource, TextSource, TokenSource
from skein.config.job import JobSpec
from skein.errors import UserError
from skein.model.decoder import decoder_shape
from skein.model.families.llama import LlamaModel
from skein.model.families.mixtral import MixtralModel, MixtralShape
from tests.client.scripted import GOOD

SOURCES = """[{format: text, path: books}, {format: jsonl, path: ../more.jsonl},
  {format: tokens, path: /ids.bin, dtype: uint8}]"""
DIGITS = "model={family: digits_cnn}"
WRONG = {
    "model.preset=llama-2m": "model.preset: 'llama-2m': did you mean llama-125m? presets are llama-1m, ",
    "model.preset=": "model.preset: null: give a shape, or a preset: llama-1m, ",
    "model.shape={}": "model.preset: 'llama-1m': give either preset or shape, not both",
    "parallel.stages=99": "parallel.stages: 99: the model has 7 layers to cut: give at most 7",
    "parallel.replicas=9": "parallel.replicas: 9: a step has 8 microbatches to share: give at most 8, ",
    "data.sequence_tokens=4096": "data.sequence_tokens: 4096: the model has 2048 positions ",
    "data.sources=[{format: digits}]": "data.sources[0].format: 'digits': "
    "samples with labels are nothing for a language model: ",
    DIGITS: "data.sources[0].format: 'text': digits_cnn takes samples with labels: "
    "give arrays, digits or jsonl with `label`, or family: llama",
    "data.sources=[{format: jsonl, path: a, label: y}]": "data.sources[0].format: 'jsonl': "
    "samples with labels are nothing for a language model: ",
    "model={family: llama, shape: {vocab_size: 100}}": "data.tokenizer: 'bytes': bytes have 256 values, "
    "the model's vocab_size is 100: set it to 256",
    "model={family: llama, shape: {hidden_size: 30, num_attention_heads: 4, head_dim: 8}}": "model.shape."
    "hidden_size: 30: give a multiple of num_attention_heads (4)",
}


def good(*overrides: str, base: Path = Path("/jobs")) -> JobSpec:
    return read_job_text(GOOD, origin="job", base=base, overrides=overrides)


@pytest.mark.parametrize("change", WRONG)
def test_what_no_fleet_could_run_is_refused(change: str) -> None:
    with pytest.raises(UserError) as caught:
        good(change)
    assert str(caught.value).startswith(WRONG[change])


def test_gossip_that_would_diverge_is_settled_before_it_is_sent() -> None:
    rule = "{rule: gossip, graph: one_peer_exponential, if_unstable: qg_dmsgd}"
    changes = ("model={family: llama, shape: {tie_word_embeddings: false}}", "parallel.replicas=8")
    found = good(*changes, f"aggregation={rule}", "batch.samples=32").aggregation
    assert isinstance(found, Gossip)
    assert found.method == "qg_dmsgd"
    with pytest.raises(UserError, match=r"^aggregation.method: 'decentlam': .* stability radius 1\.114"):
        good(*changes, "aggregation={rule: gossip, graph: one_peer_exponential}")


def test_images_for_a_classifier_are_accepted() -> None:
    images = "data.sources=[{format: digits}]"
    assert good(DIGITS, images).model.family == "digits_cnn"
    arrays = "data.sources=[{format: arrays, path: x.npz}, {format: jsonl, path: y, field: x, label: y}]"
    assert good(DIGITS, arrays).data.sources[0].format == "arrays"
    regression = "model={family: mlp, widths: []}"
    assert good(regression, images, "parallel.stages=1").model.family == "mlp"
    with pytest.raises(
        UserError, match=r"parallel\.stages: 2: the model has 1 layers to cut: give at most 1"
    ):
        good(regression, images, "parallel.stages=2")


def test_paths_count_from_the_folder_of_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "job.yaml").write_text(GOOD)
    changes = (
        f"data.sources={SOURCES}",
        "data.tokenizer=tokenizer.json",
        "checkpoint.url=saved",
        "model.shape.vocab_size=300",
        "model.preset=",
    )
    job = read_job(folder / "job.yaml", overrides=changes)
    assert job.data.sources == (
        TextSource(path=str(folder / "books")),
        JsonlSource(format="jsonl", path=str(tmp_path / "more.jsonl")),
        TokenSource(format="tokens", path="/ids.bin", dtype="uint8"),
    )
    assert job.data.tokenizer == str(folder / "tokenizer.json")
    assert job.checkpoint.url == str(folder / "saved")


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://abc/b", "file:///x", "abfs://box/a"])
def test_urls_stay_as_they_are(url: str) -> None:
    assert good(f"checkpoint.url={url}").checkpoint.url == url


def test_preparing_twice_changes_nothing() -> None:
    job = good("data.sources[0].path=books")
    assert prepare_job(job, base=Path("/elsewhere")) == job


# --- beginning from a Hugging Face directory ---


def hugging_face(directory: Path, change: dict[str, object] | None = None) -> LlamaModel:
    directory.mkdir()
    model = LlamaModel(preset="llama-3m")
    (directory / "config.json").write_text(json.dumps({**model.hugging_face(), **(change or {})}))
    return model


def test_sizes_are_read_from_where_a_job_begins(tmp_path: Path) -> None:
    begun = hugging_face(tmp_path / "old")
    job = good("model={family: llama, init_from: old}", base=tmp_path)
    assert isinstance(job.model, LlamaModel)
    assert job.model.init_from == str(tmp_path / "old")
    assert decoder_shape(job.model) == decoder_shape(begun)


SPARSE = MixtralShape(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
)


def begun_sparse(directory: Path, *overrides: str, change: dict[str, object] | None = None) -> JobSpec:
    """A job that begins from a sparse model, whose configuration has other fields besides."""
    config = MixtralModel(shape=SPARSE).hugging_face() | (change or {})
    (directory / "config.json").write_text(json.dumps(config))
    model = f"{{family: mixtral, init_from: {directory}}}"
    return good(f"model={model}", "parallel={stages: 1}", *overrides)


def test_sizes_of_a_sparse_model_are_read_from_where_a_job_begins(tmp_path: Path) -> None:
    job = begun_sparse(tmp_path)
    assert isinstance(job.model, MixtralModel)
    assert job.model.experts.num_experts == 4


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["model.routing={capacity: 0.0001}"], "model.routing.capacity: 0.0001: experts would take"),
        (["model.placement=mesh", "parallel.tensor.size=3"], "parallel.tensor.size: 3: .*divide into 1, 2: "),
    ],
)
def test_sizes_that_are_read_later_are_checked_all_the_same(
    tmp_path: Path, overrides: list[str], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        begun_sparse(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: 5: there are 4 experts"),
        ({"router_jitter_noise": 0.1}, "config.router_jitter_noise: 0.1"),
        ({"shared_expert_intermediate_size": 32}, "config.shared_expert_intermediate_size: 32"),
    ],
)
def test_a_sparse_configuration_that_is_computed_otherwise_is_refused(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        begun_sparse(tmp_path, change=change)


def test_devices_that_do_not_divide_sizes_that_are_read_later_are_refused(tmp_path: Path) -> None:
    hugging_face(tmp_path / "old")
    with pytest.raises(UserError, match=r"parallel\.tensor\.size: 4: .* divide into 1, 2: give"):
        good("model={family: llama, init_from: old}", "parallel.tensor.size=4", base=tmp_path)


def test_sizes_that_a_job_states_must_be_those_it_begins_with(tmp_path: Path) -> None:
    hugging_face(tmp_path / "old")
    assert good("model.preset=llama-3m", "model.init_from=old", base=tmp_path).name == "first-job"
    with pytest.raises(UserError, match=r"model\..*: the weights to start from have"):
        good("model.init_from=old", base=tmp_path)


def test_model_of_another_family_cannot_be_begun_from(tmp_path: Path) -> None:
    hugging_face(tmp_path / "old", {"model_type": "gpt2"})
    with pytest.raises(UserError, match=r"config\.model_type: 'gpt2': only 'llama' models"):
        good("model={family: llama, init_from: old}", base=tmp_path)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (None, "config.json: No such file or directory; give a Hugging Face directory"),
        ("{", "config.json is not JSON"),
        ("[]", "config.json is not an object"),
    ],
)
def test_directory_without_a_configuration_is_refused(tmp_path: Path, text: str | None, hint: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"model\.init_from: '{tmp_path}': {hint}"):
        good(f"model={{family: llama, init_from: {tmp_path}}}")


@pytest.mark.parametrize(
    ("override", "cure"),
    [
        ("checkpoint.url=s3//bucket", r"checkpoint\.url: .*write s3://bucket"),
        ("checkpoint.url=reference::a.json", r"checkpoint\.url: .*the inner one alone"),
        ("checkpoint.url=http://host/a", r"checkpoint\.url: .*http:// is not taken"),
        ("data.sources[0].path=s3://bucket/books", r"data\.sources\[0\]\.path: .*workers read files"),
        ("data.sources[0].path=s3//bucket", r"data\.sources\[0\]\.path: .*workers read files"),
    ],
)
def test_what_is_no_place_is_refused_before_it_is_sent(override: str, cure: str) -> None:
    with pytest.raises(UserError, match=cure):
        good(override)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ([], "NUL (token 0)"),
        (['data.separator="\\n"'], "'\\n' (token 10)"),
        (["data.separator=''"], "nothing: documents run together"),
        (["data.tokenizer=t.json"], "</s> (token 1)"),
        (["data.tokenizer=t.json", "data.separator=word"], "word (token 0)"),
        (["data.tokenizer=absent.json"], "what the tokenizer has for that; its file cannot be read here"),
    ],
)
def test_what_ends_a_document_is_known_before_it_is_sent(
    tmp_path: Path, override: list[str], told: str
) -> None:
    added = [{"id": 1, "content": "</s>"}]
    (tmp_path / "t.json").write_text(json.dumps({"model": {"vocab": {"word": 0}}, "added_tokens": added}))
    assert end_of_documents(good(*override, base=tmp_path).data) == told


@pytest.mark.parametrize("tokenizer", ["bytes", "t.json"])
def test_a_separator_that_is_no_token_is_refused_before_it_is_sent(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"model": {"vocab": {"word": 0}}}))
    with pytest.raises(UserError, match=r"data\.separator: 'end'"):
        good("data.separator=end", f"data.tokenizer={tokenizer}", base=tmp_path)


def test_data_that_workers_offer_stay_named(tmp_path: Path) -> None:
    named = ("data.sources[0].path=data://books/2024", "data.tokenizer=data://llama/tokenizer.json")
    job = good(*named, "model.init_from=data://llama", base=tmp_path)
    assert [path for _, path in job.paths()] == [
        "data://books/2024",
        "data://llama/tokenizer.json",
        "data://llama",
    ]
    assert prepare_job(job, base=Path("/elsewhere")) == job


@pytest.mark.parametrize(
    ("override", "cure"),
    [
        ("data.sources[0].path=data:books", r"data\.sources\[0\]\.path: .*write data://books"),
        ("data.tokenizer=data://llama/../secret", r"data\.tokenizer: .*leave it out"),
        ("model={family: llama, init_from: data://llama}", r"model\.init_from: .*say the sizes"),
    ],
)
def test_names_that_help_nobody_are_refused_before_they_are_sent(override: str, cure: str) -> None:
    with pytest.raises(UserError, match=cure):
        good(override)


def test_sources_to_validate_on_are_found_like_others(tmp_path: Path) -> None:
    job = good("data.validation=[{format: text, path: held}]", base=tmp_path)
    assert [path for _, path in job.paths()][-1] == str(tmp_path / "held")


# --- files that cannot be read ---


def test_absent_file_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"job file: '.*/job\.yaml': No such file or directory; give a job file"
    ):
        read_job(tmp_path / "job.yaml")


def test_paths_in_standard_input_count_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "piped.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path.parent)
    with (tmp_path / "piped.yaml").open() as piped:
        monkeypatch.setattr("sys.stdin", piped)
        job = read_job(Path("-"), overrides=["data.sources=[{format: text, path: books}]"])
    [source] = job.data.sources
    assert isinstance(source, TextSource)
    assert source.path == str(tmp_path.parent / "books")


def test_folder_is_no_job_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"job file: '.*': Is a directory; give a job file"):
        read_job(tmp_path)


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"name: \xff")
    with pytest.raises(UserError, match=r"job file: '.*': byte 6 is not UTF-8"):
        read_job(tmp_path / "job.yaml")
