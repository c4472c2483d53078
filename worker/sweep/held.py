"""Rows of an array as the last record left them, each with its fate, and as they travel and are saved."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from skein.config.job import ArrayJob
from skein.errors import LocalError
from skein.numeric.optim.optimizers import optimizer_of
from skein.numeric.rows import RowBuffer
from skein.numeric.walker import Tensors, Walker
from skein.protocol.messages.array_rounds import REASONS, RowNumbers
from worker.compute.state import FATE, STEP, by_name
from worker.sweep.array import RowSettings

_REASONS = ("", *REASONS)
"""By the number under which a reason is saved."""
RATE_RATIO = 0.5
"""Share of its learning rate that a row goes on with after it was put back."""


class HeldRows:
    """Rows of an array in one buffer, and what each has come to.

    Args:
        job: the array.
        buffer: its rows, in order.
    """

    def __init__(self, job: ArrayJob, buffer: RowBuffer) -> None:
        self.job = job
        self.buffer = buffer
        self.numbers = [_nothing_yet(count) for count in buffer.num_updates]
        """Numbers of each row as they were last."""

    @classmethod
    def beginning(cls, job: ArrayJob, params: list[Tensors]) -> Self:
        """Rows that begin with these parameters, one of each."""
        walkers = [
            Walker(params=own, state=optimizer_of(row.optimizer).init(own))
            for own, row in zip(params, job.rows, strict=True)
        ]
        return cls(job, RowBuffer.of(walkers))

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def device(self) -> torch.device:
        """Device that rows are computed on."""
        return self.buffer.params.device

    # --- what rows do ---

    def going(self) -> list[int]:
        """Rows that make steps."""
        last = self.job.array.last_step
        return [row for row, x in enumerate(self.numbers) if not x.retired and x.num_updates < last]

    def settings_of(self, row: int) -> RowSettings:
        """The numbers of a row."""
        return RowSettings(
            optimizer=self.job.rows[row].optimizer,
            num_steps=self.job.array.schedule_steps,
            rate_ratio=RATE_RATIO ** self.numbers[row].num_rewinds,
        )

    def params_of(self, row: int) -> Tensors:
        """Parameters of a row by name, on the device."""
        return self.buffer.layout.views(self.buffer.params[row])

    def put(self, rows: list[int], others: RowBuffer, numbers: list[RowNumbers]) -> None:
        """Have these rows be what `others` are, in that order; `numbers` are those of all rows."""
        self.buffer.put(rows, others)
        self.numbers = list(numbers)

    # --- state ---

    def state_of(self, row: int) -> dict[str, Tensor]:
        """Tensors of one row by name, its count of updates and its fate among them."""
        walker, told = self.buffer.walker(row), self.numbers[row]
        fate = torch.tensor([told.num_rewinds, _REASONS.index(told.retired)])
        count = torch.tensor(walker.num_updates, dtype=torch.int64)
        return {**walker.params, **by_name(walker.state, walker.state.keys()), STEP: count, FATE: fate}

    @torch.no_grad()
    def load(self, row: int, state: Mapping[str, Tensor]) -> None:
        """Have a row go on from a state that `state_of` gave, perhaps of another array.

        Raises:
            LocalError: a tensor is missing or of another shape; nothing has changed then.
        """
        targets = self.state_of(row)
        for name, target in targets.items():
            if name not in state or state[name].shape != target.shape:
                found = tuple(state[name].shape) if name in state else "nothing"
                raise LocalError(f"row {row}: {name} should be {tuple(target.shape)}, found {found}")
        num_rewinds, reason = state[FATE].tolist()
        if not 0 <= reason < len(_REASONS):
            raise LocalError(f"row {row}: this release knows no fate {reason}")
        for name in targets.keys() - {STEP, FATE}:
            targets[name].copy_(state[name])
        count = int(state[STEP])
        self.buffer.num_updates[row] = count
        self.numbers[row] = replace(_nothing_yet(count), num_rewinds=num_rewinds, retired=_REASONS[reason])


def _nothing_yet(num_updates: int) -> RowNumbers:
    return RowNumbers(
        loss=0.0, num_tokens=0, gradient_norm=0.0, clip=1.0, learning_rate=0.0, num_updates=num_updates
    )
