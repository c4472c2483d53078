"""Batches by position, from files of every format."""

import json
from pathlib import Path

import numpy as np
import pytest

from skein.config.data.sources import DigitsSource, JsonlSource, SourceSpec, TextSource, TokenSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec
from skein.data.cursor import positions_of
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.llama import LlamaModel, LlamaShape
from worker.data import Batch, Dataset, open_dataset

BYTES_MODEL = LlamaModel(shape=LlamaShape())
BATCH = BatchSpec(samples=8, microbatch_samples=2)


def spec(*sources: SourceSpec, sequence_tokens: int = 4, validation_ratio: float = 0.0) -> DataSpec:
    return DataSpec(sources=sources, sequence_tokens=sequence_tokens, validation_ratio=validation_ratio)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def in_order(dataset: Dataset) -> list[tuple[bytes, list[int]]]:
    """Inputs and labels of every training sample, sorted, each once."""
    batch = dataset.train_batch(range(dataset.num_train_samples))
    rows = zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True)
    return sorted((bytes(inputs), labels) for inputs, labels in rows)


def stream_of(dataset: Dataset, source: int = 0) -> list[int]:
    """All tokens of a source, put together again from its samples in order."""
    samples = dataset.sources[source]
    rows = [samples.read(index) for index in range(samples.num_samples)]
    first: list[int] = rows[0][0].tolist()[:1]
    return first + [int(label) for _, labels in rows for label in labels if label != -100]


def equal(left: Batch, right: Batch) -> bool:
    return np.array_equal(left.inputs, right.inputs) and np.array_equal(left.labels, right.labels)


@pytest.fixture
def corpus(tmp_path: Path) -> DataSpec:
    """Two weighted sources: a folder of text and a file of JSON lines."""
    for index in range(20):
        write(tmp_path / f"text/{index % 3}/{index}.txt", f"file {index} of the corpus".encode())
    lines = "\n".join(json.dumps({"text": f"record {index}"}) for index in range(30))
    jsonl = write(tmp_path / "records.jsonl", lines.encode())
    return spec(
        TextSource(path=str(tmp_path / "text"), weight=2.0),
        JsonlSource(format="jsonl", path=str(jsonl)),
        sequence_tokens=16,
        validation_ratio=0.2,
    )


def test_samples_are_windows_whose_labels_are_one_token_later(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"abcdefghi")
    dataset = open_dataset(spec(TextSource(path=str(path))), BYTES_MODEL, seed=0)
    # Nine bytes and the separator: two whole windows of four, and one label left over.
    assert in_order(dataset) == [
        (b"abcd", list(b"bcde")),
        (b"efgh", list(b"fghi")),
        (b"i\0\0\0", [0, -100, -100, -100]),
    ]


def test_a_batch_has_int64_tokens_and_labels_of_one_shape(corpus: DataSpec) -> None:
    batch = open_dataset(corpus, BYTES_MODEL, seed=0).train_batch([5, 3, 5])
    assert batch.inputs.shape == batch.labels.shape == (3, 16)
    assert batch.inputs.dtype == batch.labels.dtype == np.int64
    assert np.array_equal(batch.inputs[0], batch.inputs[2])


def test_files_come_in_the_order_of_their_relative_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a.txt", "c.md"):
        write(tmp_path / name, name.encode())
    dataset = open_dataset(spec(TextSource(path=str(tmp_path))), BYTES_MODEL, seed=0)
    assert bytes(stream_of(dataset)) == b"a.txt\0a/z.txt\0b.txt\0"


def test_a_glob_chooses_the_files(tmp_path: Path) -> None:
    for name in ("a.py", "b.txt", "sub/c.py"):
        write(tmp_path / name, name.encode())
    dataset = open_dataset(spec(TextSource(path=str(tmp_path), glob="**/*.py")), BYTES_MODEL, seed=0)
    assert bytes(stream_of(dataset)) == b"a.py\0sub/c.py\0"


@pytest.mark.parametrize("length", [1, 2, 3, 7, 50])
def test_windows_cross_files_and_empty_files_without_loss(tmp_path: Path, length: int) -> None:
    texts = [b"one", b"", b"", b"twenty", b"x", bytes(range(256)), b""]
    for index, text in enumerate(texts):
        write(tmp_path / f"{index}.txt", text)
    data = spec(TextSource(path=str(tmp_path)), sequence_tokens=length)
    dataset = open_dataset(data, BYTES_MODEL, seed=0)
    assert bytes(stream_of(dataset)) == b"".join(text + b"\0" for text in texts)


