"""Quantities that an exchange must keep, checked from outside: its members' inputs and outputs side by side.

Rules of this file
- With error feedback nothing is lost, it is late: the weighted mean of what members have to say and have kept back,
  plus what owners have kept back, is the result plus what both keep back afterwards.
- What else a rule promises is told by its `lost`. Robust combiners weigh by what they see; of those nothing is claimed.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from skein.numeric.aggregate.rule import Offer, Rule, Talk
from skein.numeric.walker import Tensors, Walker

_TOLERANCE = 1e-9
"""Share of the largest element: a few float64 roundings of sums of few terms, with room to spare."""


class Keeping(Rule, Protocol):
    """A rule whose members and owners say later what the wire has rounded away.

    `is_after`: the walker has sent all, and nothing is applied yet.
    """

    def said(self, walker: Walker, talk: Talk) -> Tensor:
        """Vector that a member has to say after its local step, before anything is rounded."""
        ...

    def kept(self, walker: Walker, talk: Talk, *, is_after: bool) -> Tensor:
        """Residual that a member has kept back, as a vector like the result; zero where the wire rounds nothing."""
        ...

    def shelf(
        self, walker: Walker, talk: Talk, shard: int, length: int, *, is_after: bool
    ) -> tuple[Tensors, str]:
        """Tensors and name under which the owner of a shard of `length` elements keeps what its sum leaves over."""
        ...

    def cut(self, flat: Tensor, walker: Walker, talk: Talk) -> list[Tensor]:
        """A vector's shards, as the rule cuts them."""
        ...

    def glued(self, shards: Sequence[Tensor], walker: Walker, talk: Talk) -> Tensor:
        """The vector of these shards."""
        ...


def stepped(rule: Rule, offer: Offer) -> Walker:
    """The member's walker after its local step, before it has sent anything."""
    walker, grads = offer.before.copy(), offer.grads
    if offer.terms is None:
        return walker
    if not offer.terms.gradient_scale:
        grads = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    rule.local_step(walker, grads, offer.terms, talks=True)
    return walker


def late(rule: Keeping, offers: Sequence[Offer]) -> str:
    """Whether what goes in, and was kept back, is what comes out, and is kept back; in words what is wrong."""
    result = offers[0].result
    assert result is not None
    total, left = torch.zeros_like(result), torch.zeros_like(result)
    for offer in offers:
        weight, talk = _weight(rule, offer, result), offer.talk
        said = rule.said(stepped(rule, offer), talk)
        total += weight * (said + rule.kept(offer.before, talk, is_after=False))
        left += weight * rule.kept(offer.after, talk, is_after=True)
        if any((other != result).any() for other in (offer.result,) if other is not None):
            return "members got different results"
    total += _owned(rule, offers, is_after=False)
    left += _owned(rule, offers, is_after=True)
    return unequal("what was said and kept back", total, result + left)


def _owned(rule: Keeping, offers: Sequence[Offer], *, is_after: bool) -> Tensor:
    """Residuals that owners have kept back of the sums of their shards."""
    result, walker, talk = offers[0].result, offers[0].before, offers[0].talk
    assert result is not None
    shards = []
    for shard, like in enumerate(rule.cut(result, walker, talk)):
        offer = offers[shard % talk.num_members]
        owner = offer.after if is_after else offer.before
        owned, key = rule.shelf(owner, offer.talk, shard, len(like), is_after=is_after)
        shards.append(owned.get(key, torch.zeros_like(like)))
    return rule.glued(shards, walker, talk)


def _weight(rule: Keeping, offer: Offer, like: Tensor) -> Tensor:
    """Share that a member's part has in the result, by element."""
    totals = [sum(weight for _, weight in row) for row in offer.talk.weights]
    own = [sum(w for i, w in row if i == offer.talk.me) for row in offer.talk.weights]
    pieces = rule.cut(like, offer.before, offer.talk)
    parts = [
        torch.full_like(piece, mine / total) for piece, mine, total in zip(pieces, own, totals, strict=True)
    ]
    return rule.glued(parts, offer.before, offer.talk)


def unequal(what: str, before: Tensor, after: Tensor) -> str:
    """`what` with how far these are apart, unless they are equal to rounding."""
    largest = max(float(before.abs().max()), float(after.abs().max()), 1.0) if before.numel() else 1.0
    off = float((before - after).abs().max()) if before.numel() else 0.0
    return "" if off <= _TOLERANCE * largest else f"{what}: off by {off}"
