"""Memory that rows take together: what one and two of them keep in a dry run, and so what any number would.

Rules of this file
- Only what is kept from forward to backward is counted in dry runs; what buffers take is known.
- A dry run changes no row.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from skein.numeric.rows import RowBuffer
from skein.protocol.messages.array_rounds import PassKind
from worker.model.base import Stage
from worker.sweep.passes import Pass, RowBatch, make_pass

_NUM_BUFFERS, _NUM_GRADIENTS = 3, 2
"""Buffers of parameters and state: rows as they are held, the copy that a round works on, and what is voted on. Buffers
of gradients: their sums, and those of one more batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMemory:
    """Bytes of rows that make a step: so many whatever their number, and so many for each."""

    fixed_bytes: int
    row_bytes: int

    def of(self, num_rows: int) -> int:
        """Bytes of so many rows."""
        return self.fixed_bytes + num_rows * self.row_bytes


def measured_memory(kind: PassKind, stage: Stage, rows: RowBuffer, batch: RowBatch) -> RowMemory:
    """Memory of rows like these that go through a pass of this kind, which there is, by two dry runs.

    Args:
        kind: of the pass.
        stage: a whole model, as each row is one.
        rows: the first of them is tried, alone and beside itself.
        batch: of one microbatch.
    """
    one = _kept_by(kind, stage, rows, batch, 1)
    # In turn a row's backward has let go of what it kept before the next one begins.
    more = 0 if kind is PassKind.LOOPED else max(0, _kept_by(kind, stage, rows, batch, 2) - one)
    own = _NUM_BUFFERS * (1 + len(rows.state)) + _NUM_GRADIENTS
    row_bytes = own * rows.layout.num_elements * rows.params.element_size()
    return RowMemory(fixed_bytes=max(0, one - more), row_bytes=row_bytes + more)


def _kept_by(kind: PassKind, stage: Stage, rows: RowBuffer, batch: RowBatch, num_rows: int) -> int:
    places = [0] * num_rows
    made = make_pass(kind, stage, rows.taken(places))
    assert made is not None, "asked of passes that there are"
    return kept_bytes(made, batch.of(places))


def kept_bytes(made: Pass, batch: RowBatch) -> int:
    """Bytes that a pass keeps from its forward to its backward, parameters aside; its gradients are others then."""
    storage = made.rows.params.untyped_storage().data_ptr()
    found: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept = x.untyped_storage()
        if kept.data_ptr() != storage:
            found[kept.data_ptr()] = kept.nbytes()
        return x

    with saved_tensors_hooks(keep, _same):
        made.clear()
        made.run(*batch)
    return sum(found.values())


def _same(x: Tensor) -> Tensor:
    return x
