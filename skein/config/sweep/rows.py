"""Rows of an array: trials of a sweep that differ in numbers only, and train side by side as one job inside it.

No job file can hold any of this: the coordinator makes it of the job's `sweep`.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from skein.config.optimizer import OptimizerSpec
from skein.errors import UserError
from skein.spec import Spec

Fuse = Literal["auto", "always", "never"]
"""Choice of one pass over all rows: if a probe finds that worth it, whatever it finds, or not at all."""


class RowOrigin(Spec):
    """Row of another array's checkpoint, which a row goes on from: parameters, optimizer state, count of updates."""

    job: str
    version: Annotated[int, Field(ge=0)]
    row: Annotated[int, Field(ge=0)]


class ArrayRow(Spec):
    """A trial in an array: its number in the sweep, and the numbers by which it differs from the rows beside it."""

    trial: Annotated[int, Field(ge=0)]
    optimizer: OptimizerSpec
    """Optimizer of the kind that all rows have; its rates, schedule and clip are this row's."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Seed of the row's parameters where it begins anew, and of the order of its data."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    origin: RowOrigin | None = None
    """None: parameters are drawn."""


class ArraySpec(Spec):
    """Rows in their order, and the steps that they are to make.

    All have made `first_step` steps when the array begins, and `last_step` when it ends; the last round may have fewer
    than the others. `schedule_steps` are those of a trial's whole budget, by which its learning rate falls.
    """

    rows: Annotated[tuple[ArrayRow, ...], Field(min_length=1)]
    first_step: Annotated[int, Field(ge=0)] = 0
    last_step: Annotated[int, Field(ge=1)]
    schedule_steps: Annotated[int, Field(ge=1)]
    op_steps: Annotated[int, Field(ge=1)] = 1
    """Local steps of each op, several of which are a round: one op for each would take longer to ask for than to do."""
    fuse: Fuse = "auto"
    min_speedup: Annotated[float, Field(ge=1, le=100)] = 1.10
    """Times as fast as the loop that a pass over all rows has to be under `auto`."""
    on_divergence: Literal["retire", "rewind"] = "retire"
    """A row whose numbers are not finite any more is retired where its round began; under `rewind` it goes on from
    there once, at half its learning rate."""

    @model_validator(mode="after")
    def _check(self) -> "ArraySpec":
        if not self.first_step < self.last_step <= self.schedule_steps:
            hint = f"give more than first_step ({self.first_step}), at most schedule_steps ({self.schedule_steps})"
            raise UserError("last_step", self.last_step, hint)
        return self

    @property
    def num_steps(self) -> int:
        """Steps that each row makes here."""
        return self.last_step - self.first_step
