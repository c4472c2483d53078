"""Protocol of every aggregation rule: how a walker steps, what it sends, what becomes of what all sent.

Rules of this file
- One exchange: `local_step` on a copy of the walker, then `contribution`; whoever owns a shard calls `combine` on the
  parts, in order of the members; all `join` the results; when the step is committed, `apply` makes the copy the
  walker. So an attempt that fails has changed nothing, error feedback included.
- A step without an exchange is `local_step` alone. A job of one walker reduces its gradients before that.
- Parts and results are what travels: small dicts of tensors in wire types. What they weigh is measured.
- Equal inputs give equal bits: sums run in member order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from torch import Tensor

from skein.config.rule import Due, Reach
from skein.numeric.compress.compressor import Form
from skein.numeric.walker import Slot, Tensors, Walker


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The numbers of a step, decided once for all: from (step, learning rate) to the factor on summed gradients.

    `gradient_scale` is 1 / tokens times the clip, so that gradient_scale * grads is the clipped mean gradient.
    """

    step: int
    learning_rate: float
    gradient_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """Exchange as one member sees it. Who sends what to whom is the pattern's business, not the rule's.

    Members are counted from 0, in an order that is equal for all. `weights[shard]` says with which weight whoever owns
    the shard takes which member's part, in order of summation. Where each member combines for itself (gossip, leaders)
    there is a shard for each member, its own.
    """

    due: Due
    num_members: int
    me: int
    num_shards: int
    weights: tuple[tuple[tuple[int, float], ...], ...]
    leader: int | None = None
    """Member whose parameters all are pulled to; None where a rule has no leaders."""

    @property
    def is_by_row(self) -> bool:
        """Whether each member combines for itself, so that shard i is member i's and nobody else's."""
        return self.due.reach is Reach.NEIGHBOURS


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Side of one member in an exchange. `after` is its walker once all is sent and combined, and nothing applied.

    `terms` are of the local step before it is sent; None: it is sent as it is.
    """

    before: Walker
    after: Walker
    grads: Mapping[str, Tensor]
    terms: Terms | None
    talk: Talk
    result: Tensor | None = None

    def joined(self, result: Tensor) -> "Offer":
        """With what came back, as all is now."""
        return replace(self, after=self.after.copy(), result=result.clone())


class Rule(Protocol):
    """An aggregation rule with its settings and its inner optimizer."""

    residuals: ClassVar[tuple[str, ...]] = ()
    """Slots of what a member's own parts have rounded away and not yet said."""
    talks_seldom: ClassVar[bool] = False
    """Whether there are so few exchanges that each is worth telling of."""

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Slots of the rule, the inner optimizer's included."""
        ...

    def init(self, params: Mapping[str, Tensor]) -> dict[str, Tensors]:
        """The state of a new walker."""
        ...

    def local_step(self, walker: Walker, grads: Mapping[str, Tensor], terms: Terms, *, talks: bool) -> None:
        """The step before any exchange, in place; `talks`: one follows, and the rule may leave things for it.

        Args:
            grads: sums over the microbatches, by name as in `walker.params`; not changed.
        """
        ...

    def contribution(self, walker: Walker, talk: Talk) -> dict[int, Tensors]:
        """Tensors that this member sends, by shard; error feedback changes in `walker`."""
        ...

    def form(self, walker: Walker, talk: Talk, shard: int, *, is_result: bool) -> Form:
        """Form of every member's part of a shard, or of its result, once this member has contributed.

        A member that sends something else is at fault, and nobody computes with that.
        """
        ...

    def combine(self, walker: Walker, talk: Talk, shard: int, parts: Sequence[Tensors]) -> Tensors:
        """The result of a shard that this member owns, from the parts that `talk.weights[shard]` names, in order."""
        ...

    def join(self, walker: Walker, talk: Talk, results: Mapping[int, Tensors]) -> Tensor:
        """All that came back as one vector: what is hashed, measured and applied."""
        ...

    def apply(self, walker: Walker, talk: Talk, joined: Tensor, terms: Terms) -> None:
        """Apply the result of the exchange to the walker, in place."""
        ...

    def on_membership(self, walker: Walker, *, before: int, after: int, me: int | None) -> None:
        """Members have changed from `before` to `after` in number; `me`: this member's place before, None if new.

        Drops, keeps or cuts anew what depends on them.
        """
        ...

    def distance(self, walker: Walker, due: Due, joined: Tensor) -> float | None:
        """Distance of a walker from where an exchange draws it; None where all have equal parameters.

        Args:
            walker: as the exchange has it, before its result is applied.
            due: which exchange it is.
            joined: its result, as `join` gives it.
        """
        return None

    def lost(self, offers: Sequence[Offer]) -> str:
        """Words for what an exchange has lost or made up; empty if it has kept all that the rule promises to keep.

        Args:
            offers: of all members, in order; what they hold is float64.
        """
        return ""
