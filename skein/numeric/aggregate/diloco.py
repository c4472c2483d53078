"""DiLoCo: many local steps, then one outer step on the mean of what they changed.

With theta the global parameters and theta_i those of walker i, for the elements of one fragment:

    sent by i     q_i = encode(theta - theta_i + e_i);  e_i = theta - theta_i + e_i - decode(q_i)
    by its owner  s = sum_i w_i decode(q_i) + E;  Q = encode(s);  E = s - decode(Q)
    everywhere    d = decode(Q);  b = mu b + d;  theta = theta - lr (d + mu b)     without Nesterov: theta - lr b
                  theta_i = (1 - mix) theta_i + mix theta

Rules of this file
- theta and b are made of d and of themselves alone, so they are bit-equal wherever d is. Each operation on tensors is
  one rounding per element (no fused multiply-add, no division), in the dtype of the parameters.
- e and E change when an exchange is applied, not when it is taken: the new ones wait in slots of their own. So an
  exchange that fails, in the same step or many steps later, has changed nothing, and is simply taken anew.
- With overlap, d is about the theta_i of some steps before. What a walker did meanwhile stays in theta_i, in its share
  1 - mix, and goes out with the fragment's next exchange; under mix = 1 it is given up.
- A walker of weight 0, or without one, has had no say: it takes theta as it is, and keeps its e_i.

Source: Douillard et al., "DiLoCo" (2023), Algorithm 1; fragments, overlap and mixing from "Streaming DiLoCo" (2025).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from skein.config.aggregation import DiLoCo
from skein.config.robust import CentredClip, NoRobust
from skein.config.rule import Due
from skein.numeric.aggregate.conserved import late
from skein.numeric.aggregate.fragments import (
    Span,
    equal_range,
    fragment_spans,
    gathered,
    shards_of,
    span_view,
    views_of,
)
from skein.numeric.aggregate.robust import Part, combiner_of, part_of
from skein.numeric.aggregate.rule import Offer, Rule, Talk, Terms
from skein.numeric.compress.compressor import Compressor, Form
from skein.numeric.compress.compressors import compressor_of
from skein.numeric.gradients import vector_norm
from skein.numeric.optim.optimizer import Optimizer
from skein.numeric.walker import Slot, StateClass, Tensors, Walker

GLOBAL = "global_params"
MOMENTUM = "outer_momentum"
CENTRE = "outer_centre"
"""The last mean, around which centred clipping clips."""
RESIDUAL = "residual"
"""e: what a walker's wire has rounded away, by parameter."""
SHARD_RESIDUAL = "shard_residual"
"""E: what the owner of a shard has rounded away, by fragment, shard and number of shards."""
NEXT = "next_residual"
NEXT_SHARD = "next_shard_residual"
_NORM = "norm"

