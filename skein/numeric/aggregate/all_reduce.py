"""All-reduce: every step with the mean of all gradients; in fewer bytes, or robustly, where the job says so.

With g_i member i's gradient, scaled so that the mean over n members is the batch's, by shard:

    sent by i     q_i = encode(g_i + e_i);  e_i = g_i + e_i - decode(q_i)
    by its owner  s = combine(decode(q_1), .., decode(q_n)) + E;  Q = encode(s);  E = s - decode(Q)
    everywhere    one update of the optimizer with decode(Q)

Plain float32 sums need none of this: they are reduced before the step, along any pattern.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skein.config.aggregation import AllReduce
from skein.config.robust import NoRobust
from skein.numeric.aggregate.conserved import late
from skein.numeric.aggregate.robust import combiner_of, part_of
from skein.numeric.aggregate.rule import Offer, Rule, Talk, Terms
from skein.numeric.compress.compressor import Form
from skein.numeric.compress.compressors import compressor_of
from skein.numeric.compress.feedback import FeedbackOwner, encode_with, no_residual
from skein.numeric.gradients import flatten, shard_bounds, unflatten
from skein.numeric.optim.optimizer import Optimizer
from skein.numeric.walker import Slot, StateClass, Tensors, Walker

RESIDUAL = "residual"
SHARD_RESIDUAL = "shard_residual"
_GRADIENT = "gradient"
_ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceRule(Rule):
    """The rule `all_reduce` around any optimizer."""

    spec: AllReduce
    optimizer: Optimizer
    residuals: ClassVar[tuple[str, ...]] = (RESIDUAL,)

    @property
    def slots(self) -> Mapping[str, Slot]:
        """The optimizer's, and what the wire has rounded away: a member's own, and an owner's of its shard."""
        slots = dict(self.optimizer.slots)
        if self._is_rounding:
            slots[RESIDUAL] = FeedbackOwner.PEER.slot
            slots[SHARD_RESIDUAL] = FeedbackOwner.CHUNK.slot
        if self.spec.due(0):
            slots[_GRADIENT] = Slot(kind=StateClass.TRANSIENT, is_copied=False, is_saved=False)
        return slots

    def init(self, params: Mapping[str, Tensor]) -> dict[str, Tensors]:
        """The optimizer's state, and nothing rounded away yet."""
        state = self.optimizer.init(params)
        if self._is_rounding:
            residual = {name: torch.zeros_like(param, requires_grad=False) for name, param in params.items()}
            state |= {RESIDUAL: residual, SHARD_RESIDUAL: {}}
        if self.spec.due(0):
            state[_GRADIENT] = {}
        return state

    @torch.no_grad()
    def local_step(self, walker: Walker, grads: Mapping[str, Tensor], terms: Terms, *, talks: bool) -> None:
        """The update, of gradients that are reduced already; or, before an exchange, this member's own gradient."""
        if talks:
            walker.state[_GRADIENT] = {_ALL: flatten(grads) * terms.gradient_scale}
            return
        self._update(walker, grads, terms)

    @torch.no_grad()
    def contribution(self, walker: Walker, talk: Talk) -> dict[int, Tensors]:
        """The gradient by shard, in the wire's type; of a shard without weight, what it has to say is kept."""
        if self.spec.robust.compares_vectors and talk.num_shards > 1:
            raise ValueError(
                f"{self.spec.robust.kind} compares whole gradients: 1 shard, not {talk.num_shards}"
            )
        gradient = walker.state[_GRADIENT][_ALL]
        bounds = shard_bounds(gradient.numel(), talk.num_shards)
        compressor = compressor_of(self.spec.wire)
        if not self._is_rounding:
            return {shard: compressor.encode(gradient[a:b]) for shard, (a, b) in enumerate(bounds)}
        residual = flatten(walker.state[RESIDUAL])
        sent: dict[int, Tensors] = {}
        for shard, (start, stop) in enumerate(bounds):
            sent[shard], left = encode_with(compressor, gradient[start:stop], residual[start:stop])
            if any(member == talk.me for member, _ in talk.weights[shard]):
                residual[start:stop] = left
        walker.state[RESIDUAL] = {
            name: part.clone() for name, part in unflatten(residual, walker.params).items()
        }
        return sent

    def form(self, walker: Walker, talk: Talk, shard: int, *, is_result: bool) -> Form:
        """A piece of the gradient in the wire's type."""
        gradient = walker.state[_GRADIENT][_ALL]
        start, stop = shard_bounds(gradient.numel(), talk.num_shards)[shard]
        return compressor_of(self.spec.wire).form(stop - start, gradient.dtype)

    @torch.no_grad()
    def combine(self, walker: Walker, talk: Talk, shard: int, parts: Sequence[Tensors]) -> Tensors:
        """The combined gradient of a shard, in the wire's type."""
        gradient = walker.state[_GRADIENT][_ALL]
        start, stop = shard_bounds(gradient.numel(), talk.num_shards)[shard]
        compressor, n = compressor_of(self.spec.wire), stop - start
        counted = [
            part_of(self._heard(part, n, gradient), weight)
            for part, (_, weight) in zip(parts, talk.weights[shard], strict=True)
        ]
        mean = combiner_of(self.spec.robust)(counted).values
        if not self._is_rounding:
            return compressor.encode(mean)
        key, owned = f"{shard}.{talk.num_shards}.{n}", walker.state[SHARD_RESIDUAL]
        before = owned.get(key, no_residual(n, dtype=mean.dtype, device=mean.device))
        result, owned[key] = encode_with(compressor, mean, before)
        return result

    def join(self, walker: Walker, talk: Talk, results: Mapping[int, Tensors]) -> Tensor:
        """The combined gradient as one vector."""
        gradient = walker.state[_GRADIENT][_ALL]
        bounds = shard_bounds(gradient.numel(), talk.num_shards)
        return torch.cat(
            [self._heard(results[shard], b - a, gradient) for shard, (a, b) in enumerate(bounds)]
        )

    @torch.no_grad()
    def apply(self, walker: Walker, talk: Talk, joined: Tensor, terms: Terms) -> None:
        """The update with what all have combined; `gradient_scale` is the clip, for this is a mean already."""
        walker.state[_GRADIENT] = {}
        self._update(walker, unflatten(joined, walker.params), terms)

    def on_membership(self, walker: Walker, *, before: int, after: int, me: int | None) -> None:
        """Owners change, so what they had rounded away is dropped; a newcomer begins without any of its own."""
        if self._is_rounding:
            walker.state[SHARD_RESIDUAL] = {}

    # --- what it keeps ---

    def lost(self, offers: Sequence[Offer]) -> str:
        """Words for what is neither in the result nor kept back; of robust combiners nothing is claimed."""
        return late(self, offers) if isinstance(self.spec.robust, NoRobust) else ""

    def said(self, walker: Walker, talk: Talk) -> Tensor:
        return walker.state[_GRADIENT][_ALL]

    def kept(self, walker: Walker, talk: Talk, *, is_after: bool) -> Tensor:
        kept = walker.state.get(RESIDUAL)
        return torch.zeros(()) if kept is None else flatten(kept)

    def shelf(
        self, walker: Walker, talk: Talk, shard: int, length: int, *, is_after: bool
    ) -> tuple[Tensors, str]:
        return walker.state.get(SHARD_RESIDUAL, {}), f"{shard}.{talk.num_shards}.{length}"

    def cut(self, flat: Tensor, walker: Walker, talk: Talk) -> list[Tensor]:
        return [flat[a:b] for a, b in shard_bounds(flat.numel(), talk.num_shards)]

    def glued(self, shards: Sequence[Tensor], walker: Walker, talk: Talk) -> Tensor:
        return torch.cat(list(shards))

    def _heard(self, part: Tensors, num_elements: int, like: Tensor) -> Tensor:
        """Vector received; NaN, which gates and votes refuse, if it cannot be decoded: that is the sender's fault."""
        try:
            return compressor_of(self.spec.wire).decode(part, num_elements, like.dtype)
        except ValueError:
            return like.new_full((num_elements,), torch.nan)

    def _update(self, walker: Walker, grads: Mapping[str, Tensor], terms: Terms) -> None:
        self.optimizer.update(
            walker, grads, learning_rate=terms.learning_rate, gradient_scale=terms.gradient_scale
        )

    @property
    def _is_rounding(self) -> bool:
        return self.spec.wire != "fp32"
