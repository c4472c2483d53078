"""The law table: a row for each rule, and a flock of members that steps, exchanges, loses and gains some, and resumes.

A new rule adds a row to `ROWS` and inherits every law of `test_laws.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from skein.config.aggregation import AllReduce, DiLoCo, Gossip, Lsgd
from skein.config.aggregation import OneBitAdam as OneBitAdamSpec
from skein.config.aggregation import OneBitLamb as OneBitLambSpec
from skein.config.optimizer import AdamWSpec, GossipOptimizer, LambSpec, OptimizerSpec, SgdSpec
from skein.config.robust import CentredClip, Krum, NormClip, RobustSpec, TrimmedMean
from skein.config.rule import Due, Reach, Walkers
from skein.numeric.aggregate.all_reduce import AllReduceRule
from skein.numeric.aggregate.diloco import DiLoCoRule
from skein.numeric.aggregate.gossip import GossipRule
from skein.numeric.aggregate.lsgd import LsgdRule
from skein.numeric.aggregate.one_bit.adam import OneBitAdamRule
from skein.numeric.aggregate.one_bit.lamb import OneBitLambRule
from skein.numeric.aggregate.rule import Rule, Talk
from skein.numeric.compress.compressor import Form
from skein.numeric.gradients import digest, flatten, squared_norm
from skein.numeric.optim.optimizer import Optimizer
from skein.numeric.optim.optimizers import optimizer_of
from skein.numeric.walker import StateClass, Tensors, Walker
from tests.support.exchanges import led_by, owner_of, talks_by_row, talks_by_shard
from tests.support.walks import drawn, problem, terms_at

Talking = Literal["shards", "whole", "leader", "row"]
"""Shards with owners, one shard with an owner, a leader's parameters in pieces, or each its row of a ring."""
NUM_MEMBERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A rule under test.

    `num_steps` have several exchanges of every kind in them. `inner`: the optimizer that a member alone, or between two
    exchanges, steps exactly like; None where the rule has a step of its own. Without `has_exchanges` gradients are
    reduced, and there is nothing more to say.
    """

    name: str
    rule: AllReduceRule | OneBitAdamRule | OneBitLambRule | LsgdRule | GossipRule | DiLoCoRule
    walkers: Walkers
    talking: Talking = "shards"
    num_steps: int = 9
    inner: Optimizer | None = None
    has_exchanges: bool = True


_problem = cache(problem)
Shards = dict[int, Tensors]
Forms = dict[int, Form]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What one exchange has sent and come to, copies of both as they were made, and digests of what members joined."""

    talks: tuple[Talk, ...]
    sent: tuple[Shards, ...]
    results: Shards
    as_sent: tuple[Shards, ...]
    as_made: Shards
    forms: tuple[tuple[Forms, Forms], ...]
    """What each member says that parts and results look like, by shard."""
    joined: list[str] = field(default_factory=list)

    def heard(self, talk: Talk) -> Shards:
        """The results that a member gets."""
        return {talk.me: self.results[talk.me]} if talk.is_by_row else self.results


