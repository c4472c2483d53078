"""Rows of an array as the last record left them, each with its fate, and as they travel and are saved.

A row that makes no more steps leaves the buffer at a round's end: the device has room for those that do, and the host
keeps what it was.
"""

from collections.abc import Mapping, Sequence
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
_HOST = torch.device("cpu")


class HeldRows:
    """Rows of an array: those that make steps in one buffer, the others by themselves, and what each has come to.

    Args:
        job: the array.
        buffer: its rows, in order.
    """

    def __init__(self, job: ArrayJob, buffer: RowBuffer) -> None:
        self.job = job
        self.device = buffer.params.device
        """Device that rows are computed on."""
        self.buffer = buffer
        """The rows of `places`, in that order."""
        self.places = list(range(len(buffer)))
        self._left: dict[int, RowBuffer] = {}
        """Rows that have left the buffer, each alone."""
        self.numbers = [RowNumbers.begun(count) for count in buffer.num_updates]
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
            label_smoothing=self.job.rows[row].label_smoothing,
        )

    def params_of(self, row: int) -> Tensors:
        """Parameters of a row by name, on the device."""
        return {name: x.to(self.device) for name, x in self._walker(row).params.items()}

    def taken(self, rows: Sequence[int]) -> RowBuffer:
        """Copies of rows that make steps, in this order."""
        return self.buffer.taken([self.places.index(row) for row in rows])

    def put(self, rows: Sequence[int], others: RowBuffer, numbers: Sequence[RowNumbers]) -> None:
        """Have these rows be what `others` are, in that order; `numbers` are those of all rows."""
        self.buffer.put([self.places.index(row) for row in rows], others)
        self.numbers = list(numbers)
        self._pack()

    def _pack(self) -> None:
        """Have rows leave the buffer that make no more steps."""
        going = self.going()
        for row in [row for row in self.places if row not in going]:
            self._left[row] = self.taken([row]).to(_HOST)
        if len(going) < len(self.places):
            self.buffer, self.places = self.taken(going), going

    def _walker(self, row: int) -> Walker:
        left = self._left.get(row)
        return self.buffer.walker(self.places.index(row)) if left is None else left.walker(0)

    # --- state ---

    def state_of(self, row: int) -> dict[str, Tensor]:
        """Tensors of one row by name, its count of updates and its fate among them."""
        walker, told = self._walker(row), self.numbers[row]
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
        self.numbers[row] = replace(
            RowNumbers.begun(count), num_rewinds=num_rewinds, retired=_REASONS[reason]
        )
        if row in self._left:
            # What it goes on from is older than its end, or it leaves again.
            self.buffer = RowBuffer.joined([self.buffer, self._left.pop(row).to(self.device)])
            self.places.append(row)
        self.buffer.num_updates[self.places.index(row)] = count
        self._pack()
