"""Samples by number: windows over a stream of tokens."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from skein.errors import UnfitError
from skein.storage.roots import Inside
from worker.data.files import BLOCK_BYTES, DataFile, FileStamp, readable

NO_LABEL = -100
"""The label of a place that does not count in the loss; torch's own default."""
_MAX_OPEN = 32

Integers = NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWindows:
    """Samples of `sequence_tokens` tokens each: inputs and, one token later, labels; both int64."""

    stream: "TokenStream"
    sequence_tokens: int
    digest: str
    """Names the content: equal on two workers if and only if they read the same samples."""

    @property
    def has_changed(self) -> bool:
        """Whether a file was found to have changed since it was opened."""
        return isinstance(self.stream, FileTokens) and self.stream.reader.has_changed

    @property
    def num_samples(self) -> int:
        return max(0, -(-(len(self.stream) - 1) // self.sequence_tokens))

    def read(self, sample: int) -> tuple[Integers, Integers]:
        """Tokens [sample * T, sample * T + T) as inputs, padded with 0; the labels that do not exist are -100."""
        start = sample * self.sequence_tokens
        tokens = self.stream[start : min(start + self.sequence_tokens + 1, len(self.stream))]
        inputs = np.zeros(self.sequence_tokens, np.int64)
        labels = np.full(self.sequence_tokens, NO_LABEL, np.int64)
        inputs[: len(tokens)] = tokens[: self.sequence_tokens]
        labels[: len(tokens) - 1] = tokens[1:]
        return inputs, labels

    def read_many(self, samples: Sequence[int]) -> tuple[Integers, Integers]:
        """Samples side by side, each as `read` has it."""
        read = [self.read(sample) for sample in samples]
        return np.stack([inputs for inputs, _ in read]), np.stack([labels for _, labels in read])


class FileReader:
    """Pieces of the files of one source, a few of which stay open.

    Reading, unlike mapping, survives a file that is cut short meanwhile, with an error instead of a signal, and holds
    up nobody else while a file system takes its time. A block is compared with its hash when it is read first, and
    again after the file's size or times have changed.

    Args:
        field: of the source's path in the job file.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._lock = Lock()
        self._open: OrderedDict[Inside, BinaryIO] = OrderedDict()
        self._compared: dict[Inside, _Compared] = {}
        self.has_changed = False
        """Whether a file was found to have changed since it was opened first."""

    def read(self, file: DataFile, offset: int, num_bytes: int) -> bytes:
        """`num_bytes` of `file` from `offset`, as they were when the file was opened first.

        Raises:
            UnfitError: the file was moved, shortened or rewritten since.
        """
        with self._lock, readable(self._field, file.place.path):
            opened = self._opened(file.place)
            compared = self._compared_of(file, FileStamp.of(opened))
            first, last = offset // BLOCK_BYTES, (offset + num_bytes - 1) // BLOCK_BYTES
            if all(compared.blocks[index] for index in range(first, last + 1)):
                return self._bytes(opened, file, offset, num_bytes)
            start = first * BLOCK_BYTES
            span = self._bytes(opened, file, start, min(file.size, (last + 1) * BLOCK_BYTES) - start)
            for index in range(first, last + 1):
                self._compare(file, index, span[index * BLOCK_BYTES - start :][:BLOCK_BYTES])
                compared.blocks[index] = 1
            return span[offset - start :][:num_bytes]

    def _bytes(self, opened: BinaryIO, file: DataFile, offset: int, num_bytes: int) -> bytes:
        opened.seek(offset)
        found = opened.read(num_bytes)
        if len(found) < num_bytes:
            raise self._changed(file, f"had {file.size} bytes when the job began and is shorter now")
        return found

    def _compared_of(self, file: DataFile, stamp: FileStamp) -> "_Compared":
        """Blocks of a file that were compared since its stamp changed last."""
        if stamp.size != file.size:
            raise self._changed(file, f"had {file.size} bytes when the job began and has {stamp.size} now")
        found = self._compared.get(file.place)
        if found is None or found.stamp != stamp:
            found = _Compared(stamp=stamp, blocks=bytearray(-(-file.size // BLOCK_BYTES)))
            self._compared[file.place] = found
        return found

    def _compare(self, file: DataFile, index: int, content: bytes) -> None:
        if not file.has_block(index, content):
            raise self._changed(
                file, f"was rewritten since the job began, at byte {index * BLOCK_BYTES} or after"
            )

    def _changed(self, file: DataFile, how: str) -> UnfitError:
        self.has_changed = True
        # A reader that goes on after this looks at the file that is there then.
        if (opened := self._open.pop(file.place, None)) is not None:
            opened.close()
        self._compared.pop(file.place, None)
        return UnfitError(self._field, str(file.place), f"the file {how}: restore it")

    def _opened(self, place: Inside) -> BinaryIO:
        found = self._open.pop(place, None)
        if found is None:
            if len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            found = place.open()
        self._open[place] = found
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """Blocks of a file, 1 where the content was compared while the file had `stamp`."""

    stamp: FileStamp
    blocks: bytearray


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTokens:
    """The tokens in files, a separator after each file if there is one, read where they lie: no copy anywhere."""

    files: tuple[DataFile, ...]
    dtype: np.dtype[np.integer]
    starts: NDArray[np.int64]
    """Start of each file in the stream; one more than there are files, the last is the end."""
    separator: int | None
    reader: FileReader

    @staticmethod
    def of(
        files: tuple[DataFile, ...], dtype: np.dtype[np.integer], *, separator: int | None = None, field: str
    ) -> "FileTokens":
        """The stream over `files`; `field` names their path in the job file."""
        sizes = (file.size // dtype.itemsize + (separator is not None) for file in files)
        starts = np.cumsum([0, *sizes], dtype=np.int64)
        return FileTokens(
            files=files, dtype=dtype, starts=starts, separator=separator, reader=FileReader(field)
        )

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, span: slice) -> Integers:
        """Tokens of the stream from one place to another.

        Raises:
            UserError: a file was moved or shortened since it was opened.
        """
        out = np.full(span.stop - span.start, self.separator or 0, self.dtype)
        index, place = int(np.searchsorted(self.starts, span.start, side="right")) - 1, span.start
        size = self.dtype.itemsize
        while place < span.stop:
            file, first = self.files[index], int(self.starts[index])
            wanted = min(span.stop, first + file.size // size) - place
            if wanted > 0:
                found = self.reader.read(file, (place - first) * size, wanted * size)
                out[place - span.start :][:wanted] = np.frombuffer(found, self.dtype)
            index, place = index + 1, int(self.starts[index + 1])
        return out


TokenStream = Integers | FileTokens
"""All tokens of one source, in order."""
