"""Inner optimizers of a job: what makes a local step of a gradient."""

from typing import Annotated, Literal, Self

from pydantic import Field, Tag, model_validator

from skein.errors import UserError
from skein.spec import Spec, told_by

_Beta = Annotated[float, Field(ge=0, lt=1)]


class _Optimizer(Spec):
    """Settings that every optimizer has: a schedule, weight decay and a clipping norm."""

    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-3
    """At the end of the warm-up, per step."""
    schedule: Literal["cosine", "linear", "constant", "step"] = "cosine"
    """Fall of the learning rate after the warm-up: half a cosine, a straight line, none at all, or by steps."""
    final_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the learning rate that is left at the last step; `constant` and `step` have no use for it."""
    drop_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps after which `step` lowers the learning rate, again and again, counted from the end of the warm-up."""
    drop_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the learning rate that each drop of `step` leaves."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Over which the learning rate grows from zero, in a straight line."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    """Applied to matrices and embeddings, never to vectors (norms, biases)."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Global gradient norm above which all gradients shrink together; null: no clipping."""

    @property
    def num_moments(self) -> int:
        """Numbers that the optimizer keeps for each parameter."""
        return 2

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule == "step" and self.drop_every_steps is None:
            raise UserError("schedule", "step", "give drop_every_steps too, such as 1000")
        if self.schedule != "step" and self.drop_every_steps is not None:
            hint = f"schedule {self.schedule} drops nothing: leave it away, or give schedule: step"
            raise UserError("drop_every_steps", self.drop_every_steps, hint)
        return self


class AdamWSpec(_Optimizer):
    """AdamW, as torch defines it."""

    name: Literal["adamw"] = "adamw"
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-8


class AdamSpec(_Optimizer):
    """Adam, as torch defines it: weight decay is added to the gradient."""

    name: Literal["adam"]
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-8


class AdadeltaSpec(_Optimizer):
    """Adadelta, as torch defines it: weight decay is added to the gradient. Wants a learning rate near 1."""

    name: Literal["adadelta"]
    rho: _Beta = 0.9
    """Share of the running means of squares that stays at each step."""
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6


class SgdSpec(_Optimizer):
    """SGD with momentum, as torch defines it: weight decay is added to the gradient."""

    name: Literal["sgd"]
    momentum: _Beta = 0.9
    nesterov: bool = False
    """Look ahead along the momentum; wants one."""

    @property
    def num_moments(self) -> int:
        return 1 if self.momentum else 0

    @model_validator(mode="after")
    def _check(self) -> "SgdSpec":
        if self.nesterov and not self.momentum:
            raise UserError("nesterov", self.nesterov, "give false, or a momentum above 0")
        return self


class LambSpec(_Optimizer):
    """LAMB: Adam's direction, scaled per tensor by the ratio of the norms of parameter and direction."""

    name: Literal["lamb"]
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    min_ratio: Annotated[float, Field(ge=0)] = 0.01
    """Lower bound of the norms' ratio."""
    max_ratio: Annotated[float, Field(gt=0)] = 10.0
    """Upper bound of the norms' ratio."""
    bias_correction: bool = False
    """Divide the moments by what their start at zero has taken from them. 1-bit LAMB allows no such correction."""

    @model_validator(mode="after")
    def _check(self) -> "LambSpec":
        if self.min_ratio > self.max_ratio:
            raise UserError("min_ratio", self.min_ratio, f"give at most max_ratio ({self.max_ratio:g})")
        return self


GossipOptimizer = AdamWSpec | SgdSpec | LambSpec
"""Optimizers whose momentum is gossip's to have."""

OptimizerSpec = Annotated[
    Annotated[AdamWSpec, Tag("adamw")]
    | Annotated[AdamSpec, Tag("adam")]
    | Annotated[AdadeltaSpec, Tag("adadelta")]
    | Annotated[SgdSpec, Tag("sgd")]
    | Annotated[LambSpec, Tag("lamb")],
    told_by("name", "adamw"),
]