_PRIVATE = StateClass.PRIVATE


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCoRule(Rule):
    """DiLoCo around any inner optimizer, whose state stays with its walker."""

    spec: DiLoCo
    optimizer: Optimizer
    residuals: ClassVar[tuple[str, ...]] = (RESIDUAL,)
    talks_seldom: ClassVar[bool] = True

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Slots of the rule, the inner optimizer's included.

        A newcomer gets a copy of somebody's inner state: with moments of zero and the count of updates of the others,
        Adam's first steps would be too long.
        """
        replicated = (GLOBAL, MOMENTUM, *((CENTRE,) if self._has_centre else ()))
        slots = {name: Slot(kind=StateClass.REPLICATED) for name in replicated}
        if self._feeds_back:
            waiting = Slot(kind=_PRIVATE, is_copied=False, is_saved=False)
            slots[RESIDUAL] = Slot(kind=_PRIVATE, is_copied=False)
            slots[SHARD_RESIDUAL] = Slot(kind=StateClass.SHARD, is_copied=False)
            slots |= {NEXT: waiting, NEXT_SHARD: waiting}
        return slots | {name: replace(slot, kind=_PRIVATE) for name, slot in self.optimizer.slots.items()}

    def init(self, params: Mapping[str, Tensor]) -> dict[str, Tensors]:
        """The state of a new walker that begins at these parameters."""
        state = {GLOBAL: {name: param.detach().clone() for name, param in params.items()}}
        state[MOMENTUM] = _zeros(params)
        if self._has_centre:
            state[CENTRE] = _zeros(params)
        if self._feeds_back:
            state |= {RESIDUAL: _zeros(params), SHARD_RESIDUAL: {}, NEXT: {}, NEXT_SHARD: {}}
        return state | self.optimizer.init(params)

    def local_step(self, walker: Walker, grads: Mapping[str, Tensor], terms: Terms, *, talks: bool) -> None:
        """Make one update of the inner optimizer, in place."""
        self.optimizer.update(
            walker, grads, learning_rate=terms.learning_rate, gradient_scale=terms.gradient_scale
        )

    @torch.no_grad()
    def contribution(self, walker: Walker, talk: Talk) -> dict[int, Tensors]:
        """Change of this walker's fragment since it last took theta, as shards of the wire's type.

        Each shard states the norm of the whole, for combiners that go by it. The residual waits for `apply`.
        """
        if self.spec.robust.compares_vectors and talk.num_shards > 1:
            raise ValueError(
                f"{self.spec.robust.kind} compares whole fragments: 1 shard, not {talk.num_shards}"
            )
        spans = self._spans(walker, talk.due)
        delta = self._changed(walker, talk.due)
        if self._feeds_back:
            delta.add_(gathered(walker.state[RESIDUAL], spans))
        parts = shards_of(delta, talk.num_shards)
        sent = [self._compressor.encode(part) for part in parts]
        heard = torch.cat([self._decoded(x, like=part) for x, part in zip(sent, parts, strict=True)])
        norm = torch.tensor([part_of(heard, 1.0).norm], dtype=torch.float64)
        if self._feeds_back:
            walker.state[NEXT][str(talk.due.fragment)] = delta.sub_(heard)
        return {shard: {**tensors, _NORM: norm} for shard, tensors in enumerate(sent)}

    def form(self, walker: Walker, talk: Talk, shard: int, *, is_result: bool) -> Form:
        """A piece of the fragment in the wire's type, and of a part the norm that it states."""
        spans = self._spans(walker, talk.due)
        num_elements = sum(span_view(walker.state[GLOBAL], span).numel() for span in spans)
        start, stop = equal_range(num_elements, part=shard, num_parts=talk.num_shards)
        dtype = walker.state[GLOBAL][min(walker.state[GLOBAL])].dtype
        own = self._compressor.form(stop - start, dtype)
        return own if is_result else {**own, _NORM: (torch.float64, (1,))}

    @torch.no_grad()
    def combine(self, walker: Walker, talk: Talk, shard: int, parts: Sequence[Tensors]) -> Tensors:
        """The combined change of a shard, in the wire's type; what that rounds away waits for `apply`.

        Weights are relative; parts of weight 0, and those that the gates refuse, do not count.

        Raises:
            ValueError: no part has a weight, or the robust rule wants more of them.
        """
        spans = self._spans(walker, talk.due)
        like = shards_of(gathered(walker.state[GLOBAL], spans), talk.num_shards)[shard]
        row = talk.weights[shard]
        total = sum(weight for _, weight in row)
        if total <= 0:
            raise ValueError(f"shard {shard}: nobody's part has a weight")
        counted = [
            Part(values=self._heard(tensors, like=like), weight=weight / total, norm=_stated_norm(tensors))
            for (_, weight), tensors in zip(row, parts, strict=True)
            if weight > 0
        ]
        combiner = combiner_of(self.spec.robust, centre=self._centre(walker, spans))
        mean = combiner(counted).values
        if not self._feeds_back:
            return self._compressor.encode(mean)
        key = _shard_key(talk, shard)
        kept = walker.state[SHARD_RESIDUAL].get(key)
        if kept is not None and kept.numel() == mean.numel():
            mean.add_(kept)
        result = self._compressor.encode(mean)
        walker.state[NEXT_SHARD][key] = mean.sub_(self._decoded(result, like=mean))
        return result

    def join(self, walker: Walker, talk: Talk, results: Mapping[int, Tensors]) -> Tensor:
        """The combined change of the fragment, in order of its elements: equal bits for all members."""
        parts = shards_of(gathered(walker.state[GLOBAL], self._spans(walker, talk.due)), talk.num_shards)
        return torch.cat([self._heard(results[shard], like=part) for shard, part in enumerate(parts)])

    @torch.no_grad()
    def apply(self, walker: Walker, talk: Talk, joined: Tensor, terms: Terms) -> None:
        """The outer step on the fragment, and what the walker goes on with, in place."""
        spans = self._spans(walker, talk.due)
        is_heard = tuple(_weight_of(talk, shard) > 0 for shard in range(talk.num_shards))
        self._outer_step(walker, spans, joined)
        mix = self.spec.mix if any(is_heard) else 1.0
        for span in spans:
            own, theta = (span_view(tensors, span) for tensors in (walker.params, walker.state[GLOBAL]))
            own.copy_(theta if mix == 1.0 else own.mul(1.0 - mix).add_(theta.mul(mix)))
        if self._feeds_back:
            self._take_residuals(walker, talk, spans, is_heard)

    @torch.no_grad()
    def on_membership(self, walker: Walker, *, before: int, after: int, me: int | None) -> None:
        """Owners change, so their residuals go; a newcomer begins at theta, with nothing rounded away."""
        if self._feeds_back:
            walker.state |= {SHARD_RESIDUAL: {}, NEXT_SHARD: {}}
        if me is None:
            for name, theta in walker.state[GLOBAL].items():
                walker.params[name].copy_(theta)
            if self._feeds_back:
                walker.state |= {RESIDUAL: _zeros(walker.params), NEXT: {}}

    # --- what it tells and keeps ---

    def distance(self, walker: Walker, due: Due, joined: Tensor) -> float:
        """Distance from the mean of all walkers, for the exchange's fragment."""
        return vector_norm(self._changed(walker, due) - joined)

    def lost(self, offers: Sequence[Offer]) -> str:
        """Words for what is neither in the result nor kept back; of robust combiners nothing is claimed."""
        return late(self, offers) if isinstance(self.spec.robust, NoRobust) else ""

    def said(self, walker: Walker, talk: Talk) -> Tensor:
        return self._changed(walker, talk.due)

    def kept(self, walker: Walker, talk: Talk, *, is_after: bool) -> Tensor:
        if RESIDUAL not in walker.state:
            return torch.zeros(())
        if is_after:
            return walker.state[NEXT][str(talk.due.fragment)]
        return gathered(walker.state[RESIDUAL], self._spans(walker, talk.due))

    def shelf(
        self, walker: Walker, talk: Talk, shard: int, length: int, *, is_after: bool
    ) -> tuple[Tensors, str]:
        return walker.state.get(NEXT_SHARD if is_after else SHARD_RESIDUAL, {}), _shard_key(talk, shard)

    def cut(self, flat: Tensor, walker: Walker, talk: Talk) -> list[Tensor]:
        return shards_of(flat, talk.num_shards)

    def glued(self, shards: Sequence[Tensor], walker: Walker, talk: Talk) -> Tensor:
        return torch.cat(list(shards))

    def _changed(self, walker: Walker, due: Due) -> Tensor:
        """theta - theta_i."""
        spans = self._spans(walker, due)
        return gathered(walker.state[GLOBAL], spans).sub_(gathered(walker.params, spans))

    def _outer_step(self, walker: Walker, spans: Sequence[Span], joined: Tensor) -> None:
        """b = mu b + d;  theta = theta - lr (d + mu b), or without Nesterov theta - lr b; b begins at zero."""
        for span, delta in zip(spans, views_of(joined, spans), strict=True):
            momentum, theta = (span_view(walker.state[slot], span) for slot in (MOMENTUM, GLOBAL))
            momentum.mul_(self.spec.outer_momentum).add_(delta)
            nesterov = self.spec.nesterov
            direction = momentum.mul(self.spec.outer_momentum).add_(delta) if nesterov else momentum
            theta.sub_(direction.mul(self.spec.outer_learning_rate))
            if self._has_centre:
                span_view(walker.state[CENTRE], span).copy_(delta)

    def _take_residuals(
        self, walker: Walker, talk: Talk, spans: Sequence[Span], is_heard: Sequence[bool]
    ) -> None:
        """Apply residuals that wait: a member's where its part counted, an owner's where its result was."""
        waiting = walker.state[NEXT].pop(str(talk.due.fragment), None)
        if waiting is not None:
            residual = gathered(walker.state[RESIDUAL], spans)
            old, new = shards_of(residual, talk.num_shards), shards_of(waiting, talk.num_shards)
            kept = torch.cat([n if heard else o for o, n, heard in zip(old, new, is_heard, strict=True)])
            for span, values in zip(spans, views_of(kept, spans), strict=True):
                span_view(walker.state[RESIDUAL], span).copy_(values)
        for shard in range(talk.num_shards):
            owned = walker.state[NEXT_SHARD].pop(_shard_key(talk, shard), None)
            if owned is not None:
                walker.state[SHARD_RESIDUAL][_shard_key(talk, shard)] = owned

    def _spans(self, walker: Walker, due: Due) -> tuple[Span, ...]:
        return fragment_spans(walker.params, fragment=due.fragment, num_fragments=self.spec.fragments)

    def _centre(self, walker: Walker, spans: Sequence[Span]) -> Tensor | None:
        return gathered(walker.state[CENTRE], spans) if self._has_centre else None

    def _heard(self, tensors: Tensors, *, like: Tensor) -> Tensor:
        """Vector received; NaN, which gates and votes refuse, if it cannot be decoded: that is the sender's fault."""
        try:
            return self._decoded({name: x for name, x in tensors.items() if name != _NORM}, like=like)
        except ValueError:
            return torch.full_like(like, torch.nan)

    def _decoded(self, tensors: Tensors, *, like: Tensor) -> Tensor:
        return self._compressor.decode(tensors, like.numel(), like.dtype)

    @property
    def _compressor(self) -> Compressor:
        return compressor_of(self.spec.wire)

    @property
    def _has_centre(self) -> bool:
        return isinstance(self.spec.robust, CentredClip)

    @property
    def _feeds_back(self) -> bool:
        return self.spec.error_feedback and self.spec.wire != "fp32"


def _zeros(params: Mapping[str, Tensor]) -> Tensors:
    return {name: torch.zeros_like(param, requires_grad=False) for name, param in params.items()}


def _shard_key(talk: Talk, shard: int) -> str:
    return f"{talk.due.fragment}.{shard}.{talk.num_shards}"


def _stated_norm(tensors: Tensors) -> float:
    norm = tensors.get(_NORM)
    return float(norm.item()) if norm is not None and norm.numel() == 1 else math.nan


def _weight_of(talk: Talk, shard: int) -> float:
    """Weight of this member's part of a shard."""
    return sum(weight for member, weight in talk.weights[shard] if member == talk.me)