@dataclass(slots=True, kw_only=True)
class Flock:
    """Members under one rule, each before a problem of its own; what waits for its step to be applied is in flight."""

    row: Row
    members: list[Walker]
    problems: list[int]
    step: int = 0
    in_flight: list[tuple[int, list[int], Exchanged]] = field(default_factory=list)

    def run(self, num_steps: int) -> list[Exchanged]:
        """Makes so many steps, each on copies that become the members when it is done."""
        found: list[Exchanged] = []
        for _ in range(num_steps):
            self.members, exchanged = self.attempt()
            found += exchanged
            self.step += 1
        return found

    def attempt(self, all_grads: Sequence[Tensors] = ()) -> tuple[list[Walker], list[Exchanged]]:
        """The members after the next step, and its exchanges; the flock's own stay as they are."""
        rule, terms = self.row.rule, terms_at(self.step)
        after, dues = [walker.copy() for walker in self.members], rule.spec.due(self.step)
        for walker, grads in zip(after, all_grads or self.grads(), strict=True):
            rule.local_step(walker, grads, terms, talks=any(due.overlap_steps == 0 for due in dues))
        found = []
        for due in dues:
            for places in self._groups(due):
                exchanged = take(rule, [after[i] for i in places], self._talks(due, places))
                self.in_flight.append((self.step + due.overlap_steps, places, exchanged))
                found.append(exchanged)
        for _, places, exchanged in (x for x in self.in_flight if x[0] == self.step):
            for place, talk in zip(places, exchanged.talks, strict=True):
                joined = rule.join(after[place], talk, exchanged.heard(talk))
                exchanged.joined.append(digest(joined))
                rule.apply(after[place], talk, joined, terms)
        self.in_flight = [x for x in self.in_flight if x[0] > self.step]
        return after, found

    def grads(self) -> list[Tensors]:
        """Each member's own; where one walker has no exchange to come, their sum, as after a reduction."""
        own = [
            _problem(seed).grads(walker.params)
            for seed, walker in zip(self.problems, self.members, strict=True)
        ]
        if self.row.rule.spec.due(self.step) or self.row.walkers is Walkers.MANY:
            return own
        total = {name: torch.stack([grads[name] for grads in own]).sum(dim=0) for name in own[0]}
        return [total] * len(own)

    def leave(self, place: int) -> None:
        """One member goes without a word."""
        before = len(self.members)
        places = [i for i in range(before) if i != place]
        self.members, self.problems = [self.members[i] for i in places], [self.problems[i] for i in places]
        for me, walker in zip(places, self.members, strict=True):
            self.row.rule.on_membership(walker, before=before, after=before - 1, me=me)

    def join(self) -> None:
        """A newcomer gets from the first member what slots say is copied, and begins the rest anew."""
        before = len(self.members)
        newcomer = _kept(
            self.row.rule, self.members[0], [n for n, s in self.row.rule.slots.items() if s.is_copied]
        )
        for slot, tensors in newcomer.state.items():
            if slot in self.row.rule.slots and self.row.rule.slots[slot].kind is StateClass.SHARD:
                tensors.clear()
        for me, walker in enumerate(self.members):
            self.row.rule.on_membership(walker, before=before, after=before + 1, me=me)
        self.row.rule.on_membership(newcomer, before=before, after=before + 1, me=None)
        self.members.append(newcomer)
        self.problems.append(max(self.problems) + 1)

    def resumed(self) -> "Flock":
        """As after everybody's restart, from what slots say is saved."""
        saved = [name for name, slot in self.row.rule.slots.items() if slot.is_saved]
        members = [_kept(self.row.rule, walker, saved) for walker in self.members]
        return Flock(row=self.row, members=members, problems=list(self.problems), step=self.step)

    def copy(self) -> "Flock":
        """The same flock, to go on with apart."""
        members = [walker.copy() for walker in self.members]
        return replace(self, members=members, problems=list(self.problems), in_flight=list(self.in_flight))

    def settle(self) -> None:
        """Steps until nothing is in flight: what is, is of the membership it began with."""
        while self.in_flight:
            self.run(1)

    def _groups(self, due: Due) -> list[list[int]]:
        """Who talks with whom: all, or neighbours in order, two by two."""
        n = len(self.members)
        size = 2 if due.reach is Reach.GROUP else n
        return [list(range(first, min(first + size, n))) for first in range(0, n, size)]

    def _talks(self, due: Due, places: Sequence[int]) -> list[Talk]:
        n = len(places)
        match self.row.talking:
            case "shards":
                return talks_by_shard(due, num_members=n, num_shards=n)
            case "whole":
                return talks_by_shard(due, num_members=n, num_shards=1)
            case "row":
                return talks_by_row(due, ring(n))
            case "leader":
                lengths = [squared_norm(flatten(self.members[i].params)) for i in places]
                talks = talks_by_shard(due, num_members=n, num_shards=3)
                return [led_by(talk, lengths.index(min(lengths))) for talk in talks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What a flock was after each number of steps, none included, and all that it exchanged; laws read it."""

    row: Row
    after: Sequence[Flock]
    exchanged: Sequence[Exchanged]

    def settled(self) -> Flock:
        """The flock of the end, to go on with, when nothing is in flight."""
        some = self.after[-1].copy()
        some.settle()
        return some


def life_of(row: Row) -> Life:
    """A flock's whole life, once."""
    some = flock(row)
    after, exchanged = [some.copy()], []
    for _ in range(row.num_steps):
        exchanged += some.run(1)
        after.append(some.copy())
    return Life(row=row, after=after, exchanged=exchanged)


def take(rule: Rule, walkers: Sequence[Walker], talks: Sequence[Talk]) -> Exchanged:
    """All parts, and the result of each shard."""
    sent = tuple(rule.contribution(walker, talk) for walker, talk in zip(walkers, talks, strict=True))
    as_sent = tuple(_copied(shards) for shards in sent)
    results = {}
    for shard in range(talks[0].num_shards):
        owner = owner_of(talks[0], shard)
        parts = [sent[member][shard] for member, _ in talks[owner].weights[shard]]
        results[shard] = rule.combine(walkers[owner], talks[owner], shard, parts)
    forms = tuple(
        (_forms(rule, walker, talk, is_result=False), _forms(rule, walker, talk, is_result=True))
        for walker, talk in zip(walkers, talks, strict=True)
    )
    return Exchanged(
        talks=tuple(talks),
        sent=sent,
        results=results,
        as_sent=as_sent,
        as_made=_copied(results),
        forms=forms,
    )


def _forms(rule: Rule, walker: Walker, talk: Talk, *, is_result: bool) -> Forms:
    return {
        shard: dict(rule.form(walker, talk, shard, is_result=is_result)) for shard in range(talk.num_shards)
    }


def _copied(shards: Shards) -> Shards:
    return {shard: {name: x.clone() for name, x in tensors.items()} for shard, tensors in shards.items()}


def ring(n: int) -> list[list[float]]:
    """Metropolis weights: equal ones on oneself and the one or two neighbours."""
    rows = [[0.0] * n for _ in range(n)]
    for i in range(n):
        near = {(i - 1) % n, i, (i + 1) % n}
        for j in near:
            rows[i][j] = 1.0 / len(near)
    return rows


def flock(row: Row, num_members: int = NUM_MEMBERS) -> Flock:
    """Members at one point, before problems that differ."""
    return Flock(
        row=row,
        members=[
            Walker(params=params, state=row.rule.init(params))
            for params in (drawn(99) for _ in range(num_members))
        ],
        problems=list(range(num_members)),
    )


def _kept(rule: Rule, walker: Walker, slots: Sequence[str]) -> Walker:
    """A walker with copies of these slots, and all others as `init` makes them."""
    copied = walker.copy()
    state = rule.init(copied.params) | {slot: copied.state[slot] for slot in slots if slot in copied.state}
    return Walker(params=copied.params, state=state, num_updates=copied.num_updates)


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether names, dtypes and every element agree."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def same_walkers(left: Sequence[Walker], right: Sequence[Walker]) -> bool:
    """Whether parameters, state and the number of updates agree, member by member."""
    return len(left) == len(right) and all(
        a.num_updates == b.num_updates
        and same_bits(a.params, b.params)
        and {s for s, x in a.state.items() if x} == {s for s, x in b.state.items() if x}
        and all(same_bits(tensors, b.state[slot]) for slot, tensors in a.state.items() if tensors)
        for a, b in zip(left, right, strict=True)
    )


# --- the table ---

PLAIN_SGD = SgdSpec(name="sgd", momentum=0.0)
SGD = SgdSpec(name="sgd", momentum=0.9, weight_decay=0.01)
ADAMW = AdamWSpec()
LAMB = LambSpec(name="lamb")


def diloco(name: str, robust: RobustSpec | None = None, **settings: float | str) -> Row:
    spec = DiLoCo.model_validate({"rule": "diloco", "local_steps": 3, **settings})
    if robust is not None:
        spec = spec.model_copy(update={"robust": robust})
    inner = optimizer_of(ADAMW)
    return Row(
        name=f"diloco {name}",
        rule=DiLoCoRule(spec=spec, optimizer=inner),
        walkers=Walkers.MANY,
        talking="whole" if isinstance(robust, Krum | CentredClip) else "shards",
        inner=inner,
    )


def lsgd(name: str, optimizer: OptimizerSpec, *, groups: str) -> Row:
    spec = Lsgd.model_validate(
        {"rule": "lsgd", "local_every_steps": 2, "global_every_steps": 4, "groups": groups}
    )
    inner = optimizer_of(optimizer)
    return Row(
        name=f"lsgd {name}",
        rule=LsgdRule(spec=spec, optimizer=inner),
        walkers=Walkers.MANY,
        talking="leader",
        num_steps=12,
        inner=inner,
    )


def gossip(name: str, optimizer: GossipOptimizer, **settings: str | int) -> Row:
    spec = Gossip.model_validate({"rule": "gossip", **settings})
    rule = GossipRule(spec=spec, optimizer=optimizer)
    return Row(name=f"gossip {name}", rule=rule, walkers=Walkers.MANY, talking="row")


def all_reduce(name: str, robust: RobustSpec | None = None, *, wire: str = "fp32") -> Row:
    spec = AllReduce.model_validate({"rule": "all_reduce", "wire": wire})
    if robust is not None:
        spec = spec.model_copy(update={"robust": robust})
    inner = optimizer_of(ADAMW)
    return Row(
        name=f"all-reduce {name}",
        rule=AllReduceRule(spec=spec, optimizer=inner),
        walkers=Walkers.ONE,
        talking="whole" if isinstance(robust, Krum | CentredClip) else "shards",
        inner=inner,
        has_exchanges=bool(spec.due(0)),
    )


ROWS = (
    all_reduce("fp32"),
    all_reduce("bf16", wire="bf16"),
    all_reduce("int8", wire="int8"),
    all_reduce("clipped", NormClip(kind="median_norm_clip")),
    all_reduce("krum", Krum(kind="krum", bad=1)),
    Row(
        name="one-bit adam",
        rule=OneBitAdamRule(spec=OneBitAdamSpec(rule="one_bit_adam", warmup_steps=4), optimizer=ADAMW),
        walkers=Walkers.ONE,
    ),
    Row(
        name="one-bit lamb",
        rule=OneBitLambRule(spec=OneBitLambSpec(rule="one_bit_lamb", warmup_steps=4), optimizer=LAMB),
        walkers=Walkers.ONE,
    ),
    gossip("decentlam", SGD),
    gossip("dsgd", PLAIN_SGD, method="dsgd"),
    gossip("dmsgd", SGD, method="dmsgd"),
    gossip("da_dmsgd", SGD, method="da_dmsgd"),
    gossip("qg_dmsgd every other step", SGD, method="qg_dmsgd", every_steps=2),
    gossip("decentlam with adamw", ADAMW),
    gossip("decentlam with lamb", LAMB),
    lsgd("in groups", SGD, groups="sites"),
    lsgd("of all", ADAMW, groups="all"),
    lsgd("with lamb", LAMB, groups="sites"),
    diloco("fp32", wire="fp32"),
    diloco("int8", wire="int8"),
    diloco("int4 in fragments", wire="int4", fragments=3),
    diloco("int2 overlapped", wire="int2", overlap_steps=2, mix=0.5),
    diloco("clipped", NormClip(kind="median_norm_clip")),
    diloco("trimmed", TrimmedMean(kind="trimmed_mean", trimmed=1)),
    diloco("krum", Krum(kind="krum", bad=1)),
    diloco("clipped around its centre", CentredClip(kind="centred_clip")),
)
