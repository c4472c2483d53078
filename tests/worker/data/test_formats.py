"""Packed files, parquet, and sources of their own to validate on."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from skein.config.data.sources import JsonlSource, ParquetSource, SourceSpec, TextSource
from skein.config.data.spec import FIRST_RULES, NEWEST_RULES, DataSpec
from skein.config.job import BatchSpec, BudgetSpec, JobSpec, ParallelSpec, read_spec
from skein.errors import UserError
from skein.model.families.llama import LlamaModel, LlamaShape
from worker.data import Dataset, open_dataset
from worker.data.cache import TokenCache

MODEL = LlamaModel(shape=LlamaShape())
TEXTS = ["first document", "", "a third one, longer than the others"]


def opened(source: SourceSpec, *, cache: TokenCache | None = None) -> Dataset:
    data = DataSpec(sources=(source,), sequence_tokens=8, validation_ratio=0.0)
    return open_dataset(data, MODEL, seed=0, cache=cache or TokenCache(None))


def tokens_of(dataset: Dataset) -> bytes:
    """All tokens, in order, as bytes."""
    source = dataset.sources[0]
    inputs, labels = zip(*(source.read(sample) for sample in range(source.num_samples)), strict=True)
    joined = np.concatenate([inputs[0][:1], *(x[x >= 0] for x in labels)])
    return joined.astype(np.uint8).tobytes()


EXPECTED = b"".join(text.encode() + b"\0" for text in TEXTS)


def write_json_lines(path: Path) -> Path:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def write_parquet(path: Path, texts: list[str | None], column: str = "text") -> Path:
    table = pyarrow.table({column: pyarrow.array(texts, pyarrow.string()), "number": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    return path


def test_packed_text_and_lines_are_read_as_they_are_unpacked(tmp_path: Path) -> None:
    for index, text in enumerate(TEXTS):
        (tmp_path / f"{index}.txt.gz").write_bytes(gzip.compress(text.encode()))
    write_json_lines(tmp_path / "lines.jsonl.gz")
    sources: list[SourceSpec] = [
        TextSource(path=str(tmp_path)),
        TextSource(path=str(tmp_path), glob="**/*.txt.gz"),
        JsonlSource(format="jsonl", path=str(tmp_path)),
        JsonlSource(format="jsonl", path=str(tmp_path / "lines.jsonl.gz")),
    ]
    for source in sources:
        assert tokens_of(opened(source)) == EXPECTED


PLAIN_AND_PACKED = [("a.txt", "one"), ("b.txt.gz", "two"), ("in/c.txt", "three"), ("in/b.txt.gz", "four")]


def folder_of(tmp_path: Path, files: list[tuple[str, str]]) -> str:
    for name, text in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(tmp_path)


def test_plain_and_packed_files_are_one_list_sorted_by_name(tmp_path: Path) -> None:
    source = TextSource(path=folder_of(tmp_path, PLAIN_AND_PACKED))
    assert tokens_of(opened(source)) == b"one\0two\0four\0three\0"


def test_plain_and_packed_lines_are_one_list_sorted_by_name(tmp_path: Path) -> None:
    lines = [(name.replace("txt", "jsonl"), json.dumps({"text": text})) for name, text in PLAIN_AND_PACKED]
    source = JsonlSource(format="jsonl", path=folder_of(tmp_path, lines))
    assert tokens_of(opened(source)) == b"one\0two\0four\0three\0"


def test_a_job_from_before_the_rules_had_a_version_goes_on_reading_plain_files_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = DataSpec(sources=(TextSource(path=folder_of(tmp_path, PLAIN_AND_PACKED)),), sequence_tokens=4)
    budget, batch = BudgetSpec(steps=2), BatchSpec(samples=2, microbatch_samples=1)
    parallel = ParallelSpec(stages=1, replicas=1)
    job = JobSpec(name="a", model=MODEL, data=data, budget=budget, batch=batch, parallel=parallel)
    recorded = json.loads(job.canonical_json())
    assert recorded["data"].pop("rules") == NEWEST_RULES
    old = read_spec(json.dumps(recorded))
    assert old.data.rules == FIRST_RULES
    # What a worker is told names the rules, and stays as it is in later records.
    assert read_spec(old.canonical_json()) == old
    assert read_spec(job.canonical_json()) == job
    assert tokens_of(open_dataset(old.data, old.model, seed=0)) == b"one\0three\0"
    assert "2 files are read, 2 are left out: b.txt.gz, in/b.txt.gz" in caplog.text


def test_files_that_no_pattern_matches_are_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = [*PLAIN_AND_PACKED, *((f"in/{number}.md", "other") for number in range(5))]
    opened(TextSource(path=folder_of(tmp_path, files)))
    assert "4 files are read, 5 are left out: in/0.md, in/1.md, in/2.md, ..." in caplog.text


@pytest.mark.parametrize("content", [b"no gzip at all", gzip.compress(b"text" * 100, mtime=0)[:-12]])
def test_a_file_that_cannot_be_unpacked_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.txt\.gz.*cannot be unpacked"):
        opened(TextSource(path=str(tmp_path)))


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "part.parquet", [*TEXTS])
    for place in (path, tmp_path):
        assert tokens_of(opened(ParquetSource(format="parquet", path=str(place)))) == EXPECTED


@pytest.mark.parametrize(
    ("texts", "column", "cause"),
    [
        (["a", None], "text", r"row 2 has no text there"),
        (["a"], "body", r'no such column \(it has: "body", "number"\)'),
    ],
)
def test_parquet_without_text_is_refused(
    tmp_path: Path, texts: list[str | None], column: str, cause: str
) -> None:
    path = write_parquet(tmp_path / "part.parquet", texts, column)
    with pytest.raises(UserError, match=rf"data\.sources\[0\]\.field: 'text': .*{cause}"):
        opened(ParquetSource(format="parquet", path=str(path)))


def test_parquet_columns_of_numbers_and_other_files_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "part.parquet", ["a"])
    with pytest.raises(UserError, match="int64 there, not text"):
        opened(ParquetSource(format="parquet", path=str(path), field="number"))
    path.write_bytes(b"no parquet at all")
    with pytest.raises(UserError, match="is no parquet file"):
        opened(ParquetSource(format="parquet", path=str(path)))


def test_without_pyarrow_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "part.parquet", ["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install .*\[parquet\]"):
        opened(ParquetSource(format="parquet", path=str(tmp_path)))


def test_tokens_are_shared_by_what_files_hold_not_by_where_they_lie(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path / "cache")
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        write_json_lines(tmp_path / name / f"{name}.jsonl")
        source = JsonlSource(format="jsonl", path=str(tmp_path / name))
        assert tokens_of(opened(source, cache=cache)) == EXPECTED
    assert len(list((tmp_path / "cache").glob("*.tokens"))) == 1
    (tmp_path / "here" / "here.jsonl").write_text('{"text": "another text"}\n')
    assert (
        tokens_of(opened(JsonlSource(format="jsonl", path=str(tmp_path / "here")), cache=cache))
        == b"another text\0"
    )
    assert len(list((tmp_path / "cache").glob("*.tokens"))) == 2


# --- validation ---


def test_sources_of_their_own_validate_and_nothing_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"t" * 8 * 40)
    (tmp_path / "check.txt").write_bytes(b"v" * 8 * 5)
    data = DataSpec(
        sources=(TextSource(path=str(tmp_path / "train.txt")),),
        validation=(TextSource(path=str(tmp_path / "check.txt")),),
        sequence_tokens=8,
    )
    dataset = open_dataset(data, MODEL, seed=0)
    assert (dataset.num_train_samples, dataset.num_validation_samples) == (40, 5)
    assert set(dataset.train_batch(range(80)).inputs.ravel().tolist()) <= {ord("t"), 0}
    assert set(dataset.validation_batch(range(10)).inputs.ravel().tolist()) <= {ord("v"), 0}
    alone = open_dataset(data.model_copy(update={"validation": ()}), MODEL, seed=0)
    assert alone.fingerprint != dataset.fingerprint


def test_held_out_samples_and_sources_to_validate_on_exclude_each_other(tmp_path: Path) -> None:
    source = TextSource(path=str(tmp_path))
    with pytest.raises(ValueError, match="leave one of the two away"):
        DataSpec(sources=(source,), validation=(source,), validation_ratio=0.1)


def test_a_validation_source_is_named_by_its_own_field(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"t" * 80)
    data = DataSpec(
        sources=(TextSource(path=str(tmp_path / "train.txt")),),
        validation=(TextSource(path="/nowhere/at/all"),),
    )
    with pytest.raises(UserError, match=r"data\.validation\[0\]\.path: '/nowhere/at/all'"):
        open_dataset(data, MODEL, seed=0)
