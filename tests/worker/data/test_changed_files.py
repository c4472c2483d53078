"""Files that are rewritten while a job reads them: other samples never come of it, whatever their times say."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from skein.config.data.sources import SourceSpec, TextSource, TokenSource
from skein.config.data.spec import DataSpec
from skein.errors import UnfitError
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.storage.roots import EVERYTHING
from worker.data import Dataset, open_dataset
from worker.data import text as text_module
from worker.data.cache import TokenCache
from worker.data.documents import whole_files
from worker.data.files import BLOCK_BYTES, open_files

TOKENS = 64
NUM_SAMPLES = 3 * BLOCK_BYTES // TOKENS + 7
"""Three whole blocks and a part of one."""
MODEL = LlamaModel(shape=LlamaShape())
CONTENT = np.random.default_rng(0).integers(32, 127, NUM_SAMPLES * TOKENS).astype(np.uint8).tobytes()


def source_at(path: Path, kind: str) -> SourceSpec:
    path.write_bytes(CONTENT)
    if kind == "text":
        return TextSource(path=str(path))
    return TokenSource(format="tokens", path=str(path), dtype="uint16")


@pytest.fixture(params=["text", "tokens"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    source = source_at(tmp_path / "data", request.param)
    data = DataSpec(sources=(source,), sequence_tokens=TOKENS, validation_ratio=0.0)
    model = MODEL if request.param == "text" else LlamaModel(shape=LlamaShape(vocab_size=1 << 16))
    return open_dataset(data, model, seed=0)


def rewrite(path: Path, at: int, *, keeps_times: bool) -> None:
    """Another byte in place."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))
    if keeps_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def read_all(dataset: Dataset) -> list[bytes]:
    source = dataset.sources[0]
    return [source.read(sample)[0].tobytes() for sample in range(source.num_samples)]


@pytest.mark.parametrize("keeps_times", [True, False])
@pytest.mark.parametrize("is_read_before", [True, False])
@pytest.mark.parametrize("at", [0, BLOCK_BYTES - 1, BLOCK_BYTES, len(CONTENT) - 1])
def test_a_byte_that_is_rewritten_in_place_is_never_a_sample(
    at: int, is_read_before: bool, keeps_times: bool, dataset: Dataset, tmp_path: Path
) -> None:
    expected = read_all(dataset) if is_read_before else []
    rewrite(tmp_path / "data", at, keeps_times=keeps_times)
    with pytest.raises(UnfitError, match=r"was rewritten since the job began, at byte .*: restore it"):
        read_all(dataset)
    # As soon as the content is what it was, samples are, too.
    (tmp_path / "data").write_bytes(CONTENT)
    restored = read_all(dataset)
    assert restored == (expected or restored)
    assert b"".join(restored[:1]) != b""


def test_only_the_rewritten_part_of_a_file_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    before = dataset.sources[0].read(0)[0].tolist()
    rewrite(tmp_path / "data", 2 * BLOCK_BYTES + 1, keeps_times=False)
    assert dataset.sources[0].read(0)[0].tolist() == before


def test_a_file_with_equal_content_and_other_times_is_read_on(dataset: Dataset, tmp_path: Path) -> None:
    before = read_all(dataset)
    other = tmp_path / "copy"
    other.write_bytes(CONTENT)
    other.replace(tmp_path / "data")
    os.utime(tmp_path / "data", (1, 1))
    assert read_all(dataset) == before


@pytest.mark.parametrize("size", [len(CONTENT) - 1, len(CONTENT) + 2, 0])
def test_a_file_of_another_size_is_refused_whole(size: int, dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes((CONTENT + b"xx")[:size])
    with pytest.raises(UnfitError, match="restore it"):
        dataset.sources[0].read(0)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_tokens_are_not_made_of_a_file_that_changed_after_it_was_hashed(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    pack = gzip.compress if name.endswith(".gz") else bytes
    path.write_bytes(pack(b"first text"))
    files = open_files(str(path), (), field="data.sources[0]", roots=EVERYTHING)
    path.write_bytes(pack(b"other text"))
    os.utime(path, ns=(1, 1))
    with pytest.raises(UnfitError, match="was changed while it was read"):
        [b"".join(document.pieces) for document in whole_files(files, "data.sources[0]")]


def test_a_cache_never_gives_tokens_of_another_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "a.txt.gz", TokenCache(tmp_path / "cache")
    path.write_bytes(gzip.compress(b"first text " * 20))
    data = DataSpec(sources=(TextSource(path=str(path)),), sequence_tokens=8, validation_ratio=0.0)

    def changed_after(*args: object, **options: object) -> object:
        files = open_files(*args, **options)  # type: ignore[arg-type]  # as they were given
        path.write_bytes(gzip.compress(b"other text " * 20))
        os.utime(path, ns=(1, 1))
        return files

    with monkeypatch.context() as patch:
        patch.setattr(text_module, "open_files", changed_after)
        with pytest.raises(UnfitError, match="was changed while it was read"):
            open_dataset(data, MODEL, seed=0, cache=cache)
    path.write_bytes(gzip.compress(b"first text " * 20))
    inputs, _ = open_dataset(data, MODEL, seed=0, cache=cache).sources[0].read(0)
    assert bytes(inputs.astype(np.uint8).tolist()) == b"first te"
