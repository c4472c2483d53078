"""What users get wrong about data: each error names the field, the value and what would be right."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from skein.config.data.sources import DigitsSource, JsonlSource, SourceSpec, TextSource, TokenSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec
from skein.errors import UserError
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.table import ModelSpec
from skein.storage.roots import Roots
from worker.data import open_dataset
from worker.data.files import readable

LANGUAGE = LlamaModel(shape=LlamaShape())
IMAGES = DigitsCnnModel(family="digits_cnn")
FIRST = "data.sources[0]"


def refusal(source: SourceSpec, *, model: ModelSpec = LANGUAGE, batch: BatchSpec | None = None) -> UserError:
    data = DataSpec(sources=(source,), sequence_tokens=4, validation_ratio=0.0)
    with pytest.raises(UserError) as caught:
        open_dataset(data, model, seed=0, batch=batch)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", ["link.txt", "out/secret.txt"])
def test_a_link_among_the_files_leads_nowhere_outside_of_the_root(tmp_path: Path, name: str) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "secret.txt").write_text("not for jobs")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link.txt").symlink_to("../beside/secret.txt")
    (tmp_path / "root" / "out").symlink_to("../beside")
    source = TextSource(path=str(tmp_path / "root"), glob=name)
    roots = Roots.of("--data-root", [tmp_path / "root"], usual="data")
    with pytest.raises(UserError, match=r"leads out of the data root .*root: "):
        open_dataset(DataSpec(sources=(source,)), LANGUAGE, seed=0, roots=roots)


def test_a_pattern_does_not_lead_upwards(tmp_path: Path) -> None:
    error = refusal(TextSource(path=str(text_beside(tmp_path, "a.txt")), glob="../*/a.txt"))
    assert error.field == f"{FIRST}.glob"
    assert "upwards" in error.hint


def text(path: Path, glob: str = "**/*.txt") -> TextSource:
    return TextSource(path=str(path), glob=glob)


def jsonl(path: Path, content: bytes) -> JsonlSource:
    path.write_bytes(content)
    return JsonlSource(format="jsonl", path=str(path))


def tokens(path: Path, content: bytes) -> TokenSource:
    path.write_bytes(content)
    return TokenSource(format="tokens", path=str(path))


def text_beside(folder: Path, name: str, content: bytes = b"text") -> Path:
    (folder / name).write_bytes(content)
    return folder


def ids(*values: int) -> bytes:
    return np.array(values, "<u2").tobytes()


CASES: dict[str, tuple[Callable[[Path], SourceSpec], str, str]] = {
    "absent path": (lambda p: text(p / "no"), f"{FIRST}.path", "no such file or folder on this worker"),
    "empty folder": (text, f"{FIRST}.path", "the folder is empty"),
    "no match": (lambda p: text(text_beside(p, "a.md")), f"{FIRST}.glob", "matches no file"),
    "absolute glob": (
        lambda p: text(text_beside(p, "a.txt"), "/etc/*"),
        f"{FIRST}.glob",
        "relative to the folder",
    ),
    "empty glob": (lambda p: text(text_beside(p, "a.txt"), ""), f"{FIRST}.glob", "relative to the folder"),
    "empty files": (lambda p: text(text_beside(p, "a.txt", b"")), f"{FIRST}.path", "holds no text"),
    "no lines": (lambda p: jsonl(p / "a", b""), f"{FIRST}.path", "holds no text"),
    "not JSON": (
        lambda p: jsonl(p / "a", b'{"text": ""}\n{text}\n'),
        f"{FIRST}.path",
        "line 2': is not JSON",
    ),
    "not UTF-8": (lambda p: jsonl(p / "a", b'{"text": "\xff"}'), f"{FIRST}.path", "line 1': is not JSON"),
    "too deep": (lambda p: jsonl(p / "a", b"[" * 100_000), f"{FIRST}.path", "line 1': is not JSON"),
    "not an object": (lambda p: jsonl(p / "a", b'"text"\n'), f"{FIRST}.path", "line 1': is not an object"),
    "no field": (
        lambda p: jsonl(p / "a", b'\n{"body": "x"}'),
        f"{FIRST}.field",
        'line 2 has no such field (it has: "body")',
    ),
    "no fields": (lambda p: jsonl(p / "a", b"{}"), f"{FIRST}.field", "(it has: none)"),
    "number": (
        lambda p: jsonl(p / "a", b'{"text": 7}'),
        f"{FIRST}.field",
        "line 1 has no text there but int",
    ),
    "absent tokens": (
        lambda p: TokenSource(format="tokens", path=str(p / "no")),
        f"{FIRST}.path",
        "no such file on this worker",
    ),
    "tokens folder": (lambda p: TokenSource(format="tokens", path=str(p)), f"{FIRST}.path", "no such file"),
    "half an id": (
        lambda p: tokens(p / "a", b"abc"),
        f"{FIRST}.dtype",
        "3 bytes are not a whole number of uint16",
    ),
    "one id": (lambda p: tokens(p / "a", ids(1)), f"{FIRST}.path", "fewer than two token ids"),
    "large id": (
        lambda p: tokens(p / "a", ids(1, 255, 256)),
        f"{FIRST}.path",
        "id 256 at index 2 is outside",
    ),
    "images": (lambda _: DigitsSource(format="digits"), f"{FIRST}.format", "a language model reads text"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_data_are_refused_with_field_and_cure(tmp_path: Path, case: str) -> None:
    make_source, field, hint = CASES[case]
    error = refusal(make_source(tmp_path))
    assert error.field == field
    assert hint in str(error)


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids.bin"
    path.write_bytes(np.array([3, -7], "<i4").tobytes())
    error = refusal(TokenSource(format="tokens", path=str(path), dtype="int32"))
    assert "id -7 at index 1 is outside" in str(error)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in str(refusal(text(tmp_path / "pipe")))


def test_a_failure_to_read_names_the_path_and_the_systems_reason() -> None:
    reason = r"data\.sources\[0\]\.path: '/data/a': cannot be read on this worker \(Permission denied\)"
    with pytest.raises(UserError, match=reason), readable(f"{FIRST}.path", "/data/a"):
        raise PermissionError(13, "Permission denied")


def test_text_for_an_image_model_is_refused(tmp_path: Path) -> None:
    error = refusal(text(text_beside(tmp_path, "a.txt")), model=IMAGES)
    assert (error.field, error.value) == (f"{FIRST}.format", "text")


def test_fewer_samples_than_a_batch_are_refused(tmp_path: Path) -> None:
    source = text(text_beside(tmp_path, "a.txt", b"x" * 28))
    error = refusal(source, batch=BatchSpec(samples=8, microbatch_samples=4))
    assert str(error).startswith("data.sources: 7: training samples are fewer than the 8 of one step")


def test_missing_scikit_learn_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    error = refusal(DigitsSource(format="digits"), model=IMAGES)
    assert "pip install '.[examples]' in Skein's source folder" in str(error)


def test_the_second_source_is_named_by_its_number(tmp_path: Path) -> None:
    good = text(text_beside(tmp_path, "a.txt"))
    data = DataSpec(sources=(good, text(tmp_path / "no")))
    with pytest.raises(UserError, match=r"^data\.sources\[1\]\.path: "):
        open_dataset(data, LANGUAGE, seed=0)


@pytest.mark.parametrize("what", ["shortened", "removed"])
def test_a_file_that_changes_under_the_job_gives_an_error_and_not_a_signal(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 100)
    data = DataSpec(sources=(text(path),), sequence_tokens=50, validation_ratio=0.0)
    dataset = open_dataset(data, LANGUAGE, seed=0)
    if what == "removed":
        path.unlink()
    else:
        path.write_bytes(b"x" * 10)
    with pytest.raises(UserError, match="restore it" if what == "shortened" else "cannot be read"):
        dataset.train_batch([0, 1])
