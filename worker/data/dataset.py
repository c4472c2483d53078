"""A job's data, opened: batches by position, and one fingerprint by which two workers can tell that they agree."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from skein.config.data.sources import (
    ArraysSource,
    DigitsSource,
    JsonlSource,
    ParquetSource,
    SourceSpec,
    TextSource,
    TokenSource,
)
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, JobSpec
from skein.data.selection import Pick, Selection
from skein.data.separator import Separator
from skein.errors import LocalError, UserError
from skein.model.layers import AnyModel, LabelledShape
from skein.storage.roots import EVERYTHING, Roots
from worker.data.cache import TokenCache
from worker.data.coreset import NO_ROW, Coreset, Drawing, SourceRows, coreset_of
from worker.data.labelled import LabelledSamples, open_labelled
from worker.data.samples import Integers, SampleWindows
from worker.data.text import SourceOpening, open_source, open_tokens
from worker.data.tokenizer import load_tokenizer

NO_CACHE = TokenCache(None)

Samples = SampleWindows | LabelledSamples
"""The samples of one source, `0 <= sample < num_samples`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples side by side: tokens (B, T) int64 or numbers (B, ...) float32; labels (B, T) or (B,) int64.

    A label of -100 does not count.
    """

    inputs: NDArray[np.integer | np.floating]
    labels: Integers
    weights: NDArray[np.float32] | None = None
    """(B,): by which samples' losses are multiplied; None: all count alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Training and validation samples by position; pure look-up, so any worker gives the same answer."""

    sources: tuple[Samples, ...]
    selection: Selection
    fingerprint: str
    """Hash over the names, sizes and contents of everything read, and over the split."""
    separator: Separator | None = None
    """Separator that ends every document; None where the data are no text."""
    coreset: Coreset | None = None
    """Rows that are trained on; None: all."""
    sample_tokens: int = 1
    """Tokens of a sample; one with a label counts as one."""

    @property
    def shown(self) -> str:
        """Numbers of samples and the separator of documents, in words."""
        ends = "" if self.separator is None else f"; documents end with {self.separator}"
        chosen = "" if self.coreset is None else f"; {self.coreset}"
        return (
            f"{self.num_train_samples} samples of {self.sample_tokens} tokens to train on, "
            f"{self.num_validation_samples} to validate on{ends}{chosen}"
        )

    @property
    def has_changed(self) -> bool:
        """Whether a file was found to have changed since it was opened."""
        return any(source.has_changed for source in self.sources)

    @property
    def num_train_samples(self) -> int:
        return self.selection.num_train

    @property
    def num_validation_samples(self) -> int:
        return self.selection.num_validation

    def train_batch(self, positions: Sequence[int], drawing: Drawing | None = None) -> Batch:
        """The training samples at `positions` of the endless shuffled sequence, in that order.

        Args:
            drawing: by a choice that was made along the run; none before the first, or where none is.
        """
        if self.coreset is None:
            return self._batch(self.selection.train_many([int(position) for position in positions]))
        at = [int(position) for position in positions]
        places = self.coreset.places(at, drawing)
        warm = np.flatnonzero(places.rows == NO_ROW).tolist()
        picks = self.selection.train_rows(np.maximum(places.rows, 0).tolist())
        for place, pick in zip(warm, self.selection.train_many([at[x] for x in warm]), strict=True):
            picks[place] = pick
        return replace(self._batch(picks), weights=places.weights)

    def row_batch(self, rows: Sequence[int]) -> Batch:
        """Training samples by their number, from 0: what is chosen of."""
        return self._batch(self.selection.train_rows(rows))

    def validation_batch(self, positions: Sequence[int]) -> Batch:
        """The validation samples at `positions`: the same ones for the life of the job.

        Raises:
            ValueError: there is no validation set.
        """
        return self._batch(self.selection.validation(int(position)) for position in positions)

    def under(self, seed: int, job: JobSpec) -> "Dataset":
        """The same sources, split and ordered as a job with this seed has them."""
        selection = _selection(self.sources, job.data, seed)
        is_chosen = self.coreset is not None
        coreset = _chosen(job.data, self.sources, selection, job.step_batch, seed) if is_chosen else None
        return replace(
            self,
            selection=selection,
            coreset=coreset,
            fingerprint=_fingerprint(self.sources, selection, coreset),
        )

    def _batch(self, picks: Iterable[Pick]) -> Batch:
        if len(self.sources) == 1:
            inputs, labels = self.sources[0].read_many([pick.sample for pick in picks])
            return Batch(inputs=inputs, labels=labels)
        samples = [self.sources[pick.source].read(pick.sample) for pick in picks]
        return Batch(inputs=np.stack([s[0] for s in samples]), labels=np.stack([s[1] for s in samples]))


