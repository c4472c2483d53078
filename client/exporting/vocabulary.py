"""Tokenizer files of an export, to turn text into its tokens and back, for `transformers.AutoTokenizer`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from skein.config.job import JobSpec
from skein.config.location import OFFERED

BYTES = "bytes"
_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_GENERATION = "generation_config.json"
# What lies beside a tokenizer and belongs to it.
_BESIDE = (
    _CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
_MAX_BYTES = 256 << 20


@dataclass(slots=True, kw_only=True)
class Vocabulary:
    """Files to lie beside exported weights, by name, and what could not be had, in a line each."""

    files: dict[str, bytes] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)


def vocabulary_of(job: JobSpec) -> Vocabulary:
    """The tokenizer that `job` read its text with, or that of the weights it began from; and how those generate."""
    found = Vocabulary()
    if job.model.vocab_size is None:
        return found
    begins_from = job.model.begins_from
    begun = None if begins_from is None or begins_from.startswith(OFFERED) else Path(begins_from)
    if job.data.has_text:
        _add_read_with(job.data.tokenizer, found)
    elif begun is not None:
        _add_folder(begun, found)
    elif begins_from is not None:
        found.lacking.append(_on_workers(begins_from))
    if begun is not None:
        found.files |= dict(_present(begun, (_GENERATION,)))
    return found


def _add_read_with(tokenizer: str, found: Vocabulary) -> None:
    if tokenizer == BYTES:
        found.files |= {_TOKENIZER: _json(byte_tokenizer()), _CONFIG: _json(_plain_config())}
        return
    if tokenizer.startswith(OFFERED):
        found.lacking.append(_on_workers(tokenizer))
        return
    path = Path(tokenizer)
    if path.name == _TOKENIZER:
        _add_folder(path.parent, found)
        return
    raw = dict(_present(path.parent, (path.name,)))
    if not _is_tokenizer(raw.get(path.name)):
        found.lacking.append(f"{path} is no tokenizer file here: copy it beside the weights as {_TOKENIZER}")
        return
    found.files |= {_TOKENIZER: raw[path.name], _CONFIG: _json(_plain_config())}


def _on_workers(path: str) -> str:
    return f"the tokenizer in {path} is on the workers that offer it: copy its files beside the weights"


def _add_folder(folder: Path, found: Vocabulary) -> None:
    files = dict(_present(folder, (_TOKENIZER, *_BESIDE)))
    if _TOKENIZER in files and not _is_tokenizer(files[_TOKENIZER]):
        del files[_TOKENIZER]
    if not files.keys() & {_TOKENIZER, "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"}:
        found.lacking.append(f"no tokenizer is in {folder} here: copy its files beside the weights")
        return
    found.files |= {_CONFIG: _json(_plain_config())} | files


def _present(folder: Path, names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        path = folder / name
        try:
            if path.is_file() and path.stat().st_size <= _MAX_BYTES:
                yield name, path.read_bytes()
        except OSError:
            # Not to be read is not to be there; who calls says so.
            continue


def _is_tokenizer(raw: bytes | None) -> bool:
    """Whether it is what the package tokenizers writes: no other file of this machine gets into an export."""
    try:
        parsed: object = json.loads(raw or b"")
    except ValueError:
        return False
    return isinstance(parsed, dict) and "model" in parsed


def _plain_config() -> Mapping[str, object]:
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def byte_tokenizer() -> dict[str, object]:
    """A `tokenizers` file whose tokens are bytes, each with its value as id.

    The package stands for every byte by a character that prints: itself where it does, one after U+0100 otherwise.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    sign_by_byte = {byte: chr(byte) for byte in printing}
    sign_by_byte |= {byte: chr(0x100 + place) for place, byte in enumerate(others)}
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": step,
        "post_processor": None,
        "decoder": step,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {sign_by_byte[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }


def _json(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
