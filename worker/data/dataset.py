"""A job's data, opened: batches by position, and one fingerprint by which two workers can tell that they agree."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from skein.config.job import (
    BatchSpec,
    DataSpec,
    DigitsSource,
    JsonlSource,
    TextSource,
    TokenSource,
)
from skein.data.selection import Pick, Selection
from skein.errors import UserError
from skein.model.layers import AnyModel
from skein.storage.roots import EVERYTHING, Roots
from worker.data.digits import open_digits
from worker.data.samples import Integers, Samples
from worker.data.text import open_jsonl, open_text, open_tokens
from worker.data.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples side by side: tokens (B, T) int64 or images (B, 1, 8, 8) float32; labels (B, T) or (B,) int64.

    A label of -100 does not count.
    """

    inputs: NDArray[np.integer | np.floating]
    labels: Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Training and validation samples by position; pure look-up, so any worker gives the same answer."""

    sources: tuple[Samples, ...]
    selection: Selection
    fingerprint: str
    """Hash over the names, sizes and contents of everything read, and over the split."""

    @property
    def num_train_samples(self) -> int:
        return self.selection.num_train

    @property
    def num_validation_samples(self) -> int:
        return self.selection.num_validation

    def train_batch(self, positions: Sequence[int]) -> Batch:
        """The training samples at `positions` of the endless shuffled sequence, in that order."""
        return self._batch(self.selection.train(int(position)) for position in positions)

    def validation_batch(self, positions: Sequence[int]) -> Batch:
        """The validation samples at `positions`: the same ones for the life of the job.

        Raises:
            ValueError: there is no validation set.
        """
        return self._batch(self.selection.validation(int(position)) for position in positions)

    def _batch(self, picks: Iterable[Pick]) -> Batch:
        samples = [self.sources[pick.source].read(pick.sample) for pick in picks]
        return Batch(inputs=np.stack([s[0] for s in samples]), labels=np.stack([s[1] for s in samples]))


def open_dataset(
    data: DataSpec,
    model: AnyModel,
    *,
    seed: int,
    batch: BatchSpec | None = None,
    roots: Roots = EVERYTHING,
) -> Dataset:
    """The data of a job as this worker can read them. Reads every file once, to check and to fingerprint it.

    Args:
        seed: of the job; decides split and order.
        batch: if given, there must be samples enough for one step.
        roots: where files may lie.

    Raises:
        UserError: something about the data, the tokenizer or how they fit the model is wrong; the error names the
            field, its value and what would be right.
    """
    size = model.vocab_size
    sources = _open_images(data) if size is None else _open_tokens(data, size, roots)
    selection = Selection.of(
        [source.num_samples for source in sources],
        [source.weight for source in data.sources],
        validation_ratio=data.validation_ratio,
        seed=seed,
    )
    if batch is not None and selection.num_train < batch.samples:
        wanted = f"training samples are fewer than the {batch.samples} of one step"
        hint = f"{wanted}: give more data, or lower batch.samples or data.sequence_tokens"
        raise UserError("data.sources", selection.num_train, hint)
    return Dataset(sources=sources, selection=selection, fingerprint=_fingerprint(sources, selection))


def _open_tokens(data: DataSpec, vocab_size: int, roots: Roots) -> tuple[Samples, ...]:
    has_text = any(isinstance(source, TextSource | JsonlSource) for source in data.sources)
    tokenizer = load_tokenizer(data.tokenizer, vocab_size=vocab_size, roots=roots) if has_text else None
    opened: list[Samples] = []
    for index, source in enumerate(data.sources):
        field, length = f"data.sources[{index}]", data.sequence_tokens
        match source:
            case TextSource():
                assert tokenizer is not None
                opened.append(open_text(source, tokenizer, sequence_tokens=length, field=field, roots=roots))
            case JsonlSource():
                assert tokenizer is not None
                opened.append(open_jsonl(source, tokenizer, sequence_tokens=length, field=field, roots=roots))
            case TokenSource():
                opened.append(
                    open_tokens(
                        source, sequence_tokens=length, vocab_size=vocab_size, field=field, roots=roots
                    )
                )
            case DigitsSource():
                hint = "are images, and a language model reads text: use text, jsonl or tokens, or family: digits_cnn"
                raise UserError(f"{field}.format", source.format, hint)
            case _:
                assert_never(source)
    return tuple(opened)


def _open_images(data: DataSpec) -> tuple[Samples, ...]:
    for index, source in enumerate(data.sources):
        if not isinstance(source, DigitsSource):
            hint = "is text, and digits_cnn reads images: use format: digits, or family: llama"
            raise UserError(f"data.sources[{index}].format", source.format, hint)
    return tuple(open_digits(field=f"data.sources[{index}]") for index in range(len(data.sources)))


def _fingerprint(sources: Sequence[Samples], selection: Selection) -> str:
    total = hashlib.sha256()
    for source, split in zip(sources, selection.splits, strict=True):
        total.update(f"{source.digest} {split.num_samples} {split.num_validation} {split.key}\n".encode())
    return total.hexdigest()
