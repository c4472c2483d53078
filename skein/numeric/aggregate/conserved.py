"""What an exchange must keep, checked from outside: its members' inputs and outputs side by side.

Rules of this file
- With error feedback nothing is lost, it is late: the weighted mean of what members have to say and have kept back,
  plus what owners have kept back, is the result plus what both keep back afterwards.
- Gossip moves nobody but towards others: the sum over all members is the same before and after mixing.
- A leader's parameters arrive as they are.
- Robust combiners weigh by what they see; of those nothing is claimed here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skein.config.robust import NoRobust
from skein.numeric.aggregate import all_reduce, diloco
from skein.numeric.aggregate.all_reduce import AllReduceRule
from skein.numeric.aggregate.diloco import DiLoCoRule
from skein.numeric.aggregate.fragments import fragment_spans, gathered, shards_of
from skein.numeric.aggregate.gossip import SENT, GossipRule
from skein.numeric.aggregate.lsgd import LsgdRule
from skein.numeric.aggregate.one_bit import freezing as one_bit
from skein.numeric.aggregate.one_bit.freezing import OneBit
from skein.numeric.aggregate.one_bit.sign_mean import join_shards
from skein.numeric.aggregate.rule import Rule, Talk, Terms
from skein.numeric.gradients import flatten, shard_bounds
from skein.numeric.walker import Tensors, Walker

_TOLERANCE = 1e-9
"""Of the largest element: a few float64 roundings of sums of few terms, with room to spare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One member's side of an exchange. `after` is its walker once all is sent and combined, and nothing applied.

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


def lost(rule: Rule, offers: Sequence[Offer]) -> str:
    """What an exchange has lost or made up, in words; nothing if it has kept all that its rule promises to keep.

    Args:
        offers: of all members, in order.
    """
    results = [offer.result for offer in offers if offer.result is not None]
    match rule:
        case GossipRule() if isinstance(rule.spec.robust, NoRobust):
            told = [flatten(_stepped(rule, offer).state[SENT]) for offer in offers]
            return _unequal("the sum over members", torch.stack(told).sum(0), torch.stack(results).sum(0))
        case LsgdRule():
            leader = next(offer.talk.leader for offer in offers)
            assert leader is not None
            led = flatten(offers[leader].before.params)
            found = [_unequal("the leader's parameters", led, result) for result in results]
            return next((what for what in found if what), "")
        case AllReduceRule() | DiLoCoRule() if isinstance(rule.spec.robust, NoRobust):
            return _late(rule, offers)
        case OneBit() if rule.spec.error_feedback:
            return _late(rule, offers)
        case _:
            return ""


def _late(rule: AllReduceRule | DiLoCoRule | OneBit, offers: Sequence[Offer]) -> str:
    """Whether what goes in, and was kept back, is what comes out, and is kept back."""
    result = offers[0].result
    assert result is not None
    total, left = torch.zeros_like(result), torch.zeros_like(result)
    for offer in offers:
        weight = _weight(offer, result, rule)
        total += weight * (_said(rule, offer) + _kept(rule, offer.before, offer.talk))
        left += weight * _kept(rule, offer.after, offer.talk, is_after=True)
        if any((other != result).any() for other in (offer.result,) if other is not None):
            return "members got different results"
    total += _owned(rule, offers, is_after=False)
    left += _owned(rule, offers, is_after=True)
    return _unequal("what was said and kept back", total, result + left)


def _stepped(rule: Rule, offer: Offer) -> Walker:
    """The member's walker after its local step, before it has sent anything."""
    walker, grads = offer.before.copy(), offer.grads
    if offer.terms is None:
        return walker
    if not offer.terms.gradient_scale:
        grads = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    rule.local_step(walker, grads, offer.terms, talks=True)
    return walker


def _said(rule: AllReduceRule | DiLoCoRule | OneBit, offer: Offer) -> Tensor:
    """What a member has to say, before anything is rounded."""
    walker = _stepped(rule, offer)
    match rule:
        case AllReduceRule():
            return walker.state["gradient"]["all"]
        case OneBit():
            return walker.state[one_bit.MOMENTUM]["all"]
        case DiLoCoRule():
            spans = fragment_spans(
                walker.params, fragment=offer.talk.due.fragment, num_fragments=rule.spec.fragments
            )
            return gathered(walker.state[diloco.GLOBAL], spans) - gathered(walker.params, spans)


