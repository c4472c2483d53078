"""Gossip: every walker has parameters of its own and averages with its neighbours in a graph.

Rules of this file
- W is doubly stochastic in every round, so the mean of all walkers moves by the mean of what they add, and by nothing
  else. A row whose weights do not sum to 1 is refused: whoever is gone is in no row of the plan that follows, and is
  never made up for by scaling the rest.
- A step without an exchange is the same step with W = I. So `every_steps` > 1 means plain local steps with momentum;
  which methods bear that is `skein.topology.stability`'s to say.
- What travels, in the dtype of the parameters: y; for DA-DmSGD its momentum too; with AdamW or LAMB also the shared
  statistics. Each neighbour gets the same tensors.

With g the gradient (weight decay included), lr the learning rate, b the momentum:

    dsgd        y = x - lr g                        x' = W y
    dmsgd       m' = b m + g, y = x - lr m'         x' = W y
    da_dmsgd    n = b m + g, y = x - lr n           x' = W y, m' = W n
    qg_dmsgd    y = x - lr (b m + g)                x' = W y, m' = b m + (1 - b) (x - x') / lr
    decentlam   y = x - lr g                        m' = b m + (x - W y) / lr, x' = x - lr m'

With AdamW or LAMB, lr g is `SharedMoment.direction`, b the first beta, and m is in units of the parameters.

Sources: Lian et al. 2017 (D-PSGD), Assran et al. 2019, Yu, Jin and Yang 2019 (both averages in one exchange), Lin et
al. 2021 (quasi-global momentum), Yuan et al., "DecentLaM: Decentralized Momentum SGD for Large-batch Deep Training"
(2021).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from skein.config.aggregation import Gossip
from skein.config.optimizer import GossipOptimizer, SgdSpec
from skein.config.robust import CentredClip, NormClip, NoRobust
from skein.config.rule import Due
from skein.errors import UserError
from skein.numeric.aggregate.conserved import stepped, unequal
from skein.numeric.aggregate.robust import Part, clipped_gossip, gates, part_of, row_without
from skein.numeric.aggregate.rule import Offer, Rule, Talk, Terms
from skein.numeric.aggregate.shared_moment import SharedMoment
from skein.numeric.compress.compressor import Form, form_of
from skein.numeric.gradients import flatten, sum_in_order, unflatten, vector_norm
from skein.numeric.optim.elementwise import zeros_like
from skein.numeric.optim.groups import decayed_names
from skein.numeric.walker import Slot, StateClass, Tensors, Walker

MOMENTUM = "gossip_momentum"
SENT = "gossip_sent"
"""Slot of what goes to the neighbours, between `local_step` and `apply`: vectors by what they are."""
_Y, _MOMENTUM, _SHARED = "y", "momentum", "shared"
_SUM_ERROR = 1e-6  # weights may have travelled as float32


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipRule(Rule):
    """The rule `gossip`. It has the optimizer's settings, not the optimizer: momentum is in the midst of the method.

    Raises:
        UserError: the optimizer or the robust rule does not go with the method.
    """

    spec: Gossip
    optimizer: GossipOptimizer

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, SgdSpec) and self.optimizer.nesterov:
            raise UserError("optimizer.nesterov", True, "give false: gossip has heavy-ball momentum")
        if self.spec.method == "dsgd" and self.momentum:
            raise UserError("aggregation.method", "dsgd", "it has no momentum: give 0, or take dmsgd")
        if not isinstance(self.spec.robust, NoRobust | NormClip | CentredClip):
            hint = "give none, median_norm_clip or centred_clip: others do not keep the mean"
            raise UserError("aggregation.robust", self.spec.robust.kind, hint)

    @property
    def momentum(self) -> float:
        """The optimizer's: SGD's momentum, else the first beta."""
        return self.optimizer.momentum if isinstance(self.optimizer, SgdSpec) else self.optimizer.betas[0]

    @property
    def shared(self) -> SharedMoment | None:
        """Preconditioner that AdamW and LAMB have beside the momentum; None for SGD."""
        return None if isinstance(self.optimizer, SgdSpec) else SharedMoment(spec=self.optimizer)

    @property
    def slots(self) -> Mapping[str, Slot]:
        """A newcomer gets a neighbour's parameters and statistics, and begins without momentum."""
        own = {} if self.spec.method == "dsgd" else {MOMENTUM: Slot(kind=StateClass.PRIVATE, is_copied=False)}
        sent = {SENT: Slot(kind=StateClass.TRANSIENT, is_copied=False, is_saved=False)}
        return own | (dict(self.shared.slots) if self.shared else {}) | sent

    def init(self, params: Mapping[str, Tensor]) -> dict[str, Tensors]:
        """Zeros."""
        state = self.shared.init(params) if self.shared else {}
        if MOMENTUM in self.slots:
            state |= zeros_like(params, {MOMENTUM: self.slots[MOMENTUM]})
        return state

    @torch.no_grad()
    def local_step(self, walker: Walker, grads: Mapping[str, Tensor], terms: Terms, *, talks: bool) -> None:
        """Before an exchange: what is to be sent, the parameters left alone. Else a whole step, with W = I."""
        direction = self._direction(walker, grads, terms)
        sent = self._outgoing(walker, direction, self._rate(terms))
        if self.shared:
            sent[_SHARED] = self.shared.sent(walker)
        walker.num_updates += 1
        if talks:
            walker.state[SENT] = sent
        else:
            self._take(walker, sent, self._rate(terms))

    def contribution(self, walker: Walker, talk: Talk) -> dict[int, Tensors]:
        """The same vectors for everyone who has a weight for them."""
        sent = walker.state[SENT]
        rows = enumerate(talk.weights)
        return {i: dict(sent) for i, row in rows if any(j == talk.me and weight for j, weight in row)}

    def form(self, walker: Walker, talk: Talk, shard: int, *, is_result: bool) -> Form:
        """Form of the vectors that this member sends."""
        return form_of(walker.state[SENT])

    @torch.no_grad()
    def combine(self, walker: Walker, talk: Talk, shard: int, parts: Sequence[Tensors]) -> Tensors:
        """Parts mixed by this member's row of W, behind the gates.

        Raises:
            ValueError: the row does not sum to 1.
        """
        row = talk.weights[shard]
        if abs(math.fsum(weight for _, weight in row) - 1.0) > _SUM_ERROR:
            raise ValueError(f"weights that keep the mean sum to 1, not {row}")
        own = walker.state[SENT]
        if all(member != talk.me for member, _ in row):  # it keeps nothing of its own, unless others fail
            row, parts = (*row, (talk.me, 0.0)), [*parts, own]
        return {
            what: self._mix(what, row, [_heard(part, what, like=own[what]) for part in parts], me=talk.me)
            for what in sorted(own)
        }

    def join(self, walker: Walker, talk: Talk, results: Mapping[int, Tensors]) -> Tensor:
        """Vectors that this member has mixed, one after another, by name of what they are."""
        return flatten(results[talk.me])

    @torch.no_grad()
    def apply(self, walker: Walker, talk: Talk, joined: Tensor, terms: Terms) -> None:
        """The end of the step, from what was mixed."""
        sent = walker.state.pop(SENT)
        self._take(walker, unflatten(joined, sent), self._rate(terms))

    @torch.no_grad()
    def on_membership(self, walker: Walker, *, before: int, after: int, me: int | None) -> None:
        """A newcomer begins without momentum, and means over members begin anew; nothing else changes."""
        walker.state.pop(SENT, None)
        if me is None:
            for momentum in walker.state.get(MOMENTUM, {}).values():
                momentum.zero_()
        if self.shared:
            self.shared.restart(walker)

    # --- the methods ---

    def _rate(self, terms: Terms) -> float:
        """Factor on directions; 1 for preconditioned ones, which have the learning rate in them."""
        return 1.0 if self.shared else terms.learning_rate

    def distance(self, walker: Walker, due: Due, joined: Tensor) -> float:
        """Distance from the mean of its neighbours and itself."""
        sent = walker.state[SENT]
        return vector_norm(sent[_Y] - unflatten(joined, sent)[_Y])

    def lost(self, offers: Sequence[Offer]) -> str:
        """By how much the sum over all members changed: nobody moves but towards others."""
        if not isinstance(self.spec.robust, NoRobust):
            return ""
        told = [flatten(stepped(self, offer).state[SENT]) for offer in offers]
        results = [offer.result for offer in offers if offer.result is not None]
        return unequal("the sum over members", torch.stack(told).sum(0), torch.stack(results).sum(0))

    def _direction(self, walker: Walker, grads: Mapping[str, Tensor], terms: Terms) -> Tensors:
        if grads.keys() != walker.params.keys():
            raise ValueError(f"gradients: names differ: {sorted(grads.keys() ^ walker.params.keys())}")
        if self.shared:
            return self.shared.direction(walker, grads, terms)
        direction = {name: grad * terms.gradient_scale for name, grad in grads.items()}
        for name in sorted(decayed_names(walker.params)) if self.optimizer.weight_decay else ():
            direction[name].add_(walker.params[name] * self.optimizer.weight_decay)
        return direction

    def _outgoing(self, walker: Walker, direction: Tensors, rate: float) -> dict[str, Tensor]:
        """The vectors that this step sends; DmSGD's momentum is made here."""
        method, beta = self.spec.method, self.momentum
        moving = direction
        if method in ("dmsgd", "da_dmsgd", "qg_dmsgd"):
            momentum = walker.state[MOMENTUM]
            moving = {name: momentum[name] * beta + g for name, g in direction.items()}
        if method == "dmsgd":
            walker.state[MOMENTUM] = moving
        y = flatten({name: param.detach() - moving[name] * rate for name, param in walker.params.items()})
        return {_Y: y, _MOMENTUM: flatten(moving)} if method == "da_dmsgd" else {_Y: y}

    def _take(self, walker: Walker, mixed: Mapping[str, Tensor], rate: float) -> None:
        """Parameters, momentum and statistics from the mixed vectors, in place."""
        method, beta = self.spec.method, self.momentum
        after = unflatten(mixed[_Y], walker.params)
        averaged = unflatten(mixed[_MOMENTUM], walker.params) if method == "da_dmsgd" else {}
        for name, param in walker.params.items():
            if method == "da_dmsgd":
                walker.state[MOMENTUM][name].copy_(averaged[name])
            if method not in ("decentlam", "qg_dmsgd"):
                param.copy_(after[name])
                continue
            momentum, moved = walker.state[MOMENTUM][name], param - after[name]
            # x - lr m' is W y - lr b m: without a division, so a learning rate of 0 only stops the momentum.
            param.copy_(after[name] - momentum * (rate * beta) if method == "decentlam" else after[name])
            share = 1.0 if method == "decentlam" else 1.0 - beta
            momentum.mul_(beta)
            if rate:
                momentum.add_(moved.mul_(share / rate))
        if self.shared:
            self.shared.take(walker, mixed[_SHARED])

    def _mix(
        self, what: str, row: Sequence[tuple[int, float]], vectors: Sequence[Tensor], *, me: int
    ) -> Tensor:
        parts = [part_of(vector, weight) for vector, (_, weight) in zip(vectors, row, strict=True)]
        at = next(index for index, (member, _) in enumerate(row) if member == me)
        if what == _Y and isinstance(self.spec.robust, NormClip | CentredClip):
            others = [part for index, part in enumerate(parts) if index != at]
            return clipped_gossip(vectors[at], others, radius=_radius(self.spec.robust)).values
        # Momenta and statistics differ among honest walkers; of parameters, one's own length is usual, or the median.
        usual = max(parts[at].norm, median(part.norm for part in parts)) if what == _Y else math.inf
        return _row_sum(row, parts, me=me, usual=usual)


def _heard(part: Tensors, what: str, *, like: Tensor) -> Tensor:
    """A neighbour's vector; one that does not fit is made what the gates refuse, for it is the sender's fault."""
    found = part.get(what)
    fits = found is not None and (found.shape, found.dtype) == (like.shape, like.dtype)
    return found if found is not None and fits else torch.full_like(like, torch.nan)


def _radius(robust: NormClip | CentredClip) -> float:
    return robust.times if isinstance(robust, NormClip) else robust.radius


def _row_sum(row: Sequence[tuple[int, float]], parts: Sequence[Part], *, me: int, usual: float) -> Tensor:
    """Sum of weight * vector in order of the members; a refused one's weight goes to this member's own."""
    kept = row_without(row, gates(parts, usual=usual), me=me)
    by_member = {member: part.values for (member, _), part in zip(row, parts, strict=True)}
    return sum_in_order([by_member[member] * weight for member, weight in kept])
