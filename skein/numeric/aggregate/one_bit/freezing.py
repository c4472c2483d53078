"""Base of 1-bit LAMB and 1-bit Adam: when they freeze, what travels, and what happens when members change.

Rules of this file
- The warm-up is the inner optimizer on gradients that were reduced in full precision. The first step behind it freezes
  the second moments, on all members alike; from then on momenta travel instead of gradients, as signs. No moment is
  ever corrected for its start at zero: a correction would change from step to step what was frozen.
- What an exchange needs of its step lies in MOMENTUM, between `local_step` and `contribution` and never longer.
- Equal members stay equal: all that moves parameters comes from what all have or all have received.
- When members change, a member keeps what it has left to say (ERROR); newcomers have nothing to say yet. What was left
  over in a shard's sum (SHARD_ERROR) is dropped, for shards change with the members. Losing it once in a while costs no
  accuracy: each is no more than what one exchange rounds away.

What differs from DeepSpeed 0.18.9, on purpose
- The first step trains; there it only makes buffers and throws its gradient away.
- Vectors are not filled up: see `sign_mean`.
- Frozen second moments have a floor, and the whole of a tensor that had no gradient yet gets the mean of the others;
  there a user lists what must not move.
- Errors are saved with the rest; there a checkpoint drops them, and resuming lets replicas diverge.
- Weight decay spares vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, Final

import torch
from torch import Tensor

from skein.config import aggregation
from skein.config.optimizer import AdamWSpec, LambSpec
from skein.numeric.aggregate.conserved import late
from skein.numeric.aggregate.one_bit.sign_mean import (
    SegmentLayout,
    decode_shard,
    encode_all,
    encode_shard,
    join_shards,
    said_norm,
    shard_form,
)
from skein.numeric.aggregate.robust import NORM_LIMIT
from skein.numeric.aggregate.rule import Offer, Rule, Talk, Terms
from skein.numeric.compress.compressor import Form
from skein.numeric.compress.feedback import FeedbackOwner
from skein.numeric.gradients import flatten, unflatten
from skein.numeric.optim.adamw import MEAN, MEAN_OF_SQUARES
from skein.numeric.optim.elementwise import (
    check_update,
    norm_of,
    pieces,
    root,
    row_sums_of_squares,
    scratch_rows,
    zeros_like,
)
from skein.numeric.walker import Slot, StateClass, Tensors, Walker

MOMENTUM_SCALE = "momentum_scale"
"""By which factor a tensor's momentum travels; 0 until the second moments are frozen."""
ERROR = "error"
SHARD_ERROR = "shard_error"
MOMENTUM = "momentum"