def open_dataset(
    data: DataSpec,
    model: AnyModel,
    *,
    seed: int,
    batch: BatchSpec | None = None,
    roots: Roots = EVERYTHING,
    cache: TokenCache = NO_CACHE,
) -> Dataset:
    """The data of a job as this worker can read them. Reads every file once, to check and to fingerprint it.

    Args:
        seed: of the job; decides split and order.
        batch: if given, there must be samples enough for one step.
        roots: where files may lie.
        cache: where tokens are kept.

    Raises:
        UserError: something about the data, the tokenizer or how they fit the model is wrong; the error names the
            field, its value and what would be right.
        OSError: there is no room for tokens.
    """
    size, tokenizer, shape = model.vocab_size, None, model.labelled
    if shape is not None:
        sources: tuple[Samples, ...] = tuple(
            _open_labelled(source, shape, field, roots, data.rules) for field, source in data.named_sources
        )
    else:
        assert size is not None, "a model without classes has a vocabulary"
        if data.has_text:
            tokenizer = load_tokenizer(data.tokenizer, vocab_size=size, separator=data.separator, roots=roots)
        opening = SourceOpening(
            sequence_tokens=data.sequence_tokens,
            vocab_size=size,
            roots=roots,
            cache=cache,
            tokenizer=tokenizer,
            rules=data.rules,
        )
        sources = tuple(_open_tokens(source, opening, field) for field, source in data.named_sources)
    selection = _selection(sources, data, seed)
    if batch is not None and selection.num_train < batch.samples:
        wanted = f"training samples are fewer than the {batch.samples} of one step"
        hint = f"{wanted}: give more data, or lower batch.samples or data.sequence_tokens"
        raise UserError("data.sources", selection.num_train, hint)
    coreset = _chosen(data, sources, selection, batch, seed) if data.coreset.chooses else None
    return Dataset(
        sources=sources,
        selection=selection,
        fingerprint=_fingerprint(sources, selection, coreset),
        coreset=coreset,
        separator=None if tokenizer is None else tokenizer.separator,
        sample_tokens=model.sample_tokens(data.sequence_tokens),
    )


def _selection(sources: Sequence[Samples], data: DataSpec, seed: int) -> Selection:
    return Selection.of(
        [source.num_samples for source in sources],
        [source.weight for _, source in data.named_sources],
        validation_ratio=data.held_out_ratio,
        seed=seed,
        num_validating=len(data.validation),
    )


def _open_tokens(source: SourceSpec, opening: SourceOpening, field: str) -> Samples:
    if source.is_labelled:
        hint = (
            "are samples with labels, and a language model reads text: "
            "use text, jsonl or tokens, or family: digits_cnn or mlp"
        )
        raise UserError(f"{field}.format", source.format, hint)
    match source:
        case TextSource() | JsonlSource() | ParquetSource():
            return open_source(source, opening, field=field)
        case TokenSource():
            return open_tokens(source, opening, field=field)
        case DigitsSource() | ArraysSource():
            raise LocalError(f"{source.format} is labelled")
        case _:
            assert_never(source)


def _open_labelled(source: SourceSpec, shape: LabelledShape, field: str, roots: Roots, rules: int) -> Samples:
    if not source.is_labelled:
        hint = "is text, and the model reads samples with labels: "
        hint += "use arrays, digits or jsonl with `label`, or family: llama"
        raise UserError(f"{field}.format", source.format, hint)
    assert isinstance(source, ArraysSource | DigitsSource | JsonlSource)
    return open_labelled(source, shape, field=field, roots=roots, rules=rules)


def _chosen(
    data: DataSpec, sources: Sequence[Samples], selection: Selection, batch: BatchSpec | None, seed: int
) -> Coreset:
    found: list[SourceRows] = []
    for spec, source, split in zip(data.sources, sources, selection.splits, strict=False):
        assert isinstance(source, LabelledSamples), "only samples with labels are chosen of"
        rows = split.train(range(split.num_train))
        x_ND = source.samples[rows].reshape(len(rows), -1)
        found.append(SourceRows(x_ND=x_ND, labels_N=source.labels[rows], weight=spec.weight))
    return coreset_of(data.coreset, found, batch_samples=None if batch is None else batch.samples, seed=seed)


def _fingerprint(sources: Sequence[Samples], selection: Selection, coreset: Coreset | None) -> str:
    total = hashlib.sha256()
    for source, split in zip(sources, selection.splits, strict=True):
        total.update(f"{source.digest} {split.num_samples} {split.num_validation} {split.key}\n".encode())
    if coreset is not None:
        total.update(f"{coreset.digest}\n".encode())
    return total.hexdigest()
