"""Samples by position: the split into training and validation, the mixture and the shuffled order in one.

Source s has samples 0 to N-1. A permutation of them under the job's seed puts `num_validation` of them into the
validation set, for the life of the job, and the rest into the training set; both are looked up, never listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skein import rng
from skein.data.mixture import Mixture
from skein.data.order import I64, permuted, shuffled_index, shuffled_indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The training and validation samples of one source; disjoint, together everything."""

    num_samples: int
    num_validation: int
    key: int

    @staticmethod
    def of(num_samples: int, *, validation_ratio: float, seed: int) -> "Split":
        """A split with round(num_samples * validation_ratio) validation samples.

        A ratio above zero gives at least one, as long as one is left to train on.
        """
        wanted = max(1, round(num_samples * validation_ratio)) if validation_ratio > 0 else 0
        num_validation = max(0, min(wanted, num_samples - 1))
        return Split(num_samples=num_samples, num_validation=num_validation, key=rng.key(seed, "split"))

    @staticmethod
    def validating(num_samples: int, *, seed: int) -> "Split":
        """A split with nothing to train on."""
        return Split(num_samples=num_samples, num_validation=num_samples, key=rng.key(seed, "split"))

    @property
    def num_train(self) -> int:
        return self.num_samples - self.num_validation

    def validation(self, ordinals: Sequence[int]) -> I64:
        """Samples of the validation set by number, in [0, num_validation)."""
        return permuted(ordinals, size=self.num_samples, key=self.key)

    def train(self, ordinals: Sequence[int]) -> I64:
        """Samples of the training set by number, in [0, num_train)."""
        return permuted(np.add(ordinals, self.num_validation), size=self.num_samples, key=self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """Sample of one source, both by number."""

    source: int
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Samples at all training and validation positions of a job."""

    splits: tuple[Split, ...]
    order_seeds: tuple[int, ...]
    train_mixture: Mixture
    validation_sources: tuple[int, ...]
    validation_mixture: Mixture | None

    @staticmethod
    def of(
        num_samples: Sequence[int],
        weights: Sequence[float],
        *,
        validation_ratio: float,
        seed: int,
        num_validating: int = 0,
    ) -> "Selection":
        """The selection over sources of `num_samples[i]` samples, drawn in proportion to `weights[i]`.

        Args:
            validation_ratio: share of each source that validates.
            num_validating: so many sources, the last ones, are not trained on: all of them validates.

        Raises:
            ValueError: a source without samples, or a weight that is not positive and finite.
        """
        if min(num_samples) < 1:
            raise ValueError(f"every source needs a sample: {list(num_samples)}")
        seeds = tuple(rng.key(seed, "source", index) for index in range(len(num_samples)))
        num_training = len(num_samples) - num_validating
        splits = tuple(
            Split.of(size, validation_ratio=validation_ratio, seed=source_seed)
            if index < num_training
            else Split.validating(size, seed=source_seed)
            for index, (size, source_seed) in enumerate(zip(num_samples, seeds, strict=True))
        )
        held_out = tuple(index for index, split in enumerate(splits) if split.num_validation)
        return Selection(
            splits=splits,
            order_seeds=seeds,
            train_mixture=Mixture.of(weights[:num_training]),
            validation_sources=held_out,
            validation_mixture=Mixture.of([weights[index] for index in held_out]) if held_out else None,
        )

    @property
    def num_train(self) -> int:
        """Training samples of all sources together."""
        return sum(split.num_train for split in self.splits)

    @property
    def num_validation(self) -> int:
        """Validation samples of all sources together."""
        return sum(split.num_validation for split in self.splits)

    def train_rows(self, rows: Sequence[int]) -> list[Pick]:
        """Training samples by number, in the order given: those of a source come after those of the one before."""
        at = np.asarray(rows, np.int64)
        ends = np.cumsum([split.num_train for split in self.splits])
        sources, samples = np.searchsorted(ends, at, side="right"), np.empty_like(at)
        for source in np.unique(sources).tolist():
            split, own = self.splits[source], sources == source
            samples[own] = split.train((at[own] - (ends[source] - split.num_train)).tolist())
        return [Pick(source=x, sample=y) for x, y in zip(sources.tolist(), samples.tolist(), strict=True)]

    def train(self, position: int) -> Pick:
        """The training sample at `position`: shuffled anew in each epoch of its source."""
        source, drawn = self.train_mixture.locate(position)
        split = self.splits[source]
        ordinal = shuffled_index(drawn, num_samples=split.num_train, seed=self.order_seeds[source])
        return Pick(source=source, sample=int(split.train([ordinal])[0]))

    def train_many(self, positions: Sequence[int]) -> list[Pick]:
        """Training samples at these positions, as `train` has each."""
        located = [self.train_mixture.locate(position) for position in positions]
        picks: dict[int, Pick] = {}
        for source in {source for source, _ in located}:
            places = [place for place, (drawn_of, _) in enumerate(located) if drawn_of == source]
            drawn = [located[place][1] for place in places]
            split = self.splits[source]
            ordinals = shuffled_indices(drawn, num_samples=split.num_train, seed=self.order_seeds[source])
            samples = split.train(ordinals.tolist()).tolist()
            picks |= {p: Pick(source=source, sample=x) for p, x in zip(places, samples, strict=True)}
        return [picks[place] for place in range(len(located))]

    def validation(self, position: int) -> Pick:
        """The validation sample at `position`: always the same one; a source that is used up starts again.

        Raises:
            ValueError: there is no validation set.
        """
        if self.validation_mixture is None:
            raise ValueError("the validation set is empty")
        held_out, drawn = self.validation_mixture.locate(position)
        source = self.validation_sources[held_out]
        split = self.splits[source]
        return Pick(source=source, sample=int(split.validation([drawn % split.num_validation])[0]))
