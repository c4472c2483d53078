"""Documents into tokens by a `tokenizers` JSON file."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.errors import UserError
from skein.model.families.llama import LlamaModel, LlamaShape
from worker.data import open_dataset
from worker.data.documents import Document
from worker.data.tokenizer import Tokenizer, load_tokenizer

WORDS = ["[UNK]", "one", "two", "three", "</s>"]


def write_tokenizer(
    path: Path, *, words: list[str] = WORDS, unknown: str = "[UNK]", truncate: int | None = None
) -> str:
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if truncate is not None:
        tokenizer.enable_truncation(truncate)
    tokenizer.save(str(path))
    return str(path)


def flatten(tokenizer: Tokenizer, *texts: str) -> list[int]:
    documents = (Document(where="here", pieces=(text.encode(),)) for text in texts)
    return [int(token) for part in tokenizer.stream(documents) for token in part]


def test_documents_end_with_the_tokenizers_own_separator(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json"), vocab_size=5)
    assert flatten(tokenizer, "one two", "", "three four") == [1, 2, 4, 4, 3, 0, 4]


def test_a_tokenizer_without_a_separator_runs_documents_together(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "t.json", words=WORDS[:-1])
    assert flatten(load_tokenizer(path, vocab_size=4), "one", "two") == [1, 2]


def test_bytes_end_every_document_with_nul() -> None:
    assert flatten(load_tokenizer("bytes", vocab_size=256), "a", "ü") == [97, 0, 0xC3, 0xBC, 0]


def test_no_documents_are_no_tokens(tmp_path: Path) -> None:
    assert flatten(load_tokenizer(write_tokenizer(tmp_path / "t.json"), vocab_size=5)) == []


def test_truncation_set_in_the_file_loses_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json", truncate=2), vocab_size=5)
    assert flatten(tokenizer, "one two three one") == [1, 2, 3, 1, 4]


@pytest.mark.parametrize("line_end", ["\n", " "])
def test_long_documents_are_encoded_in_pieces_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line_end: str
) -> None:
    monkeypatch.setattr("worker.data.tokenizer._PIECE_CHARACTERS", 8)
    monkeypatch.setattr("worker.data.tokenizer._GROUP_PIECES", 3)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json"), vocab_size=5)
    text = line_end.join(["one two"] * 20)
    assert flatten(tokenizer, text, "three") == [*[1, 2] * 20, 4, 3, 4]


def test_a_text_source_is_tokenised_and_the_fingerprint_covers_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three one two")
    model, fingerprints = LlamaModel(shape=LlamaShape(vocab_size=8)), set()
    for words in (WORDS, [*WORDS, "four"]):
        path = write_tokenizer(tmp_path / "t.json", words=words)
        data = DataSpec(
            sources=(TextSource(path=str(tmp_path / "a.txt")),),
            tokenizer=path,
            sequence_tokens=5,
            validation_ratio=0,
        )
        dataset = open_dataset(data, model, seed=0)
        batch = dataset.train_batch([0])
        assert (batch.inputs.tolist(), batch.labels.tolist()) == ([[1, 2, 3, 1, 2]], [[2, 3, 1, 2, 4]])
        fingerprints.add(dataset.fingerprint)
    assert len(fingerprints) == 2


def refusal(name: str, vocab_size: int = 5) -> str:
    with pytest.raises(UserError) as caught:
        load_tokenizer(name, vocab_size=vocab_size)
    assert caught.value.field == "data.tokenizer"
    return str(caught.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    assert "no such file" in refusal(str(tmp_path / "absent.json"))


def test_a_folder_is_refused_with_the_file_to_give(tmp_path: Path) -> None:
    assert "give the tokenizer.json file in it" in refusal(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"model": {"type": "Magic"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    assert "is no tokenizer file" in refusal(str(path))


@pytest.mark.parametrize(("vocab_size", "fits"), [(5, True), (4, False)])
def test_a_vocabulary_larger_than_the_models_is_refused(tmp_path: Path, vocab_size: int, fits: bool) -> None:
    path = write_tokenizer(tmp_path / "t.json")
    if fits:
        load_tokenizer(path, vocab_size=vocab_size)
    else:
        assert "has 5 tokens, the model's vocab_size is 4" in refusal(path, vocab_size)


def test_an_id_beyond_a_gap_in_the_vocabulary_counts(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "t.json")
    content = json.loads(Path(path).read_text())
    content["model"]["vocab"]["three"] = 900
    Path(path).write_text(json.dumps(content))
    assert "has 901 tokens" in refusal(path, 256)


def test_bytes_need_a_vocabulary_of_256() -> None:
    assert "has 256 tokens, the model's vocab_size is 255" in refusal("bytes", 255)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tokenizer(tmp_path / "t.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install '.[worker]' in Skein's source folder" in refusal(path)


def test_text_that_is_not_utf8_is_named_by_file_and_byte(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json"), vocab_size=5)
    with pytest.raises(UserError, match=r"byte 4 of notes\.txt is not UTF-8"):
        list(tokenizer.stream([Document(where="notes.txt", pieces=(b"on", b"e \xff"))]))


def test_text_that_the_tokenizer_cannot_express_is_the_users_error(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "t.json", unknown="[ABSENT]")
    with pytest.raises(UserError, match=r"cannot express notes\.txt"):
        list(load_tokenizer(path, vocab_size=5).stream([Document(where="notes.txt", pieces=(b"one nine",))]))


def test_a_document_in_any_pieces_gives_the_same_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json"), vocab_size=5)
    text = ("one two üüü three\n" * 20_000).encode()
    whole = np.concatenate(list(tokenizer.stream([Document(where="here", pieces=(text,))])))
    for size in (7, 131_072, 200_001):
        pieces = tuple(text[start : start + size] for start in range(0, len(text), size))
        parts = list(tokenizer.stream([Document(where="here", pieces=pieces)]))
        assert np.array_equal(np.concatenate(parts), whole)


def test_a_job_may_name_the_separator(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "t.json")
    usual = load_tokenizer(path, vocab_size=5)
    other = load_tokenizer(path, vocab_size=5, separator="three")
    assert flatten(other, "one", "two") == [1, 3, 2, 3]
    assert str(other.separator) == "three (token 3)"
    assert flatten(load_tokenizer(path, vocab_size=5, separator=""), "one", "two") == [1, 2]
    assert len({usual.digest, other.digest, load_tokenizer(path, vocab_size=5, separator="").digest}) == 3
    assert usual.digest == load_tokenizer(path, vocab_size=5, separator="</s>").digest
    assert flatten(load_tokenizer("bytes", vocab_size=256, separator="\n"), "a") == [97, 10]
    assert flatten(load_tokenizer("bytes", vocab_size=256, separator=""), "a", "b") == [97, 98]


@pytest.mark.parametrize(("name", "separator"), [("t.json", "<|end|>"), ("bytes", "ab")])
def test_a_separator_that_is_no_token_is_refused(tmp_path: Path, name: str, separator: str) -> None:
    write_tokenizer(tmp_path / "t.json")
    path = name if name == "bytes" else str(tmp_path / name)
    with pytest.raises(UserError, match=r"data\.separator") as failure:
        load_tokenizer(path, vocab_size=256, separator=separator)
    assert "for none" in failure.value.hint
