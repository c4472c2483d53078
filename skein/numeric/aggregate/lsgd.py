"""LSGD: walkers that go their own ways, pulled now and then towards the best of their group and the best of all.

Rules of this file
- After its local step a walker that follows moves by pull * (x - z), not multiplied by the learning rate; z is what the
  leader had when the step began, so that it may travel while the step is computed. First comes the pull to the leader
  of the group, then the one to the leader of all.
- A leader is not pulled: z is where its own step began, and the step is to stand. So where a leader comes to rest, the
  gradient of the loss itself is zero.
- Momentum is a walker's own, and no pull touches it.

Source: Teng et al., "Leader Stochastic Gradient Descent for Distributed Training of Deep Learning Models" (2019), the
update in one line (gradient and pulls at the same parameters), with the periods of its algorithm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from skein.config.aggregation import Lsgd
from skein.config.rule import Due, Reach
from skein.numeric.aggregate.conserved import unequal
from skein.numeric.aggregate.rule import Offer, Rule, Talk, Terms
from skein.numeric.compress.compressor import Form, form_of
from skein.numeric.gradients import flatten, is_finite, shard_bounds, unflatten, vector_norm
from skein.numeric.optim.optimizer import Optimizer
from skein.numeric.walker import Slot, StateClass, Tensors, Walker

START = "lsgd_start"
"""Slot of the parameters that a step with an exchange began with, as one vector."""
_PARAMS = "params"


@dataclass(frozen=True, slots=True, kw_only=True)
class LsgdRule(Rule):
    """The rule `lsgd` with its inner optimizer. Shards are pieces in which the leader's parameters travel."""

    spec: Lsgd
    optimizer: Optimizer
    talks_seldom: ClassVar[bool] = True

    @property
    def slots(self) -> Mapping[str, Slot]:
        """All of the optimizer's state is the walker's own; a newcomer gets that of the leader of its group."""
        inner = {name: replace(slot, kind=_own(slot.kind)) for name, slot in self.optimizer.slots.items()}
        return inner | {START: Slot(kind=StateClass.TRANSIENT, is_copied=False, is_saved=False)}

    def init(self, params: Mapping[str, Tensor]) -> dict[str, Tensors]:
        """The optimizer's state."""
        return self.optimizer.init(params)

    def local_step(self, walker: Walker, grads: Mapping[str, Tensor], terms: Terms, *, talks: bool) -> None:
        """The optimizer's update; before an exchange a copy of the parameters is kept, for anyone may lead."""
        walker.state.pop(START, None)
        start = {"all": flatten(walker.params).detach()} if talks else None
        self.optimizer.update(
            walker, grads, learning_rate=terms.learning_rate, gradient_scale=terms.gradient_scale
        )
        if start is not None:
            walker.state[START] = start

    def contribution(self, walker: Walker, talk: Talk) -> dict[int, Tensors]:
        """The leader's parameters as the step found them, in pieces; nothing from others."""
        if talk.me != _leader_of(talk):
            return {}
        start = walker.state[START]["all"]
        bounds = shard_bounds(start.numel(), talk.num_shards)
        return {shard: {_PARAMS: start[a:b]} for shard, (a, b) in enumerate(bounds)}

    def form(self, walker: Walker, talk: Talk, shard: int, *, is_result: bool) -> Form:
        """A piece of the parameters."""
        start = walker.state[START]["all"]
        a, b = shard_bounds(start.numel(), talk.num_shards)[shard]
        return form_of({_PARAMS: start[a:b]})

    def combine(self, walker: Walker, talk: Talk, shard: int, parts: Sequence[Tensors]) -> Tensors:
        """The leader's piece as it is."""
        (part,) = parts
        return part

    def join(self, walker: Walker, talk: Talk, results: Mapping[int, Tensors]) -> Tensor:
        """The leader's parameters as one vector; a piece that does not fit is made what no claim agrees to."""
        start = walker.state[START]["all"]
        pieces = []
        for shard, (a, b) in enumerate(shard_bounds(start.numel(), talk.num_shards)):
            found, like = results[shard].get(_PARAMS), start[a:b]
            fits = found is not None and (found.shape, found.dtype) == (like.shape, like.dtype)
            pieces.append(found if found is not None and fits else torch.full_like(like, torch.nan))
        return torch.cat(pieces)

    def apply(self, walker: Walker, talk: Talk, joined: Tensor, terms: Terms) -> None:
        """Pulls a follower to the leader, unless that is not finite; the last exchange of a step ends what it kept."""
        if talk.me != _leader_of(talk) and is_finite(joined):
            pull = self.spec.local_pull if talk.due.reach is Reach.GROUP else self.spec.global_pull
            _pull(walker.params, unflatten(joined, walker.params), pull)
        if talk.due == self.spec.due(terms.step)[-1]:
            walker.state.pop(START, None)

    def on_membership(self, walker: Walker, *, before: int, after: int, me: int | None) -> None:
        """Do nothing: no state depends on who is there, and the next election is among those who are."""

    def distance(self, walker: Walker, due: Due, joined: Tensor) -> float:
        """Distance from the leader."""
        return vector_norm(walker.state[START]["all"] - joined)

    def lost(self, offers: Sequence[Offer]) -> str:
        """Whether the leader's parameters arrived as something else."""
        led = flatten(offers[_leader_of(offers[0].talk)].before.params)
        results = (offer.result for offer in offers if offer.result is not None)
        found = (unequal("the leader's parameters", led, result) for result in results)
        return next((what for what in found if what), "")


def _own(kind: StateClass) -> StateClass:
    return StateClass.TRANSIENT if kind is StateClass.TRANSIENT else StateClass.PRIVATE


def _leader_of(talk: Talk) -> int:
    if talk.leader is None:
        raise ValueError("an exchange of this rule needs a leader")
    return talk.leader


@torch.no_grad()
def _pull(params: Mapping[str, Tensor], leader: Mapping[str, Tensor], pull: float) -> None:
    """x = x - pull * (x - z), in place."""
    for name, param in params.items():
        param.sub_((param - leader[name]).mul_(pull))