def _kept(
    rule: AllReduceRule | DiLoCoRule | OneBit, walker: Walker, talk: Talk, *, is_after: bool = False
) -> Tensor:
    """What a member has kept back, as a vector like the result; zeros where the wire rounds nothing."""
    zero = torch.zeros((), dtype=next(iter(walker.params.values())).dtype)
    match rule:
        case AllReduceRule():
            kept = walker.state.get(all_reduce.RESIDUAL)
            return zero if kept is None else flatten(kept)
        case OneBit():
            return flatten(walker.state[one_bit.ERROR])
        case DiLoCoRule():
            if diloco.RESIDUAL not in walker.state:
                return zero
            if is_after:
                return walker.state[diloco.NEXT][str(talk.due.fragment)]
            spans = fragment_spans(
                walker.params, fragment=talk.due.fragment, num_fragments=rule.spec.fragments
            )
            return gathered(walker.state[diloco.RESIDUAL], spans)


def _owned(rule: AllReduceRule | DiLoCoRule | OneBit, offers: Sequence[Offer], *, is_after: bool) -> Tensor:
    """What owners have kept back of the sums of their shards."""
    result, talk = offers[0].result, offers[0].talk
    assert result is not None
    shards = []
    for shard, like in enumerate(_cut(rule, result, offers[0])):
        offer = offers[shard % talk.num_members]
        owned, key = _shelf(rule, offer, shard, len(like), is_after=is_after)
        shards.append(owned.get(key, torch.zeros_like(like)))
    if isinstance(rule, OneBit):
        return join_shards(shards, rule.layout(offers[0].before, talk))
    return torch.cat(shards)


def _shelf(
    rule: AllReduceRule | DiLoCoRule | OneBit, offer: Offer, shard: int, length: int, *, is_after: bool
) -> tuple[Tensors, str]:
    """Where an owner keeps what its shard's sum leaves over, and under which name."""
    walker, num_shards = offer.after if is_after else offer.before, offer.talk.num_shards
    match rule:
        case AllReduceRule():
            return walker.state.get(all_reduce.SHARD_RESIDUAL, {}), f"{shard}.{num_shards}.{length}"
        case OneBit():
            return walker.state[one_bit.SHARD_ERROR], rule.layout(offer.before, offer.talk).key(shard)
        case DiLoCoRule():
            slot = diloco.NEXT_SHARD if is_after else diloco.SHARD_RESIDUAL
            return walker.state.get(slot, {}), f"{offer.talk.due.fragment}.{shard}.{num_shards}"


def _cut(rule: AllReduceRule | DiLoCoRule | OneBit, flat: Tensor, offer: Offer) -> list[Tensor]:
    """A vector's shards, as the rule cuts them."""
    num_shards = offer.talk.num_shards
    match rule:
        case AllReduceRule():
            return [flat[a:b] for a, b in shard_bounds(flat.numel(), num_shards)]
        case DiLoCoRule():
            return shards_of(flat, num_shards)
        case OneBit():
            ranges = [rule.layout(offer.before, offer.talk).ranges(shard) for shard in range(num_shards)]
            return [torch.cat([flat[a:b] for a, b in pieces]) for pieces in ranges]


def _weight(offer: Offer, like: Tensor, rule: AllReduceRule | DiLoCoRule | OneBit) -> Tensor:
    """What a member's part counts, by element."""
    totals = [sum(weight for _, weight in row) for row in offer.talk.weights]
    own = [sum(w for i, w in row if i == offer.talk.me) for row in offer.talk.weights]
    pieces = _cut(rule, like, offer)
    parts = [
        torch.full_like(piece, mine / total) for piece, mine, total in zip(pieces, own, totals, strict=True)
    ]
    return (
        join_shards(parts, rule.layout(offer.before, offer.talk))
        if isinstance(rule, OneBit)
        else torch.cat(parts)
    )


def _unequal(what: str, before: Tensor, after: Tensor) -> str:
    largest = max(float(before.abs().max()), float(after.abs().max()), 1.0) if before.numel() else 1.0
    off = float((before - after).abs().max()) if before.numel() else 0.0
    return "" if off <= _TOLERANCE * largest else f"{what}: off by {off}"