def test_json_lines_become_documents(tmp_path: Path) -> None:
    lines = [
        '{"body": "one", "n": 1}',
        "",
        '{"body": "zw\\u00f6lf"}',
        '{"body": "half \\ud800"}',
        '{"body": ""}',
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    source = JsonlSource(format="jsonl", path=str(path), field="body")
    dataset = open_dataset(spec(source), BYTES_MODEL, seed=0)
    assert bytes(stream_of(dataset)).decode() == "one\0zwölf\0half ?\0\0"


def test_a_folder_of_json_lines_is_read_whole(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", json.dumps({"text": name}).encode())
    dataset = open_dataset(spec(JsonlSource(format="jsonl", path=str(tmp_path))), BYTES_MODEL, seed=0)
    assert bytes(stream_of(dataset)) == b"a\0b\0"


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_token_files_are_read_as_little_endian_ids(tmp_path: Path, dtype: str) -> None:
    ids = np.arange(100) * 2
    path = write(tmp_path / "ids.bin", ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    source = TokenSource.model_validate({"format": "tokens", "path": str(path), "dtype": dtype})
    dataset = open_dataset(spec(source, sequence_tokens=7), BYTES_MODEL, seed=0)
    assert stream_of(dataset) == ids.tolist()


def test_tokens_need_no_byte_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path / "ids.bin", bytes(range(10)))
    source = TokenSource(format="tokens", path=str(path), dtype="uint8")
    small = LlamaModel(shape=LlamaShape(vocab_size=10))
    assert open_dataset(spec(source), small, seed=0).num_train_samples == 3


def test_digits_are_images_from_zero_to_one() -> None:
    data = spec(DigitsSource(format="digits"), validation_ratio=0.1)
    dataset = open_dataset(data, DigitsCnnModel(family="digits_cnn"), seed=0)
    assert (dataset.num_train_samples, dataset.num_validation_samples) == (1617, 180)
    batch = dataset.train_batch(range(500))
    assert batch.inputs.shape == (500, 1, 8, 8)
    assert batch.inputs.dtype == np.float32
    assert (batch.inputs.min(), batch.inputs.max()) == (0.0, 1.0)
    assert batch.labels.shape == (500,)
    assert batch.labels.dtype == np.int64
    assert set(batch.labels.tolist()) == set(range(10))


def test_an_epoch_reads_every_training_sample_once_and_no_validation_sample(tmp_path: Path) -> None:
    ids = np.arange(0, 60_000, 10, dtype=np.uint16)
    path = write(tmp_path / "ids.bin", ids.tobytes())
    model = LlamaModel(shape=LlamaShape(vocab_size=65_536))
    data = spec(TokenSource(format="tokens", path=str(path)), sequence_tokens=10, validation_ratio=0.1)
    dataset = open_dataset(data, model, seed=4)
    trained_on = dataset.train_batch(range(dataset.num_train_samples)).inputs[:, 0].tolist()
    held_out = dataset.validation_batch(range(dataset.num_validation_samples)).inputs[:, 0].tolist()
    assert len(held_out) == 60
    assert sorted(trained_on + held_out) == ids[::10].tolist()


def test_a_restart_at_any_step_reads_the_same_batches(corpus: DataSpec) -> None:
    first = open_dataset(corpus, BYTES_MODEL, seed=1)
    undisturbed = [first.train_batch(positions_of(step, 0, BATCH)) for step in range(12)]
    restarted = open_dataset(corpus, BYTES_MODEL, seed=1)
    assert all(
        equal(restarted.train_batch(positions_of(step, 0, BATCH)), undisturbed[step]) for step in range(7, 12)
    )
    assert equal(restarted.validation_batch(range(5)), first.validation_batch(range(5)))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_step_reads_the_same_samples_on_any_number_of_workers(corpus: DataSpec, num_workers: int) -> None:
    workers = [open_dataset(corpus, BYTES_MODEL, seed=1) for _ in range(num_workers)]
    step = 3
    parts = [
        workers[(microbatch * 2 + 1) % num_workers].train_batch(positions_of(step, microbatch, BATCH))
        for microbatch in range(BATCH.num_microbatches)
    ]
    whole = workers[0].train_batch(range(step * BATCH.samples, (step + 1) * BATCH.samples))
    assert np.array_equal(np.concatenate([part.inputs for part in parts]), whole.inputs)
    assert np.array_equal(np.concatenate([part.labels for part in parts]), whole.labels)


def test_another_seed_reads_in_another_order(corpus: DataSpec) -> None:
    batches = [open_dataset(corpus, BYTES_MODEL, seed=seed).train_batch(range(16)) for seed in (1, 2)]
    assert not equal(*batches)


def test_the_fingerprint_does_not_depend_on_where_the_data_lie(tmp_path: Path) -> None:
    fingerprints = set()
    for place in ("here", "there"):
        write(tmp_path / place / "sub/a.txt", b"some text")
        data = spec(TextSource(path=str(tmp_path / place)))
        fingerprints.add(open_dataset(data, BYTES_MODEL, seed=0).fingerprint)
    assert len(fingerprints) == 1


@pytest.mark.parametrize(
    ("name", "content"), [("sub/a.txt", b"some texT"), ("sub/b.txt", b"some text"), ("c.txt", b"")]
)
def test_the_fingerprint_tells_other_data_apart(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path / "here/sub/a.txt", b"some text")
    write(tmp_path / "there/sub/a.txt", b"some text")
    changed = tmp_path / "there" / name
    if name == "sub/b.txt":
        (tmp_path / "there/sub/a.txt").unlink()
    write(changed, content)
    here, there = (
        open_dataset(spec(TextSource(path=str(tmp_path / place))), BYTES_MODEL, seed=0)
        for place in ("here", "there")
    )
    assert here.fingerprint != there.fingerprint


def test_the_fingerprint_covers_the_split(corpus: DataSpec) -> None:
    assert len({open_dataset(corpus, BYTES_MODEL, seed=seed).fingerprint for seed in (1, 2)}) == 2
