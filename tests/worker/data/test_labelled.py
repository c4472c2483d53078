"""Samples with a class each, from arrays and from lines of JSON."""

import gzip
import json
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from skein.config.data.sources import ArraysSource, JsonlSource, SourceSpec
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec
from skein.data.cursor import positions_of
from skein.errors import UserError
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.mlp import MlpModel
from skein.storage.roots import Roots
from worker.data import Dataset, arrays, open_dataset

FIRST = "data.sources[0]"
MODEL = MlpModel(family="mlp", num_features=6, num_classes=3)
X = np.arange(120, dtype=np.float64).reshape(20, 2, 3) / 7
Y = np.arange(20) % 3


def opened(source: SourceSpec, model: MlpModel | DigitsCnnModel = MODEL, *, ratio: float = 0.0) -> Dataset:
    return open_dataset(DataSpec(sources=(source,), validation_ratio=ratio), model, seed=3)


def arrays_at(path: Path, x: object = X, y: object = Y) -> ArraysSource:
    np.savez_compressed(path, x=np.asarray(x), y=np.asarray(y))
    return ArraysSource(format="arrays", path=str(path))


def lines_at(path: Path, *lines: object) -> JsonlSource:
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return JsonlSource(format="jsonl", path=str(path), field="x", label="y")


def rows(dataset: Dataset) -> list[tuple[list[float], int]]:
    """All training samples with their classes, sorted."""
    batch = dataset.train_batch(range(dataset.num_train_samples))
    flat = batch.inputs.reshape(len(batch.labels), -1)
    return sorted(zip(flat.tolist(), batch.labels.tolist(), strict=True))


WANTED = sorted(zip(X.reshape(20, 6).astype(np.float32).tolist(), Y.tolist(), strict=True))


@pytest.mark.parametrize("dtype", ["f8", ">f4", "f2"])
def test_arrays_are_samples_in_float32(tmp_path: Path, dtype: str) -> None:
    x = X.astype(dtype)
    dataset = opened(arrays_at(tmp_path / "a.npz", np.asfortranarray(x), Y.astype("u1")))
    batch = dataset.train_batch(range(5))
    assert (batch.inputs.dtype.name, batch.inputs.shape) == ("float32", (5, 6))
    assert (batch.labels.dtype.name, batch.labels.shape) == ("int64", (5,))
    wanted = x.astype(np.float32).reshape(20, 6).tolist()
    assert rows(dataset) == sorted(zip(wanted, Y.tolist(), strict=True))


def test_whole_numbers_are_samples_too_and_images_get_their_shape(tmp_path: Path) -> None:
    x = np.arange(30 * 64, dtype=np.uint8).reshape(30, 8, 8)
    dataset = opened(
        arrays_at(tmp_path / "a.npz", x, np.arange(30) % 10), DigitsCnnModel(family="digits_cnn")
    )
    assert dataset.train_batch([0]).inputs.shape == (1, 1, 8, 8)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_with_labels_are_the_samples_of_equal_arrays(tmp_path: Path, name: str) -> None:
    lines = [{"x": x.tolist(), "y": int(y)} for x, y in zip(X, Y, strict=True)]
    dataset = opened(lines_at(tmp_path / name, *lines))
    assert rows(dataset) == WANTED
    assert dataset.fingerprint == opened(arrays_at(tmp_path / "a.npz")).fingerprint


def test_split_order_and_shares_are_those_of_any_source(tmp_path: Path) -> None:
    source, batch = arrays_at(tmp_path / "a.npz"), BatchSpec(samples=4, microbatch_samples=2)
    first, second = (opened(source, ratio=0.2) for _ in range(2))
    assert (first.num_train_samples, first.num_validation_samples) == (16, 4)
    held_out = {tuple(x) for x in first.validation_batch(range(4)).inputs.tolist()}
    assert not held_out & {tuple(x) for x, _ in rows(first)}
    whole = first.train_batch(range(4, 8)).inputs
    parts = [second.train_batch(positions_of(1, microbatch, batch)).inputs for microbatch in (0, 1)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_any_other_number_is_another_fingerprint(tmp_path: Path) -> None:
    before = opened(arrays_at(tmp_path / "a.npz")).fingerprint
    x, y = X.copy(), Y.copy()
    x[7, 1, 1] += 1
    y[7] = (y[7] + 1) % 3
    assert opened(arrays_at(tmp_path / "b.npz", x)).fingerprint != before
    assert opened(arrays_at(tmp_path / "c.npz", y=y)).fingerprint != before


def header_of(claims: tuple[int, ...]) -> bytes:
    """A member that says to be of a shape, and holds eight bytes."""
    out = BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "<f8", "fortran_order": False, "shape": claims})
    return out.getvalue() + bytes(8)


def members_at(path: Path, **members: bytes) -> ArraysSource:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return ArraysSource(format="arrays", path=str(path))


