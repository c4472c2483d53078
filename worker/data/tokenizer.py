"""Documents into tokens."""

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from skein.config.data.spec import BYTES
from skein.data.separator import Separator, separator_of, separator_of_bytes
from skein.errors import UnfitError, UserError
from skein.own import install_hint
from skein.storage.roots import EVERYTHING, Roots
from worker.data.documents import Document
from worker.data.files import readable
from worker.data.samples import Integers

if TYPE_CHECKING:
    import tokenizers

_FIELD = "data.tokenizer"
_GROUP_BYTES = 1 << 20
_PIECE_CHARACTERS = 2**17
_GROUP_PIECES = 32
"""So many pieces are encoded side by side: together this bounds the tokens that exist as Python objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTokenizer:
    """A token is a byte."""

    separator: Separator

    @property
    def dtype(self) -> np.dtype[np.integer]:
        return np.dtype(np.uint8)

    @property
    def digest(self) -> str:
        return _digest(BYTES, self.separator, is_usual=self.separator == separator_of_bytes(None))

    def stream(self, documents: Iterable[Document]) -> Iterator[Integers]:
        """The tokens of all documents, a separator after each, in arrays of bounded length."""
        end = bytes([] if self.separator.token is None else [self.separator.token])
        parts = (part for document in documents for part in (*document.pieces, end))
        return (np.frombuffer(group, np.uint8) for group in _grouped(parts))


def _grouped(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in larger pieces: of many small documents each would be a call."""
    gathered = bytearray()
    for part in parts:
        gathered += part
        if len(gathered) >= _GROUP_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)


def _digest(base: str, separator: Separator, *, is_usual: bool) -> str:
    """The name of a tokenizer; with its usual separator it is what it was before there was a choice."""
    return base if is_usual else f"{base} separator {separator.token}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTokenizer:
    """A tokenizer that a `tokenizers` JSON file describes."""

    path: str
    digest: str
    tokenizer: "tokenizers.Tokenizer"
    separator: Separator
    dtype: np.dtype[np.integer]
    """The smallest that holds every token."""

    def stream(self, documents: Iterable[Document]) -> Iterator[Integers]:
        """The tokens of all documents, a separator after each, in arrays of bounded length.

        Raises:
            UserError: a document is not UTF-8, or the tokenizer cannot express it.
        """
        end = [] if self.separator.token is None else [self.separator.token]
        pieces = (piece for document in documents for piece in _pieces(document, self.path))
        while group := list(islice(pieces, _GROUP_PIECES)):
            encodings = self._encoded([piece.text for piece in group], group[0].where)
            ends = (end if piece.ends_document else [] for piece in group)
            ids = [i for encoding, last in zip(encodings, ends, strict=True) for i in (*encoding.ids, *last)]
            yield np.array(ids, self.dtype)

    def _encoded(self, texts: list[str], where: str) -> list["tokenizers.Encoding"]:
        try:
            return self.tokenizer.encode_batch(texts, add_special_tokens=False)
        except Exception as error:
            if type(error) is not Exception:  # the package raises the bare class and no other
                raise
            hint = f"cannot express {where} or what follows it ({error}): give another file, or 'bytes'"
            raise UserError(_FIELD, self.path, hint) from error


Tokenizer = ByteTokenizer | FileTokenizer
"""Tokenizer of documents; equal digests mean equal tokens."""


def load_tokenizer(
    name: str, *, vocab_size: int, separator: str | None = None, roots: Roots = EVERYTHING
) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `bytes`, or the path of a JSON file.

    Args:
        vocab_size: entries in the model's vocabulary.
        separator: what shall end every document; None: what is usual.
        roots: where the file may lie.

    Raises:
        UserError: the file is absent or no tokenizer, the package is not installed, or the model's vocabulary is
            too small.
    """
    if name == BYTES:
        _check_vocabulary(name, 256, vocab_size)
        return ByteTokenizer(separator=separator_of_bytes(separator))
    raw = _raw_file(name, roots)
    try:
        import tokenizers
    except ImportError as error:
        hint = f"needs the package tokenizers on every worker: {install_hint('worker')}, or use 'bytes'"
        raise UnfitError(_FIELD, name, hint) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(raw)
    except ValueError as error:
        hint = f"is no tokenizer file ({error}): give one that the package tokenizers has written, or 'bytes'"
        raise UserError(_FIELD, name, hint) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    _check_vocabulary(name, largest + 1, vocab_size)
    found = separator_of(separator, tokenizer.token_to_id)
    is_usual = found == separator_of(None, tokenizer.token_to_id)
    return FileTokenizer(
        path=name,
        digest=_digest(hashlib.sha256(raw).hexdigest(), found, is_usual=is_usual),
        tokenizer=tokenizer,
        separator=found,
        dtype=np.dtype(np.uint16 if largest < 2**16 else np.uint32),
    )


def _raw_file(name: str, roots: Roots) -> bytes:
    with readable(_FIELD, name):
        place = roots.find(name, field=_FIELD)
        try:
            if place.is_folder():
                raise UserError(_FIELD, name, "is a folder: give the tokenizer.json file in it")
        except FileNotFoundError as error:
            hint = "no such file on this worker: give 'bytes' or a path to a tokenizer.json"
            raise UnfitError(_FIELD, name, hint) from error
        with place.open() as file:
            return file.read()


def _check_vocabulary(name: str, needed: int, vocab_size: int) -> None:
    if needed > vocab_size:
        hint = f"has {needed} tokens, the model's vocab_size is {vocab_size}: set model.shape.vocab_size to {needed}"
        raise UserError(_FIELD, name, hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    where: str
    text: str
    ends_document: bool


def _pieces(document: Document, name: str) -> Iterator[_Piece]:
    """A document cut after line ends into pieces of bounded length; an empty one is one empty piece."""
    text = ""
    for more in _decoded(document, name):
        text += more
        while len(text) > _PIECE_CHARACTERS:
            stop = text.rfind("\n", 0, _PIECE_CHARACTERS) + 1 or _PIECE_CHARACTERS
            yield _Piece(where=document.where, text=text[:stop], ends_document=False)
            text = text[stop:]
    yield _Piece(where=document.where, text=text, ends_document=True)


def _decoded(document: Document, name: str) -> Iterator[str]:
    decoder, num_bytes = codecs.getincrementaldecoder("utf-8")(), 0
    for piece in chain(document.pieces, (None,)):
        waiting = len(decoder.getstate()[0])
        try:
            yield decoder.decode(piece or b"", final=piece is None)
        except UnicodeDecodeError as error:
            at = num_bytes - waiting + error.start
            hint = f"byte {at} of {document.where} is not UTF-8: convert it, or use 'bytes', which takes anything"
            raise UserError(_FIELD, name, hint) from error
        num_bytes += len(piece or b"")
