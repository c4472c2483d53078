"""One member's side of the exchanges that end a step: what waits between being packed and being committed.

Rules of this file
- The walker itself is left alone until all is decided: each exchange works on a copy, which `finish` hands out.
- A try that is given up leaves nothing: forget its key and pack again.
"""

import hashlib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from skein.numeric.aggregate.rule import Rule, Talk, Terms
from skein.numeric.compress.compressor import Form
from skein.numeric.gradients import digest, is_finite, squared_norm
from skein.numeric.walker import StateClass, Tensors, Walker

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberVote:
    """What a member votes of what came back."""

    digest: str
    squared_norm: float
    is_finite: bool


def digest_of(tensors: Iterable[Tensor]) -> str:
    """One digest of several tensors in order."""
    digests = "".join(digest(tensor.contiguous()) for tensor in tensors)
    return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()


def measured(flat: Tensor, known: Iterable[Tensor] = ()) -> MemberVote:
    """The vote on `flat`; its digest covers what is `known` to all before the exchange too, so that drift is found."""
    norm = squared_norm(flat)
    return MemberVote(
        digest=digest_of([flat, *known]),
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


@dataclass(slots=True)
class _Pending:
    walker: Walker
    talk: Talk
    joined: Tensor | None = None


class StepExchanges(Generic[K]):
    """Exchanges of one step, by key: one for each try at each exchange of each chunk."""

    def __init__(self) -> None:
        self._pending: dict[K, _Pending] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._pending

    def talk(self, key: K) -> Talk:
        """What an exchange is about."""
        return self._pending[key].talk

    def walker(self, key: K) -> Walker:
        """The copy that an exchange works on."""
        return self._pending[key].walker

    def pack(
        self,
        key: K,
        rule: Rule,
        walker: Walker,
        grads: Mapping[str, Tensor],
        terms: Terms,
        talk: Talk,
        *,
        beside: K | None = None,
    ) -> dict[int, Tensors]:
        """The local step on a copy of `walker`, and what is sent after it, by shard.

        A `gradient_scale` of 0 says that this member's gradient counts for nothing, whatever is in it. `beside` is
        another exchange that ends the same step, which has made the local step already: they share the copy.
        """
        if beside is not None:
            copy = self._pending[beside].walker
            self._pending[key] = _Pending(copy, talk)
            return rule.contribution(copy, talk)
        copy = walker.copy()
        if not terms.gradient_scale:
            grads = {name: torch.zeros_like(grad) for name, grad in grads.items()}
        rule.local_step(copy, grads, terms, talks=True)
        self._pending[key] = _Pending(copy, talk)
        return rule.contribution(copy, talk)

    def take(self, key: K, rule: Rule, walker: Walker, talk: Talk) -> dict[int, Tensors]:
        """What is sent of a walker as it is, which goes on meanwhile: `finish` changes this very walker."""
        self._pending[key] = _Pending(walker, talk)
        return rule.contribution(walker, talk)

    def form(self, key: K, rule: Rule, shard: int, *, is_result: bool) -> Form:
        """What every member's part of a shard looks like, or its result."""
        pending = self._pending[key]
        return rule.form(pending.walker, pending.talk, shard, is_result=is_result)

    def combine(self, key: K, rule: Rule, shard: int, parts: Sequence[Tensors]) -> Tensors:
        """The result of a shard that this member owns."""
        pending = self._pending[key]
        return rule.combine(pending.walker, pending.talk, shard, parts)

    def join(self, key: K, rule: Rule, results: Mapping[int, Tensors]) -> Tensor:
        """What came back, as one vector."""
        pending = self._pending[key]
        pending.joined = rule.join(pending.walker, pending.talk, results)
        return pending.joined

    def finish(self, keys: Sequence[K], rule: Rule, terms: Terms) -> Walker:
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

    def forget(self, key: K) -> None:
        """An exchange is over, or given up."""
        self._pending.pop(key, None)

    def clear(self) -> None:
        """Nothing of what was packed counts any more."""
        self._pending.clear()
