"""Routing of tokens to experts, as a job asks for it: settings that no Hugging Face configuration has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from pydantic import Field, model_validator

from skein.errors import UserError
from skein.spec import Spec


class DropOrder(StrEnum):
    """Order in which an expert takes those who chose it, until it is full.

    First all first choices by token, then all second ones; token by token; or by weight, the highest first.
    """

    CHOICE_MAJOR = "choice_major"
    TOKEN_MAJOR = "token_major"  # noqa: S105 - of tokens that are words
    PROBS = "probs"


class RouterKind(StrEnum):
    """Way in which tokens and experts find each other."""

    SOFTMAX_TOPK = "softmax_topk"
    GSHARD = "gshard"
    SIGMOID = "sigmoid"
    XMOE = "xmoe"
    EXPERT_CHOICE = "expert_choice"
    SOFTMOE = "softmoe"

    @property
    def row(self) -> "RouterRow":
        """Answers of this router to what others ask of any."""
        return ROUTERS[self]


Matrices = dict[str, tuple[int, int]]
"""Shapes of matrices by name below the module of a block's experts: outputs, inputs."""


def _one_matrix(_routing: "RoutingSpec", num_experts: int, num_features: int) -> Matrices:
    return {"gate": (num_experts, num_features)}


def _projected(routing: "RoutingSpec", num_experts: int, num_features: int) -> Matrices:
    num_projected = routing.num_projected(num_experts)
    return {"gate.projection": (num_projected, num_features), "gate.experts": (num_experts, num_projected)}


def _noisy(routing: "RoutingSpec", num_experts: int, num_features: int) -> Matrices:
    """Rows that score tokens, and where scores have noise as many for how much each has."""
    return {"gate": (num_experts * (1 if routing.noise is None else 2), num_features)}


def _slots(routing: "RoutingSpec", num_experts: int, num_features: int) -> Matrices:
    return {"gate": (num_experts * routing.num_slots, num_features)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRow:
    """A router's answers, whatever it computes: `worker.model.sparse.routers` does that."""

    tokens_choose: bool = True
    """Whether each token chooses experts, so that some may find theirs full, and some experts be left alone."""
    looks_ahead: bool = False
    """Whether later tokens decide what becomes of an earlier one."""
    weighs_by_chances: bool = True
    """Whether weights are made of the chances of all experts, at which a balance loss pulls; else of scores."""
    is_exportable: bool = False
    """Whether transformers routes alike, if weights are divided by their sum wherever this router does so."""
    always_divides: bool = False
    """Whether a token's weights are divided by their sum whatever the family does."""
    mixes_tokens: bool = False
    """Whether experts take mixtures of all tokens, a fixed number, rather than some tokens as they are."""
    own_settings: tuple[str, ...] = ()
    """Settings that only this router has."""
    matrices: "Callable[[RoutingSpec, int, int], Matrices]" = _one_matrix
    """Its matrices, of its settings and the numbers of experts and of hidden features."""


ROUTERS: Mapping[RouterKind, RouterRow] = MappingProxyType(
    {
        RouterKind.SOFTMAX_TOPK: RouterRow(is_exportable=True),
        RouterKind.GSHARD: RouterRow(
            weighs_by_chances=False,
            is_exportable=True,
            always_divides=True,
            own_settings=("noise", "random_second"),
            matrices=_noisy,
        ),
        RouterKind.SIGMOID: RouterRow(weighs_by_chances=False),
        RouterKind.XMOE: RouterRow(own_settings=("projection", "temperature"), matrices=_projected),
        RouterKind.EXPERT_CHOICE: RouterRow(tokens_choose=False, looks_ahead=True),
        RouterKind.SOFTMOE: RouterRow(
            tokens_choose=False, looks_ahead=True, mixes_tokens=True, own_settings=("slots",), matrices=_slots
        ),
    }
)
_OF_CHOICES = ("balance_coefficient", "capacity", "drop")
"""Settings of the routers by which tokens choose."""


class RoutingSpec(Spec):
    """Settings of every router of a sparse model."""

    router: RouterKind = RouterKind.SOFTMAX_TOPK
    """Way of tokens to experts: softmax_topk is that of the published models, and of exports."""
    balance_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Factor of each layer's balance loss in its gradient, per valid token; 0: it is only told. 0.01 is usual: raise
    this if few experts take most tokens, lower it if the loss suffers."""
    capacity: Annotated[float, Field(gt=0, le=1024)] | None = None
    """Choices that an expert takes of a training microbatch, over what it would take if all took as many; null: all of
    them. Give 1 to 2 where the busiest expert of a microbatch takes too much time or memory."""
    drop: DropOrder = DropOrder.CHOICE_MAJOR
    """Choices that go first where there is a `capacity`; what comes after is dropped, and adds nothing."""
    noise: Annotated[float, Field(gt=0, le=100)] | None = None
    """Factor of the noise on gshard's scores in training, of which the router learns how much each expert's has; null:
    none. Give 1 if few experts take most tokens though a balance loss counts."""
    random_second: bool = False
    """Let each token of a training microbatch have gshard's second expert by chance, twice its weight, so that those of
    little weight leave room. Give it where a `capacity` drops much; a token has two experts then."""
    projection: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Features in which xmoe compares tokens with experts; null: half as many as there are experts."""
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    """Divisor of xmoe's cosines; null: 0.3. Lower this if its weights are too even."""
    slots: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Mixtures of a microbatch's tokens that each expert of softmoe takes; null: 1."""
    allow_lookahead: bool = False
    """Let tokens see later ones by way of expert_choice or softmoe, though a language model that writes has none."""

    @model_validator(mode="after")
    def _check_router(self) -> "RoutingSpec":
        row, usual = self.router.row, RoutingSpec.model_fields
        owners = {name: kind for kind, other in ROUTERS.items() for name in other.own_settings}
        for name, owner in owners.items():
            if owner is not self.router and getattr(self, name) != usual[name].default:
                hint = f"it belongs to router: {owner}, and this is {self.router}: leave it out"
                raise UserError(name, getattr(self, name), hint)
        for name in () if row.tokens_choose else _OF_CHOICES:
            given = getattr(self, name)
            if given != usual[name].default:
                hint = f"by router: {self.router} no token chooses, so all experts take equally many: leave it out"
                raise UserError(name, str(given) if isinstance(given, StrEnum) else given, hint)
        if row.looks_ahead and not self.allow_lookahead:
            hint = "tokens see later ones by it, and a model that writes has none: give allow_lookahead: true if meant"
            raise UserError("router", self.router.value, hint)
        if self.allow_lookahead and not row.looks_ahead:
            hint = f"by router: {self.router} no token sees a later one: leave it out"
            raise UserError("allow_lookahead", self.allow_lookahead, hint)
        return self

    @property
    def num_slots(self) -> int:
        """Slots of each expert of softmoe."""
        return self.slots or 1

    @property
    def divisor(self) -> float:
        """Divisor of xmoe's cosines."""
        return self.temperature or 0.3

    def num_projected(self, num_experts: int) -> int:
        """Features in which xmoe compares tokens with so many experts."""
        return self.projection or max(1, num_experts // 2)
