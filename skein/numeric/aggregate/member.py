"""Exchanges that end a step, at one member: what waits between being packed and being committed.

Rules of this file
- The walker itself is left alone until all is decided: each exchange works on a copy, which `finish` hands out.
- A try that is given up leaves nothing: forget its key and pack again.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.numeric.aggregate.rule import Rule, Talk, Terms
from skein.numeric.compress.compressor import Form
from skein.numeric.gradients import digest, is_finite, squared_norm
from skein.numeric.walker import StateClass, Tensors, Walker
from skein.types import Attempt, Exchanged, GroupId, StageIndex, Step

ExchangeKey = tuple[GroupId, Attempt]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberVote:
    """Vote of a member on what came back."""

    digest: str
    squared_norm: float
    is_finite: bool


def digest_of_tensors(tensors: Iterable[Tensor]) -> str:
    """Digest of several tensors in order."""
    digests = "".join(digest(tensor.contiguous()) for tensor in tensors)
    return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()


def measured(flat: Tensor, known: Iterable[Tensor] = ()) -> MemberVote:
    """The vote on `flat`; its digest covers what is `known` to all before the exchange too, so that drift is found."""
    norm = squared_norm(flat)
    return MemberVote(
        digest=digest_of_tensors([flat, *known]),
        squared_norm=norm,
        is_finite=math.isfinite(norm) or is_finite(flat),
    )


def replicated(rule: Rule, walker: Walker, *, is_one: bool) -> list[tuple[str, Tensor]]:
    """Tensors that all members hold alike, by name, sorted; `is_one`: all members are one walker."""
    found = [
        (f"{slot}.{name}", tensor)
        for slot, kind in rule.slots.items()
        if kind.kind is StateClass.REPLICATED
        for name, tensor in walker.state.get(slot, {}).items()
    ]
    return sorted([*found, *walker.params.items()] if is_one else found, key=lambda pair: pair[0])


def newcomer(rule: Rule, walker: Walker, *, before: int, after: int, only_saved: bool = False) -> Walker:
    """A new member's walker, made of a donor's: what is not copied begins anew. `only_saved`: made of a checkpoint."""
    copy = walker.copy()
    fresh = rule.init(copy.params)
    for slot, kind in rule.slots.items():
        if not (kind.is_saved if only_saved else kind.is_copied):
            copy.state.pop(slot, None)
            if slot in fresh:
                copy.state[slot] = fresh[slot]
    rule.on_membership(copy, before=before, after=after, me=None)
    return copy


@dataclass(slots=True, kw_only=True)
class _Pending:
    walker: Walker
    talk: Talk
    order: int
    """Place among its step's exchanges, in the order in which they are applied."""
    ends_with: Step | None = None
    """The step whose record ends it, if it goes on beside steps."""
    joined: Tensor | None = None


class StepExchanges:
    """Exchanges of one member, by key: one for each try at each exchange of each chunk."""

    def __init__(self) -> None:
        self._pending: dict[ExchangeKey, _Pending] = {}

    def __contains__(self, key: ExchangeKey) -> bool:
        return key in self._pending

    def talk(self, key: ExchangeKey) -> Talk:
        """Exchange of that key, as this member sees it."""
        return self._pending[key].talk

    def walker(self, key: ExchangeKey) -> Walker:
        """The copy that an exchange works on."""
        return self._pending[key].walker

    def pack(
        self,
        key: ExchangeKey,
        rule: Rule,
        walker: Walker,
        grads: Mapping[str, Tensor],
        terms: Terms,
        talk: Talk,
        *,
        order: int,
    ) -> dict[int, Tensors]:
        """The local step on a copy of `walker`, and what is sent after it, by shard.

        A `gradient_scale` of 0 says that this member's gradient counts for nothing, whatever is in it. Where another
        exchange that ends the same step has made the local step already, they share the copy.
        """
        beside = self._beside(key)
        if beside is not None:
            copy = beside.walker
        else:
            copy = walker.copy()
            if not terms.gradient_scale:
                grads = {name: torch.zeros_like(grad) for name, grad in grads.items()}
            rule.local_step(copy, grads, terms, talks=True)
        self._pending[key] = _Pending(walker=copy, talk=talk, order=order)
        return rule.contribution(copy, talk)

    def _beside(self, key: ExchangeKey) -> _Pending | None:
        """Exchange besides this one that ends the same step of the same stage, if one has been packed."""
        own, _ = key
        alike = (
            x
            for (group, _), x in self._pending.items()
            if group != own and _stage_of(group) == _stage_of(own) and x.ends_with is None
        )
        return next(alike, None)

    def take(
        self, key: ExchangeKey, rule: Rule, walker: Walker, talk: Talk, *, order: int, ends_with: Step
    ) -> dict[int, Tensors]:
        """Shards to send of a walker as it is, which goes on meanwhile: `finish` changes this very walker."""
        self._pending[key] = _Pending(walker=walker, talk=talk, order=order, ends_with=ends_with)
        return rule.contribution(walker, talk)

    def form(self, key: ExchangeKey, rule: Rule, shard: int, *, is_result: bool) -> Form:
        """Form of every member's part of a shard, or of its result."""
        pending = self._pending[key]
        return rule.form(pending.walker, pending.talk, shard, is_result=is_result)

    def combine(self, key: ExchangeKey, rule: Rule, shard: int, parts: Sequence[Tensors]) -> Tensors:
        """The result of a shard that this member owns."""
        pending = self._pending[key]
        return rule.combine(pending.walker, pending.talk, shard, parts)

    def join(self, key: ExchangeKey, rule: Rule, results: Mapping[int, Tensors]) -> Tensor:
        """Results that came back, as one vector."""
        pending = self._pending[key]
        pending.joined = rule.join(pending.walker, pending.talk, results)
        return pending.joined

    def named(self, results: Iterable[ExchangeKey], stage: StageIndex, *, beside: bool) -> list[ExchangeKey]:
        """Exchanges that a record's results name and a stage here takes part in, in the order of their application.

        Args:
            results: that the record names.
            stage: of the chunk.
            beside: those that went on beside steps; else those of the very step that is recorded.
        """
        mine = [key for key in results if _stage_of(key[0]) == stage and key in self._pending]
        alike = [key for key in mine if (self._pending[key].ends_with is not None) is beside]
        return sorted(alike, key=lambda key: self._pending[key].order)

    def finish(self, keys: Sequence[ExchangeKey], rule: Rule, terms: Terms) -> Walker:
        """The walker after the exchanges of these keys, in their order.

        Args:
            keys: at least one; all joined.
        """
        walker = self._pending[keys[0]].walker
        for key in keys:
            pending = self._pending[key]
            assert pending.joined is not None, f"{key} was not joined"
            rule.apply(walker, pending.talk, pending.joined, terms)
        return walker

    def committed(self, step: Step) -> list[ExchangeKey]:
        """A step is over: its exchanges are forgotten, and given back."""
        over = [key for key, x in self._pending.items() if x.ends_with is None or x.ends_with <= step]
        for key in over:
            del self._pending[key]
        return over

    def clear(self) -> None:
        """Forget all that was packed: it does not count any more."""
        self._pending.clear()


def _stage_of(group: GroupId) -> StageIndex | None:
    return group.stage if isinstance(group, Exchanged) else None
