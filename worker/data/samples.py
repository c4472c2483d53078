"""Samples by number: windows over a stream of tokens."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from skein.errors import UserError
from worker.data.files import DataFile, readable

NO_LABEL = -100
"""The label of a place that does not count in the loss; torch's own default."""
BYTE_SEPARATOR = 0
"""Ends every document where tokens are bytes: NUL, which text does not use."""

Integers = NDArray[np.integer]
Floats = NDArray[np.floating]


class Samples(Protocol):
    """The samples of one source, `0 <= sample < num_samples`."""

    @property
    def num_samples(self) -> int: ...

    @property
    def digest(self) -> str:
        """Names the content: equal on two workers if and only if they read the same samples."""
        ...

    def read(self, sample: int) -> tuple[Integers | Floats, Integers]:
        """Inputs and labels of one sample, without a batch dimension."""
        ...


class TokenStream(Protocol):
    """All tokens of one source, in order."""

    @property
    def num_tokens(self) -> int: ...

    def read(self, start: int, stop: int) -> Integers:
        """Tokens [start, stop), where 0 <= start <= stop <= num_tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Samples of `sequence_tokens` tokens each: inputs and, one token later, labels; both int64."""

    stream: TokenStream
    sequence_tokens: int
    digest: str

    @property
    def num_samples(self) -> int:
        return max(0, -(-(self.stream.num_tokens - 1) // self.sequence_tokens))

    def read(self, sample: int) -> tuple[Integers, Integers]:
        """Tokens [sample * T, sample * T + T) as inputs, padded with 0; the labels that do not exist are -100."""
        start = sample * self.sequence_tokens
        tokens = self.stream.read(start, min(start + self.sequence_tokens + 1, self.stream.num_tokens))
        inputs = np.zeros(self.sequence_tokens, np.int64)
        labels = np.full(self.sequence_tokens, NO_LABEL, np.int64)
        inputs[: len(tokens)] = tokens[: self.sequence_tokens]
        labels[: len(tokens) - 1] = tokens[1:]
        return inputs, labels


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayTokens:
    """A flat array of tokens, in memory or mapped."""

    tokens: Integers

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> Integers:
        return self.tokens[start:stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBytes:
    """The bytes of many files, a separator after each, read where they lie: no copy in memory.

    Reading, unlike mapping, survives a file that is cut short meanwhile, with an error instead of a signal.
    """

    files: tuple[DataFile, ...]
    starts: NDArray[np.int64]
    """Where each file begins in the stream; one more than there are files, the last is the end."""
    field: str

    @staticmethod
    def of(files: tuple[DataFile, ...], *, field: str) -> "FileBytes":
        """The stream over `files`; `field` names their path in the job file."""
        starts = np.cumsum([0, *(file.size + 1 for file in files)], dtype=np.int64)
        return FileBytes(files=files, starts=starts, field=field)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> Integers:
        """Bytes [start, stop) of the stream.

        Raises:
            UserError: a file was moved or shortened since it was opened.
        """
        out = np.full(stop - start, BYTE_SEPARATOR, np.uint8)
        index, place = int(np.searchsorted(self.starts, start, side="right")) - 1, start
        while place < stop:
            file, first = self.files[index], int(self.starts[index])
            wanted = min(stop, first + file.size) - place
            if wanted > 0:
                out[place - start : place - start + wanted] = self._bytes_of(file, place - first, wanted)
            index, place = index + 1, int(self.starts[index + 1])
        return out

    def _bytes_of(self, file: DataFile, offset: int, count: int) -> Integers:
        with readable(self.field, file.place.path), file.place.open() as opened:
            opened.seek(offset)
            found = np.frombuffer(opened.read(count), np.uint8)
        if len(found) < count:
            hint = f"the file had {file.size} bytes when the job began and is shorter now: restore it"
            raise UserError(self.field, str(file.place), hint)
        return found
