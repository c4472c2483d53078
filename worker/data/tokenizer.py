"""Documents into one flat array of tokens."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import numpy as np

from skein.errors import UserError
from skein.own import install_hint
from skein.storage.roots import EVERYTHING, Roots
from worker.data.files import readable
from worker.data.samples import BYTE_SEPARATOR, Integers

if TYPE_CHECKING:
    import tokenizers

_FIELD = "data.tokenizer"
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
_PIECE_CHARACTERS = 2**17
_GROUP_PIECES = 32
"""So many pieces are encoded side by side: together this bounds the tokens that exist as Python objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text; `where` says for people where it was found."""

    where: str
    text: bytes


class Tokenizer(Protocol):
    """What turns documents into tokens; equal digests mean equal tokens."""

    @property
    def digest(self) -> str: ...

    def flatten(self, documents: Iterable[Document]) -> Integers:
        """The tokens of all documents, a separator after each."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTokenizer:
    """A token is a byte."""

    digest: str = "bytes"

    def flatten(self, documents: Iterable[Document]) -> Integers:
        flat = bytearray()
        for document in documents:
            flat += document.text
            flat.append(BYTE_SEPARATOR)
        return np.frombuffer(flat, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTokenizer:
    """A tokenizer that a `tokenizers` JSON file describes."""

    path: str
    digest: str
    tokenizer: "tokenizers.Tokenizer"
    vocab_size: int

    def flatten(self, documents: Iterable[Document]) -> Integers:
        """As in `Tokenizer`.

        Raises:
            UserError: a document is not UTF-8, or the tokenizer cannot express it.
        """
        dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        separator = next(([i] for i in map(self.tokenizer.token_to_id, _SEPARATORS) if i is not None), [])
        pieces = (piece for document in documents for piece in _pieces(document, self.path))
        flat = [np.empty(0, dtype)]
        while group := list(islice(pieces, _GROUP_PIECES)):
            encodings = self._encoded([piece.text for piece in group], group[0].where)
            ends = (separator if piece.ends_document else [] for piece in group)
            ids = [i for encoding, end in zip(encodings, ends, strict=True) for i in (*encoding.ids, *end)]
            flat.append(np.array(ids, dtype))
        return np.concatenate(flat)

    def _encoded(self, texts: list[str], where: str) -> list["tokenizers.Encoding"]:
        try:
            return self.tokenizer.encode_batch(texts, add_special_tokens=False)
        except Exception as error:
            if type(error) is not Exception:  # the package raises the bare class and no other
                raise
            hint = f"cannot express {where} or what follows it ({error}): give another file, or 'bytes'"
            raise UserError(_FIELD, self.path, hint) from error


def load_tokenizer(name: str, *, vocab_size: int, roots: Roots = EVERYTHING) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `bytes`, or the path of a JSON file.

    Args:
        vocab_size: entries in the model's vocabulary.
        roots: where the file may lie.

    Raises:
        UserError: the file is absent or no tokenizer, the package is not installed, or the model's vocabulary is
            too small.
    """
    if name == "bytes":
        _check_vocabulary(name, 256, vocab_size)
        return ByteTokenizer()
    raw = _raw_file(name, roots)
    try:
        import tokenizers
    except ImportError as error:
        hint = f"needs the package tokenizers on every worker: {install_hint('worker')}, or use 'bytes'"
        raise UserError(_FIELD, name, hint) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(raw)
    except ValueError as error:
        hint = f"is no tokenizer file ({error}): give one that the package tokenizers has written, or 'bytes'"
        raise UserError(_FIELD, name, hint) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    _check_vocabulary(name, largest + 1, vocab_size)
    digest = hashlib.sha256(raw).hexdigest()
    return FileTokenizer(path=name, digest=digest, tokenizer=tokenizer, vocab_size=largest + 1)


def _raw_file(name: str, roots: Roots) -> bytes:
    with readable(_FIELD, name):
        place = roots.find(name, field=_FIELD)
        try:
            if place.is_folder():
                raise UserError(_FIELD, name, "is a folder: give the tokenizer.json file in it")
        except FileNotFoundError as error:
            hint = "no such file on this worker: give 'bytes' or a path to a tokenizer.json"
            raise UserError(_FIELD, name, hint) from error
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
    try:
        text = document.text.decode()
    except UnicodeDecodeError as error:
        hint = f"byte {error.start} of {document.where} is not UTF-8: convert it, or use 'bytes', which takes anything"
        raise UserError(_FIELD, name, hint) from error
    start, ends = 0, False
    while not ends:
        stop = start + _PIECE_CHARACTERS
        ends = stop >= len(text)
        if not ends:
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield _Piece(where=document.where, text=text[start:stop], ends_document=ends)
        start = stop