def with_row(value: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    x = X.copy()
    x[4, 0, 1] = value
    return x


def plain(path: Path) -> ArraysSource:
    path.write_bytes(b"no archive")
    return ArraysSource(format="arrays", path=str(path))


CASES: dict[str, tuple[Callable[[Path], SourceSpec], str, str]] = {
    "absent": (
        lambda p: ArraysSource(format="arrays", path=str(p / "no")),
        "path",
        "no such file on this worker: give an .npz file with x and y",
    ),
    "folder": (lambda p: ArraysSource(format="arrays", path=str(p)), "path", "no such file"),
    "no archive": (lambda p: plain(p / "a"), "path", "is no .npz file (File is not a zip file)"),
    "no y": (
        lambda p: members_at(p / "a", x=header_of((1,)), z=b""),
        "path",
        "has no array y (it has: x.npy, z.npy)",
    ),
    "unlike": (lambda p: arrays_at(p / "a.npz", y=Y[:-1]), "path", "x has 20 rows and y 19: give a class"),
    "no rows": (lambda p: arrays_at(p / "a.npz", X[:0], Y[:0]), "path", "has no rows"),
    "objects": (
        lambda p: arrays_at(p / "a.npz", np.array([{}] * 20, object)),
        "path",
        "x is object of shape (20,): give an array (N, ...) of floats or whole numbers",
    ),
    "complex": (lambda p: arrays_at(p / "a.npz", X * 1j), "path", "x is complex128"),
    "float classes": (
        lambda p: arrays_at(p / "a.npz", y=Y * 1.0),
        "path",
        "y is float64 of shape (20,): give an array (N,) of whole numbers",
    ),
    "table of classes": (
        lambda p: arrays_at(p / "a.npz", y=Y[:, None]),
        "path",
        "y is int64 of shape (20, 1)",
    ),
    "one number": (lambda p: arrays_at(p / "a.npz", 7.0), "path", "x is float64 of shape ()"),
    "width": (
        lambda p: arrays_at(p / "a.npz", X[:, :1]),
        "path",
        "has samples of 3 numbers, the model takes 6: set model.num_features",
    ),
    "class": (
        lambda p: arrays_at(p / "a.npz", y=Y + 1),
        "path",
        "row 2 is of class 3, the model has classes 0 to 2",
    ),
    "negative": (lambda p: arrays_at(p / "a.npz", y=Y - 1), "path", "row 0 is of class -1"),
    "nan": (lambda p: arrays_at(p / "a.npz", with_row(np.nan)), "path", "row 4 is not finite in float32"),
    "large": (lambda p: arrays_at(p / "a.npz", with_row(1e39)), "path", "row 4 is not finite in float32"),
    "claims much": (
        lambda p: members_at(p / "a", x=header_of((2**40, 6)), y=b""),
        "path",
        "x is 48.0 TiB: give at most 4.0 GiB in one source",
    ),
    "claims more": (
        lambda p: members_at(p / "a", x=header_of((99, 6)), y=b""),
        "path",
        "x is shorter than its header",
    ),
    "claims less than nothing": (
        lambda p: members_at(p / "a", x=header_of((-1, 6)), y=b""),
        "path",
        "x is float64 of shape (-1, 6)",
    ),
    "no header": (lambda p: members_at(p / "a", x=b"x" * 99, y=b""), "path", "x is no array"),
    "lines without class": (
        lambda p: lines_at(p / "a", {"x": [1] * 6}),
        "label",
        'line 1 has no such field (it has: "x"): name the one with the class',
    ),
    "lines without numbers": (
        lambda p: lines_at(p / "a", {"z": 1, "y": 1}),
        "field",
        'line 1 has no such field (it has: "y", "z"): name the one with the numbers',
    ),
    "short line": (
        lambda p: lines_at(p / "a", {"x": [1] * 6, "y": 1}, {"x": [1] * 5, "y": 1}),
        "field",
        "line 2 has no list of 6 numbers there",
    ),
    "text in a line": (
        lambda p: lines_at(p / "a", {"x": [1, 2, 3, 4, 5, "6"], "y": 1}),
        "field",
        "line 1 has no list of 6 numbers there",
    ),
    "number beyond floats": (
        lambda p: lines_at(p / "a", {"x": [1, 2, 3, 4, 5, 10**400], "y": 1}),
        "field",
        "line 1 has no list of 6 numbers there",
    ),
    "class in words": (
        lambda p: lines_at(p / "a", {"x": [1] * 6, "y": "cat"}),
        "label",
        "line 1 has no class there: give a whole number from 0 on",
    ),
    "no lines": (lambda p: lines_at(p / "a"), "path", "holds no line"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_sample_is_refused_with_field_and_cure(tmp_path: Path, case: str) -> None:
    make_source, field, hint = CASES[case]
    with pytest.raises(UserError) as caught:
        opened(make_source(tmp_path))
    assert caught.value.field == f"{FIRST}.{field}"
    assert hint in str(caught.value)


def test_more_lines_than_memory_may_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.data.labelled.MOST_BYTES", 3 * 6 * 4)
    line = {"x": [1] * 6, "y": 1}
    assert opened(lines_at(tmp_path / "a", *[line] * 3)).num_train_samples == 3
    with pytest.raises(UserError, match=r"holds more than 72 B of samples: give fewer"):
        opened(lines_at(tmp_path / "b", *[line] * 4))


def test_an_archive_that_is_cut_short_or_spoilt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=X, y=Y)
    whole = bytearray(path.read_bytes())
    whole[400] ^= 1
    path.write_bytes(whole)
    with pytest.raises(UserError, match=r"is no \.npz file \(Bad CRC-32"):
        opened(ArraysSource(format="arrays", path=str(path)))


def test_arrays_outside_the_roots_are_not_read(tmp_path: Path) -> None:
    source = arrays_at(tmp_path / "a.npz")
    (tmp_path / "root").mkdir()
    data = DataSpec(sources=(source,))
    with pytest.raises(UserError, match=r"data\.sources\[0\]\.path"):
        open_dataset(data, MODEL, seed=0, roots=Roots.of("--data-root", (tmp_path / "root",), usual="data"))


def test_what_is_read_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_PIECE_BYTES", 7)
    assert rows(opened(arrays_at(tmp_path / "a.npz"))) == WANTED
