"""A weighted part of the rows to train on."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from skein.errors import UserError
from skein.spec import Spec


class CoresetSpec(Spec):
    """Part of the training rows that a classifier is trained on, with a weight for each; by default all rows count."""

    method: Literal["none", "craig", "random"] = "none"
    """`craig` picks rows that cover those of their class, by their numbers, once; `random` is what to compare it with:
    as many rows of each class, drawn evenly."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the training rows that is chosen. Raise it where the loss stays above that of all rows."""
    warmup_epochs: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Times that all rows are seen, as without a choice, before only the chosen ones are."""
    refresh_epochs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Times that a choice of `random` is seen until another is drawn; null: it stays. `craig` makes one."""
    greedy: Literal["auto", "exact", "stochastic", "partitioned"] = "auto"
    """Way in which `craig` looks for rows; `auto`: exactly up to 5,000 rows of a class, by samples up to 50,000, else
    in parts of 500."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of what is drawn in choices. Other seeds of `random` show how far chance alone moves a result."""

    @model_validator(mode="after")
    def _check(self) -> "CoresetSpec":
        if self.refresh_epochs is not None and self.method != "random":
            hint = f"{self.method} has nothing to choose anew: leave it away, or give method: random"
            raise UserError("refresh_epochs", self.refresh_epochs, hint)
        return self

    @property
    def chooses(self) -> bool:
        """Whether only a part of the rows is trained on."""
        return self.method != "none"
