"""A weighted part of the rows to train on."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from skein.errors import UserError
from skein.spec import Spec

Feature = Literal["last_layer", "logits", "inputs"]
ChoiceShare = Literal["row", "first_alive"]
"""Models by which rows are compared where several train side by side: each by its own, or the first one's that is
left."""
_AHEAD = 4
"""Part of the steps between two choices beside which the second is made: one in so many."""


class CoresetSpec(Spec):
    """Part of the training rows that a classifier is trained on, with a weight for each; by default all rows count."""

    method: Literal["none", "craig", "random"] = "none"
    """`craig` picks rows that cover those of their group; `random` is what to compare it with: as many rows of each
    group, drawn evenly."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the training rows that is chosen. Raise it where the loss stays above that of all rows."""
    warmup_epochs: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Times that all rows are seen, as without a choice, before only the chosen ones are."""
    refresh_epochs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Times that a choice is seen until another is made; null: it stays. Choices of inputs stay."""
    feature: Feature = "last_layer"
    """Numbers that `craig` compares rows by: gradients at the model's last layer, or its logits, when a choice is made;
    or those of the rows themselves, once. Take inputs for convex models, such as `mlp` without widths."""
    group_by: Literal["label", "source"] = "label"
    """Rows stand for others of their class and source, or for any of their source. Take source where classes are
    many."""
    greedy: Literal["auto", "exact", "stochastic", "partitioned"] = "auto"
    """Way in which `craig` looks for rows; `auto`: exactly up to 5,000 rows of a group, by samples up to 50,000, else
    in parts of 1,000."""
    distributed: Literal["greedi", "local"] = "greedi"
    """Choice of what several workers pick of their rows: again among all that they picked, or all of it, each its
    share. Take local where so many picks are too much to send."""
    share: ChoiceShare = "row"
    """Choice for each trial of an array, by its own model; or one for all of them, by the model of the first that was
    not retired. A single choice takes as little time as one trial's, and is nobody else's own."""
    beside: bool = True
    """Whether the next choice is made while steps go on, in time that the plan leaves workers idle: of parameters as
    they are when the last quarter of the steps before it begins. A job of one worker leaves nobody idle, and chooses by
    the newest. Say false where the newest parameters are worth the time."""
    max_overhead: Annotated[float, Field(gt=0, le=1_000_000)] = 0.25
    """Seconds of a choice, as a share of those of the training since the one before, above which choices come half as
    often from then on. Raise it if every choice is worth its time."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of what is drawn in choices. Other seeds of `random` show how far chance alone moves a result."""

    @model_validator(mode="after")
    def _check(self) -> "CoresetSpec":
        if self.refresh_epochs is not None and not (self.method == "random" or self.follows_model):
            what = "a choice of inputs" if self.chooses else "none"
            hint = f"{what} has nothing to choose anew: leave it away, or give method: random or feature: last_layer"
            raise UserError("refresh_epochs", self.refresh_epochs, hint)
        if self.share != "row" and not self.follows_model:
            hint = "no model is asked for a choice, so trials of one seed have the same: leave it away"
            raise UserError("share", self.share, hint)
        return self

    @property
    def is_shared(self) -> bool:
        """Whether rows of an array draw by one choice, so that those beside a row matter to it."""
        return self.share == "first_alive"

    @property
    def chooses(self) -> bool:
        """Whether only a part of the rows is trained on."""
        return self.method != "none"

    @property
    def follows_model(self) -> bool:
        """Whether choices are made along the run, by what the model makes of rows."""
        return self.method == "craig" and self.feature != "inputs"

    def steps_ahead(self, interval: int) -> int:
        """Steps before a choice is due at which rows are looked at for it, the last choice being `interval` steps ago.

        >>> CoresetSpec(method="craig").steps_ahead(50), CoresetSpec(method="craig", beside=False).steps_ahead(50)
        (12, 0)
        """
        return interval // _AHEAD if self.beside else 0

    def num_picks(self, num_rows: int) -> int:
        """Rows of a choice among so many.

        >>> CoresetSpec(method="craig", fraction=0.2).num_picks(1297)
        259
        """
        return max(1, round(self.fraction * num_rows))
