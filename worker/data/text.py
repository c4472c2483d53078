"""Text files, lines of JSON and arrays of token ids as streams of tokens."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from skein.config.job import JsonlSource, TextSource, TokenSource
from skein.errors import UserError
from skein.storage.roots import Roots
from worker.data.files import DataFile, digest_of, open_files, readable
from worker.data.samples import ArrayTokens, FileBytes, TokenStream, Windows
from worker.data.tokenizer import ByteTokenizer, Document, Tokenizer

_SCAN_TOKENS = 2**22


def open_text(
    source: TextSource, tokenizer: Tokenizer, *, sequence_tokens: int, field: str, roots: Roots
) -> Windows:
    """Windows over text files. Bytes stay in their files; other tokens are kept in memory.

    Raises:
        UserError: the files are absent, unreadable, empty or not what the tokenizer reads.
    """
    files = open_files(source.path, source.glob, field=field, roots=roots)
    stream: TokenStream
    if isinstance(tokenizer, ByteTokenizer):
        stream = FileBytes.of(files, field=f"{field}.path")
    else:
        stream = ArrayTokens(tokens=tokenizer.flatten(_whole_files(files, field)))
    num_bytes = sum(file.size for file in files)
    return _windows(
        stream if num_bytes else None, files, tokenizer, sequence_tokens, f"{field}.path", source.path
    )


def open_jsonl(
    source: JsonlSource, tokenizer: Tokenizer, *, sequence_tokens: int, field: str, roots: Roots
) -> Windows:
    """Windows over the texts in a file, or folder, of JSON lines; tokens are kept in memory, one to four bytes each.

    Raises:
        UserError: the files are absent or unreadable, or a line is not an object with text under `source.field`.
    """
    files = open_files(source.path, "**/*.jsonl", field=field, roots=roots)
    documents = (document for file in files for document in _lines(file, source.field, field))
    stream = ArrayTokens(tokens=tokenizer.flatten(documents))
    return _windows(stream, files, tokenizer, sequence_tokens, f"{field}.path", source.path)


def open_tokens(
    source: TokenSource, *, sequence_tokens: int, vocab_size: int, field: str, roots: Roots
) -> Windows:
    """Windows over a mapped array of token ids, which is read once to check and to hash it.

    Raises:
        UserError: the file is absent, unreadable or empty, of a size that `source.dtype` does not divide, or holds an
            id outside the model's vocabulary.
    """
    dtype = np.dtype(source.dtype).newbyteorder("<")
    with readable(f"{field}.path", source.path):
        place = roots.find(source.path, field=f"{field}.path")
        try:
            opened = place.open()
        except (FileNotFoundError, IsADirectoryError) as error:
            hint = "no such file on this worker: give one flat array of token ids"
            raise UserError(f"{field}.path", source.path, hint) from error
        size = os.fstat(opened.fileno()).st_size
        if size % dtype.itemsize:
            hint = f"{size} bytes are not a whole number of {source.dtype} ids: give the dtype it was written with"
            raise UserError(f"{field}.dtype", source.dtype, hint)
        if size < 2 * dtype.itemsize:
            raise UserError(
                f"{field}.path", source.path, "holds fewer than two token ids: there is nothing to predict"
            )
        tokens = np.memmap(opened, dtype, mode="r")
        opened.close()
    content = hashlib.sha256()
    for start in range(0, len(tokens), _SCAN_TOKENS):
        part = tokens[start : start + _SCAN_TOKENS]
        content.update(part.data)
        _check_ids(part, start, vocab_size, source, field)
    file = DataFile(place=place, name=Path(source.path).name, size=size, sha256=content.hexdigest())
    digest = f"{source.dtype} {digest_of([file])}"
    return Windows(stream=ArrayTokens(tokens=tokens), sequence_tokens=sequence_tokens, digest=digest)


def _check_ids(part: np.ndarray, start: int, vocab_size: int, source: TokenSource, field: str) -> None:
    wrong = (part < 0) | (part >= vocab_size)
    if wrong.any():
        index = int(wrong.argmax())
        hint = (
            f"id {part[index]} at index {start + index} is outside the model's vocabulary of {vocab_size}: "
            f"give the model the tokenizer's vocab_size, or the dtype the file was written with ({source.dtype}?)"
        )
        raise UserError(f"{field}.path", source.path, hint)


def _windows(
    stream: TokenStream | None,
    files: Iterable[DataFile],
    tokenizer: Tokenizer,
    sequence_tokens: int,
    field: str,
    path: str,
) -> Windows:
    if stream is None or stream.num_tokens < 2:
        raise UserError(field, path, "holds no text: give at least one file that is not empty")
    digest = f"{tokenizer.digest} {digest_of(files)}"
    return Windows(stream=stream, sequence_tokens=sequence_tokens, digest=digest)


def _whole_files(files: Iterable[DataFile], field: str) -> Iterator[Document]:
    for file in files:
        with readable(f"{field}.path", file.place.path), file.place.open() as opened:
            text = opened.read()
        yield Document(where=str(file.place), text=text)


def _lines(file: DataFile, key: str, field: str) -> Iterator[Document]:
    with readable(f"{field}.path", file.place.path), file.place.open() as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file.place} line {number}"
                yield Document(where=where, text=_text_of(line, key, where, field))


def _text_of(line: bytes, key: str, where: str, field: str) -> bytes:
    try:
        value: object = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise UserError(
            f"{field}.path", where, f"is not JSON ({reason}): every line must be one JSON object"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{field}.path", where, f"is not an object: write it as {{{json.dumps(key)}: ...}}")
    if key not in value:
        found = ", ".join(map(json.dumps, sorted(value)[:8])) or "none"
        raise UserError(
            f"{field}.field", key, f"{where} has no such field (it has: {found}): name the one with the text"
        )
    text = value[key]
    if not isinstance(text, str):
        raise UserError(
            f"{field}.field", key, f"{where} has no text there but {type(text).__name__}: name one with text"
        )
    return text.encode("utf-8", "replace")  # JSON may hold half a surrogate pair, UTF-8 may not
