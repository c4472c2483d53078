"""Samples of an array's rows: each reads what its seed and its count of updates name; what is equal is read once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from skein.config.job import ArrayJob
from skein.protocol.messages.tensors import Phase
from skein.types import MicrobatchId, Step
from worker.compute.batches import BatchReader
from worker.compute.payload import placed
from worker.data.dataset import Dataset

_FIRST = MicrobatchId(0)


class RowReader:
    """Batches of all rows at once, read ahead for each seed.

    Args:
        dataset: as the seed of the array's job selects it.
        job: the array.
        device: where batches go.
    """

    def __init__(self, dataset: Dataset, job: ArrayJob, device: torch.device) -> None:
        self.dataset = dataset
        # One step of a row is one microbatch of a job like it.
        size = job.batch.microbatch_samples
        alone = job.model_copy(update={"batch": job.batch.model_copy(update={"samples": size})})
        self._device = device
        self._seeds = [row.seed for row in job.rows]
        self._readers = {
            seed: BatchReader(dataset.under(seed, alone), alone, [_FIRST]) for seed in set(self._seeds)
        }

    def batch(self, rows: Sequence[int], steps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and labels (R, B, ...) of a step of each of these rows, in their order.

        Raises:
            UnfitError: they cannot be read here.
        """
        wanted = [(self._seeds[row], step) for row, step in zip(rows, steps, strict=True)]
        read = {
            (seed, step): placed(self._readers[seed].batch(Phase.TRAIN, Step(step), _FIRST), self._device)
            for seed, step in dict.fromkeys(wanted)
        }
        inputs = torch.stack([read[key][0] for key in wanted])
        return inputs, torch.stack([read[key][1].labels for key in wanted])

    def validation(self, row: int, step: Step, microbatch: MicrobatchId) -> tuple[Tensor, Tensor]:
        """Inputs and labels (B, ...) of one of a row's validation microbatches.

        Raises:
            UnfitError: they cannot be read here.
        """
        batch = self._readers[self._seeds[row]].batch(Phase.EVALUATE, step, microbatch)
        inputs, labels = placed(batch, self._device)
        return inputs, labels.labels
