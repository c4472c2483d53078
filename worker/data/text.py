"""Text files, lines of JSON, rows of parquet and arrays of token ids as streams of tokens."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from skein.config.data.sources import JsonlSource, ParquetSource, TextSource, TokenSource
from skein.config.data.spec import NEWEST_RULES
from skein.errors import UnfitError, UserError
from skein.storage.outside import call_moved
from skein.storage.roots import Roots
from worker.data.cache import TokenCache
from worker.data.documents import (
    GZIP,
    Document,
    has_packed,
    lines_of_json,
    rows_of_parquet,
    whole_files,
)
from worker.data.files import DataFile, FileDigest, FileStamp, digest_of_files, open_files, readable
from worker.data.samples import FileTokens, Integers, SampleWindows, TokenStream
from worker.data.tokenizer import ByteTokenizer, Tokenizer

_SCAN_BYTES = 4 << 20
_LAYOUT = "1"
"""Raised when equal files would give other tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOpening:
    """Settings with which all sources of a job are opened."""

    sequence_tokens: int
    vocab_size: int
    roots: Roots
    cache: TokenCache
    tokenizer: Tokenizer | None
    """None where no source is text."""
    rules: int = NEWEST_RULES
    """Version of the rules by which files become samples."""


def open_source(
    source: TextSource | JsonlSource | ParquetSource, opening: SourceOpening, *, field: str
) -> SampleWindows:
    """Windows over the texts in a file, or in a folder.

    Bytes of text files are read where they lie; all else is made once and kept in the cache.

    Raises:
        UserError: the files are absent, unreadable, empty or not what the format or the tokenizer says.
        OSError: there is no room for the tokens.
    """
    tokenizer = opening.tokenizer
    assert tokenizer is not None
    pattern = "**/*.jsonl" if isinstance(source, JsonlSource) else source.glob
    patterns = (pattern,) if isinstance(source, ParquetSource) else (pattern, f"{pattern}{GZIP}")
    files = open_files(source.path, patterns, field=field, roots=opening.roots, rules=opening.rules)
    stream: TokenStream
    if isinstance(source, TextSource) and isinstance(tokenizer, ByteTokenizer) and not has_packed(files):
        stream = FileTokens.of(
            files, tokenizer.dtype, separator=tokenizer.separator.token, field=f"{field}.path"
        )
        is_empty = not any(file.size for file in files)
    else:
        stream = _tokens(source, files, tokenizer, opening.cache, field)
        is_empty = False
    if is_empty or len(stream) < 2:
        hint = "holds no text: give at least one file that is not empty"
        raise UserError(f"{field}.path", source.path, hint)
    digest = f"{tokenizer.digest} {digest_of_files(files)}"
    return SampleWindows(stream=stream, sequence_tokens=opening.sequence_tokens, digest=digest)


def _tokens(
    source: TextSource | JsonlSource | ParquetSource,
    files: tuple[DataFile, ...],
    tokenizer: Tokenizer,
    cache: TokenCache,
    field: str,
) -> Integers:
    documents: Callable[[], Iterator[Document]]
    match source:
        case TextSource():
            kind, documents = "text", lambda: whole_files(files, field)
        case JsonlSource():
            kind, documents = f"jsonl {source.field}", lambda: lines_of_json(files, source.field, field)
        case ParquetSource():
            kind, documents = f"parquet {source.field}", lambda: rows_of_parquet(files, source.field, field)
    key = _key(kind, files, tokenizer)
    return cache.tokens(key, tokenizer.dtype, lambda: tokenizer.stream(documents()))


def _key(kind: str, files: Iterable[DataFile], tokenizer: Tokenizer) -> str:
    """Names tokens by all that they depend on: what files hold, and how it is read; not where they lie."""
    total = hashlib.sha256(f"{_LAYOUT}\0{kind}\0{tokenizer.digest}\0{tokenizer.separator.token}\n".encode())
    for file in files:
        total.update(f"{file.name.endswith(GZIP)} {file.size} {file.sha256}\n".encode())
    return total.hexdigest()


def open_tokens(source: TokenSource, opening: SourceOpening, *, field: str) -> SampleWindows:
    """Windows over an array of token ids, which is read once to check and to hash it.

    Raises:
        UserError: the file is absent, unreadable or empty, of a size that `source.dtype` does not divide, or holds an
            id outside the model's vocabulary.
    """
    dtype: np.dtype[np.integer] = np.dtype(source.dtype).newbyteorder("<")
    with readable(f"{field}.path", source.path):
        place = opening.roots.find(source.path, field=f"{field}.path")
        try:
            content = place.open()
        except (FileNotFoundError, IsADirectoryError) as error:
            hint = "no such file on this worker: give one flat array of token ids"
            raise UnfitError(f"{field}.path", source.path, hint) from error
    digest = FileDigest()
    with readable(f"{field}.path", source.path), content:
        stamp = FileStamp.of(content)
        _check_size(stamp.size, dtype, source, field)
        while part := content.read(_SCAN_BYTES):
            _check_ids(part, digest.size, dtype, opening.vocab_size, source, field)
            digest.update(part)
            call_moved()
    file = digest.file(place, Path(source.path).name, stamp)
    stream = FileTokens.of((file,), dtype, field=f"{field}.path")
    name = f"{source.dtype} {digest_of_files([file])}"
    return SampleWindows(stream=stream, sequence_tokens=opening.sequence_tokens, digest=name)


def _check_size(size: int, dtype: np.dtype[np.integer], source: TokenSource, field: str) -> None:
    if size % dtype.itemsize:
        hint = (
            f"{size} bytes are not a whole number of {source.dtype} ids: give the dtype it was written with"
        )
        raise UserError(f"{field}.dtype", source.dtype, hint)
    if size < 2 * dtype.itemsize:
        hint = "holds fewer than two token ids: there is nothing to predict"
        raise UserError(f"{field}.path", source.path, hint)


def _check_ids(
    part: bytes, start: int, dtype: np.dtype[np.integer], vocab_size: int, source: TokenSource, field: str
) -> None:
    ids: Integers = np.frombuffer(part, dtype, len(part) // dtype.itemsize)
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        index = int(wrong.argmax())
        place = start // dtype.itemsize + index
        hint = (
            f"id {ids[index]} at index {place} is outside the model's vocabulary of {vocab_size}: "
            f"give the model the tokenizer's vocab_size, or the dtype the file was written with ({source.dtype}?)"
        )
        raise UserError(f"{field}.path", source.path, hint)
