"""Tokenizers beside an export: bytes, a file, a folder's; and what is not there, or is no tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer

from client.exporting.vocabulary import byte_tokenizer, vocabulary_of
from skein.config.job import JobSpec
from skein.config.load import parse_job

TEXT = "def café():\n    return '\u2014 \U0001f9f6\x00\x7f\xa0'  # ok"
JOB = """
name: a
model: {family: llama, preset: llama-1m}
data: {sources: [{format: text, path: /books}]}
budget: {steps: 1}
"""


def job(*overrides: str) -> JobSpec:
    return parse_job(JOB, origin="job.yaml", overrides=overrides)


def written(files: Mapping[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def words(path: Path) -> bytes:
    """A small tokenizer file at `path`; gives what is in it."""
    model = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]")
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    built.save(str(path))
    return path.read_bytes()


def test_a_byte_is_the_token_of_its_value() -> None:
    built = tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer()))
    assert built.encode(TEXT, add_special_tokens=False).ids == list(TEXT.encode())
    assert built.decode(list(TEXT.encode())) == TEXT
    every = [built.id_to_token(token) for token in range(256)]
    assert len(set(every)) == 256


def test_transformers_opens_the_byte_tokenizer_of_an_export(tmp_path: Path) -> None:
    out = written(vocabulary_of(job()).files, tmp_path / "out")
    opened = AutoTokenizer.from_pretrained(out)
    assert opened(TEXT)["input_ids"] == list(TEXT.encode())
    assert opened.decode(list(TEXT.encode())) == TEXT


def test_a_tokenizer_file_of_any_name_is_copied(tmp_path: Path) -> None:
    raw = words(tmp_path / "mine.json")
    (tmp_path / "vocab.txt").write_text("of something else")
    found = vocabulary_of(job(f"data.tokenizer={tmp_path}/mine.json"))
    assert found.lacking == []
    assert found.files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    assert found.files["tokenizer.json"] == raw
    opened = AutoTokenizer.from_pretrained(written(found.files, tmp_path / "out"))
    assert opened("b a")["input_ids"] == [2, 1]


def test_what_lies_beside_a_tokenizer_comes_too(tmp_path: Path) -> None:
    words(tmp_path / "tokenizer.json")
    beside = {"tokenizer_config.json": b'{"eos_token": "b"}', "chat_template.jinja": b"{{ messages }}"}
    for name, content in (beside | {"model.safetensors": b"heavy", "notes.txt": b"private"}).items():
        (tmp_path / name).write_bytes(content)
    found = vocabulary_of(job(f"data.tokenizer={tmp_path}/tokenizer.json"))
    assert found.files.keys() == {"tokenizer.json", *beside}
    assert found.files.items() >= beside.items()


def test_tokens_read_as_they_are_keep_the_tokenizer_of_the_weights_they_began_from(tmp_path: Path) -> None:
    raw = words(tmp_path / "tokenizer.json")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    tokens = ("data.sources=[{format: tokens, path: /t}]", f"model.init_from={tmp_path}")
    found = vocabulary_of(job(*tokens))
    assert found.files["tokenizer.json"] == raw
    assert found.files["generation_config.json"] == b'{"eos_token_id": 2}'
    # Text was read with another: that is the one to go with the weights.
    assert vocabulary_of(job(tokens[1])).files["tokenizer.json"] != raw


@pytest.mark.parametrize("content", [None, b"root:x:0:0", b"[1]", b'{"password": 1}'])
@pytest.mark.parametrize("name", ["mine.json", "tokenizer.json"])
def test_what_is_no_tokenizer_here_is_not_copied_and_that_is_said(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    found = vocabulary_of(job(f"data.tokenizer={tmp_path}/{name}"))
    assert found.files == {}
    [line] = found.lacking
    assert str(tmp_path) in line
    assert "beside the weights" in line


@pytest.mark.parametrize(
    "named",
    [
        ["data.tokenizer=data://llama/tokenizer.json"],
        ["data.sources=[{format: tokens, path: /t}]", "model.init_from=data://llama"],
    ],
)
def test_a_tokenizer_that_workers_offer_is_not_here_and_that_is_said(named: list[str]) -> None:
    found = vocabulary_of(job(*named))
    assert found.files == {}
    [line] = found.lacking
    assert "data://llama" in line
    assert "beside the weights" in line


def test_text_in_parquet_is_text() -> None:
    found = vocabulary_of(job("data.sources=[{format: parquet, path: /rows}]"))
    assert found.files.keys() == {"tokenizer.json", "tokenizer_config.json"}


def test_images_have_no_tokenizer() -> None:
    found = vocabulary_of(job("model={family: digits_cnn}", "data.sources=[{format: digits}]"))
    assert (found.files, found.lacking) == ({}, [])
