"""The documents in files, one after the other and in pieces: no file is ever held in memory whole."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, cast

from skein.errors import UnfitError, UserError
from skein.own import install_hint
from skein.storage.outside import call_moved
from worker.data.files import DataFile

if TYPE_CHECKING:
    import pyarrow

GZIP = ".gz"
_CHUNK_BYTES = 1 << 20
_LONGEST_LINE = 1 << 30
_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Text of a source; `where` says for people where it was found, `pieces` are its bytes, to be taken once."""

    where: str
    pieces: Iterable[bytes]


def whole_files(files: Iterable[DataFile], field: str) -> Iterator[Document]:
    """Each file as one document."""
    for file in files:
        yield Document(where=str(file.place), pieces=_pieces(file, field))


def lines_of_json(files: Iterable[DataFile], key: str, field: str) -> Iterator[Document]:
    """The text under `key` of each line.

    Raises:
        UserError: a line is no object with text there.
    """
    for where, found in objects_of_json(files, field):
        yield Document(where=where, pieces=(_text_of(found, key, where, field),))


def objects_of_json(files: Iterable[DataFile], field: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The object of each line, and where it was found, for people.

    Raises:
        UserError: a line is no object.
    """
    for file in files:
        with _opened(file, field) as lines:
            for number, line in enumerate(_lines(lines, file, field), start=1):
                if line.strip():
                    where = f"{file.place} line {number}"
                    yield where, _object(line, where, field)


def rows_of_parquet(files: Sequence[DataFile], key: str, field: str) -> Iterator[Document]:
    """The text in the column `key` of each row.

    Raises:
        UserError: pyarrow is not installed, or a file is no parquet file with text in that column.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        hint = f"needs pyarrow on every worker of the first stage: {install_hint('parquet')}"
        raise UnfitError(f"{field}.format", "parquet", hint) from error
    for file in files:
        with file.open(f"{field}.path") as content:
            try:
                table = pyarrow.parquet.ParquetFile(content)
                _check_column(table.schema_arrow, key, file, field)
                rows = 0
                for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=[key]):
                    call_moved()
                    for text in batch.column(0).to_pylist():
                        rows += 1
                        yield _row(text, key, f"{file.place} row {rows}", field)
            except pyarrow.ArrowException as error:
                reason = " ".join(str(error).split())
                raise UserError(f"{field}.path", str(file.place), f"is no parquet file: {reason}") from error


def _row(text: object, key: str, where: str, field: str) -> Document:
    if not isinstance(text, str):
        raise UserError(f"{field}.field", key, f"{where} has no text there: leave such rows out")
    return Document(where=where, pieces=(text.encode("utf-8", "replace"),))


def _check_column(schema: "pyarrow.Schema", key: str, file: DataFile, field: str) -> None:
    import pyarrow.types as kinds

    if key not in schema.names:
        found = ", ".join(map(json.dumps, schema.names[:8])) or "none"
        hint = f"{file.place} has no such column (it has: {found}): name the one with the text"
        raise UserError(f"{field}.field", key, hint)
    kind = schema.field(key).type
    kind = kind.value_type if kinds.is_dictionary(kind) else kind
    if not (kinds.is_string(kind) or kinds.is_large_string(kind)):
        raise UserError(
            f"{field}.field", key, f"{file.place} has {kind} there, not text: name a column of strings"
        )


@contextmanager
def _opened(file: DataFile, field: str) -> Iterator[BinaryIO]:
    """The content of a file, unpacked if its name says that it is packed."""
    with file.open(f"{field}.path") as raw:
        if not file.name.endswith(GZIP):
            yield raw
            return
        try:
            with gzip.open(raw, "rb") as unpacked:
                yield cast("BinaryIO", unpacked)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            hint = f"cannot be unpacked ({error}): pack it again with gzip"
            raise UserError(f"{field}.path", str(file.place), hint) from error


def _pieces(file: DataFile, field: str) -> Iterator[bytes]:
    with _opened(file, field) as content:
        while piece := content.read(_CHUNK_BYTES):
            call_moved()
            yield piece


def _lines(content: BinaryIO, file: DataFile, field: str) -> Iterator[bytes]:
    while line := content.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            hint = f"has a line of more than {_LONGEST_LINE} bytes: every line must be one JSON object"
            raise UserError(f"{field}.path", str(file.place), hint)
        yield line


def _object(line: bytes, where: str, field: str) -> Mapping[str, object]:
    try:
        value: object = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise UserError(
            f"{field}.path", where, f"is not JSON ({reason}): every line must be one JSON object"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{field}.path", where, 'is not an object: write it as {"key": ...}')
    return value


def value_of(found: Mapping[str, object], key: str, where: str, field: str, *, wanted: str) -> object:
    """Value of an object under `key`.

    Args:
        field: in the job file, of the key.
        wanted: words for people.

    Raises:
        UserError: it has nothing there.
    """
    if key not in found:
        names = ", ".join(map(json.dumps, sorted(found)[:8])) or "none"
        hint = f"{where} has no such field (it has: {names}): name the one with the {wanted}"
        raise UserError(field, key, hint)
    return found[key]


def _text_of(found: Mapping[str, object], key: str, where: str, field: str) -> bytes:
    text = value_of(found, key, where, f"{field}.field", wanted="text")
    if not isinstance(text, str):
        raise UserError(
            f"{field}.field", key, f"{where} has no text there but {type(text).__name__}: name one with text"
        )
    return text.encode("utf-8", "replace")  # JSON may hold half a surrogate pair, UTF-8 may not


def has_packed(files: Iterable[DataFile]) -> bool:
    """Whether a file has to be unpacked to be read."""
    return any(file.name.endswith(GZIP) for file in files)
