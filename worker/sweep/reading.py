"""Samples of an array's rows: each reads what its seed, its count of updates and its choice name, equal ones once.

Steps of small models take less time than to look their samples up one batch after the other, so many are read at once.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from skein.config.job import ArrayJob, BatchSpec
from skein.plan.sweeping.choosing import first_choice
from skein.protocol.messages.tensors import Phase
from skein.types import MicrobatchId, Step
from worker.compute.batches import BatchReader
from worker.compute.payload import placed
from worker.data.coreset import Drawing, RowDrawing
from worker.data.dataset import Dataset
from worker.model.base import Labels
from worker.model.dropout import luck_of
from worker.sweep.passes import RowBatch

_FIRST = MicrobatchId(0)
_READ_SAMPLES = 1024
"""Samples that are read at once, at most, unless one step has more."""
_NUM_KEPT = 2
"""Blocks of a seed that are kept: rows of one seed that differ in their counts may be at the end of one."""


class RowReader:
    """Batches of all rows at once, read ahead for each seed.

    Args:
        dataset: as the seed of the array's job selects it.
        job: the array.
        device: where batches go.
    """

    def __init__(self, dataset: Dataset, job: ArrayJob, device: torch.device) -> None:
        self.dataset = dataset
        self._device = device
        self._seeds = [row.seed for row in job.rows]
        self._drawings: dict[int, RowDrawing] = {}
        self._coreset = job.data.coreset
        self._size = job.step_batch.samples
        self._has_dropout = job.model.has_dropout
        self._num_steps = max(1, _READ_SAMPLES // self._size)
        size = self._num_steps * self._size
        self._block = job.model_copy(update={"batch": BatchSpec(samples=size, microbatch_samples=size)})
        self._selected = {seed: dataset.under(seed, job) for seed in sorted(set(self._seeds))}
        self._looking = {seed: BatchReader(x, job, [_FIRST]) for seed, x in self._selected.items()}
        self._looked: dict[int, tuple[tuple[Phase, Step, MicrobatchId], Tensor, Tensor]] = {}
        """By seed, what was looked at last: the next row asks for the same."""
        self._blocks: dict[tuple[int, Drawing | None], _Blocks] = {}
        self._sort()

    def draw_by(self, drawings: Mapping[int, RowDrawing]) -> None:
        """Have these rows draw by choices that were made along the run, from their next step on."""
        # An array that goes back may have no choice any more.
        if self._drawings != dict(drawings):
            self._drawings = dict(drawings)
            self._sort()

    def _sort(self) -> None:
        """Blocks of what rows draw now; those of what none draws any more go."""
        wanted = [(self._seeds[row], self._drawing(row)) for row in range(len(self._seeds))]
        self._blocks = {key: self._blocks.get(key) or self._blocks_of(*key) for key in wanted}
        self._of_row = [self._blocks[key] for key in wanted]

    def _drawing(self, row: int) -> Drawing | None:
        return self._drawings[row].drawing if row in self._drawings else None

    def _blocks_of(self, seed: int, drawing: Drawing | None) -> "_Blocks":
        reader = BatchReader(self._selected[seed], self._block, [_FIRST], drawing=drawing)
        return _Blocks(reader, self._device)

    def due(self, row: int) -> int | None:
        """Step of a row at which the next choice is due; None: it stays, or none is made along the run."""
        if row in self._drawings:
            return self._drawings[row].until
        # As many rows validate under every seed, so as many train.
        num_rows = self.dataset.num_train_samples
        return first_choice(self._coreset, num_rows=num_rows, samples=self._size)

    def batch(self, rows: Sequence[int], steps: Sequence[int]) -> RowBatch:
        """Samples of a step of each of these rows, in their order.

        Raises:
            UnfitError: they cannot be read here.
        """
        wanted = [(self._of_row[row], step) for row, step in zip(rows, steps, strict=True)]
        read = {key: self._step(*key) for key in dict.fromkeys(wanted)}
        labels = [read[key][1] for key in wanted]
        weights = [x.weights for x in labels if x.weights is not None]
        return RowBatch(
            torch.stack([read[key][0] for key in wanted]),
            torch.stack([x.labels for x in labels]),
            torch.stack(weights) if weights else None,
            self._luck(rows, steps) if self._has_dropout else None,
        )

    def _luck(self, rows: Sequence[int], steps: Sequence[int]) -> Tensor:
        """Luck of each row's first sample: that of the trial's own job, in whatever microbatches it goes there."""
        lucks = [luck_of(self._seeds[row], step, 0) for row, step in zip(rows, steps, strict=True)]
        return torch.tensor(lucks, dtype=torch.int64, device=self._device)

    def _step(self, blocks: "_Blocks", step: int) -> tuple[Tensor, Labels]:
        number, place = divmod(step, self._num_steps)
        inputs, labels = blocks.block(number)
        own = slice(place * self._size, (place + 1) * self._size)
        return inputs[own], Labels(
            labels.labels[own], None if labels.weights is None else labels.weights[own]
        )

    def looked_at(
        self, row: int, phase: Phase, step: Step, microbatch: MicrobatchId
    ) -> tuple[Tensor, Tensor]:
        """Inputs and labels (B, ...) of a microbatch that a row learns nothing from: of its validation data, or in a
        selection of its training rows.

        Raises:
            UnfitError: they cannot be read here.
        """
        seed, key = self._seeds[row], (phase, step, microbatch)
        if seed not in self._looked or self._looked[seed][0] != key:
            inputs, labels = placed(self._looking[seed].batch(*key), self._device)
            self._looked[seed] = key, inputs, labels.labels
        _, samples, classes = self._looked[seed]
        return samples, classes


class _Blocks:
    """Samples of many steps after one another, under one seed."""

    def __init__(self, reader: BatchReader, device: torch.device) -> None:
        self._reader = reader
        self._device = device
        self._kept: OrderedDict[int, tuple[Tensor, Labels]] = OrderedDict()

    def block(self, number: int) -> tuple[Tensor, Labels]:
        """The block of that number; the next one is being read meanwhile."""
        if number not in self._kept:
            batch = self._reader.batch(Phase.TRAIN, Step(number), _FIRST)
            self._kept[number] = placed(batch, self._device)
            while len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return self._kept[number]