_ALL = "all"
_PER_PARAMETER = {
    MEAN: Slot(kind=StateClass.REPLICATED),
    MEAN_OF_SQUARES: Slot(kind=StateClass.REPLICATED),
    ERROR: FeedbackOwner.PEER.slot,
}
SHARED_SLOTS: Final[Mapping[str, Slot]] = _PER_PARAMETER | {
    MOMENTUM_SCALE: Slot(kind=StateClass.REPLICATED),
    SHARD_ERROR: FeedbackOwner.CHUNK.slot,
    MOMENTUM: Slot(kind=StateClass.TRANSIENT, is_copied=False, is_saved=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBit(Rule, ABC):
    """The part of a rule that 1-bit LAMB and 1-bit Adam have in common; each adds `_warm_up`, `_freeze` and `_move`."""

    spec: aggregation.OneBitAdam | aggregation.OneBitLamb
    optimizer: AdamWSpec | LambSpec
    residuals: ClassVar[tuple[str, ...]] = (ERROR,)

    @property
    def slots(self) -> Mapping[str, Slot]:
        return SHARED_SLOTS

    def init(self, params: Mapping[str, Tensor]) -> dict[str, Tensors]:
        zeros = zeros_like(params, _PER_PARAMETER)
        return zeros | {MOMENTUM_SCALE: scalars(params, 0.0), SHARD_ERROR: {}, MOMENTUM: {}}

    # --- steps ---

    @torch.no_grad()
    def local_step(self, walker: Walker, grads: Mapping[str, Tensor], terms: Terms, *, talks: bool) -> None:
        """In the warm-up an update of its own. Later the momentum that is to travel; or, if nobody is there to talk to,
        an update with it as it is.

        Raises:
            ValueError: names, shapes or dtypes disagree, or an exchange is wanted in the warm-up.
        """
        check_update(walker, grads, _PER_PARAMETER)
        if terms.step < self.spec.warmup_steps:
            if talks:
                raise ValueError(f"no momenta travel in step {terms.step} of the warm-up")
            self._warm_up(walker, grads, terms)
            walker.num_updates += 1
            return
        self._freeze_once(walker)
        momenta = {name: self._momentum(walker, name, grads[name], terms) for name in sorted(grads)}
        if talks:
            scale = walker.state[MOMENTUM_SCALE]
            scaled = {name: momentum.mul_(scale[name].item()) for name, momentum in momenta.items()}
            walker.state[MOMENTUM] = {_ALL: flatten(scaled)} if scaled else {}
        else:
            self._move(walker, momenta, terms)
            walker.num_updates += 1

    def _momentum(self, walker: Walker, name: str, grad: Tensor, terms: Terms) -> Tensor:
        """beta1 * m + (1 - beta1) * g, a new tensor; what is kept stays as it is until `apply`."""
        beta = self.optimizer.betas[0]
        own = (grad * terms.gradient_scale).mul_(1.0 - beta)
        return (walker.state[MEAN][name] * beta).add_(own)

    def _average(self, walker: Walker, name: str, grad: Tensor, terms: Terms) -> None:
        """Both moments of the warm-up, in place."""
        beta1, beta2 = self.optimizer.betas
        g = grad * terms.gradient_scale
        walker.state[MEAN][name].mul_(beta1).add_(g * (1.0 - beta1))
        walker.state[MEAN_OF_SQUARES][name].mul_(beta2).add_(g.mul_(g).mul_(1.0 - beta2))

    def _freeze_once(self, walker: Walker) -> None:
        """The end of the warm-up, in the first step behind it that is not left out.

        Being told by the state, not by the step, it cannot be missed when the last step of the warm-up is skipped.
        """
        scale = walker.state[MOMENTUM_SCALE]
        if not scale or scale[min(scale)].item():
            return
        if self.spec.variance_floor:
            raise_variances(walker.state[MEAN_OF_SQUARES], self.spec.variance_floor)
        self._freeze(walker)

    def _decay(self, walker: Walker, name: str) -> float:
        return self.optimizer.weight_decay if walker.params[name].ndim >= 2 else 0.0

    # --- one exchange ---

    def contribution(self, walker: Walker, talk: Talk) -> dict[int, Tensors]:
        layout = self.layout(walker, talk)
        if not walker.params:
            return {shard: {} for shard in range(talk.num_shards)}
        total = walker.state[MOMENTUM].pop(_ALL)
        if not self.spec.error_feedback:
            return encode_all(total, layout)[0]
        total.add_(flatten(walker.state[ERROR]))
        parts, said = encode_all(total, layout)
        for name, error in unflatten(total.sub_(said), walker.params).items():
            walker.state[ERROR][name].copy_(error)
        return parts

    def form(self, walker: Walker, talk: Talk, shard: int, *, is_result: bool) -> Form:
        if not walker.params:
            return {}
        return shard_form(self.layout(walker, talk), shard, walker.params[min(walker.params)].dtype)

    def combine(self, walker: Walker, talk: Talk, shard: int, parts: Sequence[Tensors]) -> Tensors:
        """A part that is not of this shard, or far longer than is usual, does not count; the others then count more."""
        layout = self.layout(walker, talk)
        if not walker.params:
            return {}
        like, key = walker.params[min(walker.params)], layout.key(shard)
        total = torch.zeros(layout.num_elements(shard), dtype=like.dtype, device=like.device)
        admitted = self._admitted(parts, layout, shard, dtype=like.dtype)
        row = talk.weights[shard]
        for i in admitted:
            total.add_(decode_shard(parts[i], layout, shard, dtype=like.dtype).mul_(row[i][1]))
        if len(admitted) < len(parts):
            left = sum(row[i][1] for i in admitted)
            total.mul_(sum(weight for _, weight in row) / left if left else 0.0)
        if not self.spec.error_feedback:
            return encode_shard(total, layout, shard)[0]
        if key in walker.state[SHARD_ERROR]:
            total.add_(walker.state[SHARD_ERROR][key])
        result, said = encode_shard(total, layout, shard)
        walker.state[SHARD_ERROR][key] = total.sub_(said)
        return result

    def _admitted(
        self, parts: Sequence[Tensors], layout: SegmentLayout, shard: int, *, dtype: torch.dtype
    ) -> list[int]:
        """Places of the parts that count: those of this shard whose scales say no unusual length."""
        norms: dict[int, float] = {}
        for i, part in enumerate(parts):
            with suppress(ValueError):  # What cannot be read is the sender's fault, and nobody else's.
                norms[i] = said_norm(part, layout, shard, dtype=dtype)
        usual = median([norm for norm in norms.values() if norm > 0] or [0.0])
        return [i for i, norm in norms.items() if not norm > NORM_LIMIT * usual > 0]

    def join(self, walker: Walker, talk: Talk, results: Mapping[int, Tensors]) -> Tensor:
        """Joined results; NaN, which votes refuse, if not of its shard: the sender is to blame, not the receiver."""
        layout = self.layout(walker, talk)
        if not walker.params:
            return torch.empty(0)
        dtype = walker.params[min(walker.params)].dtype
        shards = []
        for shard in range(talk.num_shards):
            try:
                shards.append(decode_shard(results[shard], layout, shard, dtype=dtype))
            except ValueError:
                shards.append(torch.full((layout.num_elements(shard),), torch.nan, dtype=dtype))
        return join_shards(shards, layout)

    @torch.no_grad()
    def apply(self, walker: Walker, talk: Talk, joined: Tensor, terms: Terms) -> None:
        self._freeze_once(walker)  # who follows without a share in the exchange has made no local step
        scale = walker.state[MOMENTUM_SCALE]
        momenta = {
            name: momentum * (1.0 / scale[name].item())
            for name, momentum in unflatten(joined, walker.params).items()
        }
        self._move(walker, momenta, terms)
        walker.num_updates += 1

    def on_membership(self, walker: Walker, *, before: int, after: int, me: int | None) -> None:
        walker.state[SHARD_ERROR] = {}
        if me is None:
            walker.state |= zeros_like(walker.params, {ERROR: SHARED_SLOTS[ERROR]})

    def layout(self, walker: Walker, talk: Talk) -> SegmentLayout:
        """Segments and shards that the vector of an exchange is cut into."""
        return SegmentLayout(lengths=self._segments(walker.params), num_shards=talk.num_shards)

    # --- what it keeps ---

    def lost(self, offers: Sequence[Offer]) -> str:
        return late(self, offers) if self.spec.error_feedback else ""

    def said(self, walker: Walker, talk: Talk) -> Tensor:
        return walker.state[MOMENTUM][_ALL]

    def kept(self, walker: Walker, talk: Talk, *, is_after: bool) -> Tensor:
        return flatten(walker.state[ERROR])

    def shelf(
        self, walker: Walker, talk: Talk, shard: int, length: int, *, is_after: bool
    ) -> tuple[Tensors, str]:
        return walker.state[SHARD_ERROR], self.layout(walker, talk).key(shard)

    def cut(self, flat: Tensor, walker: Walker, talk: Talk) -> list[Tensor]:
        ranges = [self.layout(walker, talk).ranges(shard) for shard in range(talk.num_shards)]
        return [torch.cat([flat[a:b] for a, b in pieces]) for pieces in ranges]

    def glued(self, shards: Sequence[Tensor], walker: Walker, talk: Talk) -> Tensor:
        return join_shards(shards, self.layout(walker, talk))

    # --- what the two rules add ---

    @abstractmethod
    def _segments(self, params: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Lengths of what has a scale of its own, in the order of `flatten`."""
        ...

    @abstractmethod
    def _warm_up(self, walker: Walker, grads: Mapping[str, Tensor], terms: Terms) -> None:
        """Make one update before the freeze, in place."""
        ...

    @abstractmethod
    def _freeze(self, walker: Walker) -> None:
        """Sets MOMENTUM_SCALE, and what else the compressed stage begins with."""
        ...

    @abstractmethod
    def _move(self, walker: Walker, momenta: Mapping[str, Tensor], terms: Terms) -> None:
        """Make one update behind the freeze, in place: `momenta` become the means."""
        ...


def raise_variances(variances: Tensors, floor: float) -> None:
    """Raises each element to at least `floor` times the mean of its tensor, in place.

    A tensor of zeros, that no gradient has reached yet, gets the mean of all elements of all tensors, and 1 if those
    are zeros too: one bit cannot say 0, and whatever it says is divided by the root of this.
    """
    # Squares of the norms of roots: sums whose order no number of threads can change.
    sums = {name: norm(root(v, out=torch.empty_like(v))) ** 2 for name, v in variances.items()}
    num_elements = sum(v.numel() for v in variances.values())
    overall = sum(sums[name] for name in sorted(sums)) / max(num_elements, 1) or 1.0
    for name, v in variances.items():
        if sums[name]:
            v.clamp_(min=floor * sums[name] / v.numel())
        else:
            v.fill_(overall)


def norm(x: Tensor) -> float:
    """The L2 norm, in float64 and in an order that the length fixes."""
    row = scratch_rows({"x": x}, num_rows=1, dtype=torch.float64)[0]
    return norm_of([total for (piece,) in pieces(x) for total in row_sums_of_squares(piece, row)])


def direction(momentum: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """m / (sqrt(v) + eps) and that denominator, both new."""
    denominator = root(variance, out=torch.empty_like(variance)).add_(eps)
    return momentum / denominator, denominator


def scalars(params: Mapping[str, Tensor], value: float) -> Tensors:
    """Tensors of one number, `value`, for each parameter, in its dtype."""
    return {name: param.new_full((), value) for name, param in params.items()}
