"""Exchanges among walkers that are all in one process: what workers do over the network, in the same calls.

`take` and `put` are the two halves of one that is applied at the end of that step or a later one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from skein.config.rule import Due
from skein.numeric.aggregate.rule import Rule, Talk, Terms
from skein.numeric.walker import Tensors, Walker

Weights = tuple[tuple[int, float], ...]


def talks_by_shard(due: Due, *, num_members: int, num_shards: int, weights: Weights = ()) -> list[Talk]:
    """Each member's view of an exchange whose shards have owners and whose results everybody gets.

    `weights` are those of the members in every shard; by default equal, and 1 together.
    """
    row = weights or tuple((member, 1.0 / num_members) for member in range(num_members))
    return [
        Talk(due=due, num_members=num_members, me=me, num_shards=num_shards, weights=(row,) * num_shards)
        for me in range(num_members)
    ]


def talks_by_row(due: Due, rows: Sequence[Sequence[float]]) -> list[Talk]:
    """Each member's view of an exchange with neighbours: `rows[i][j]` is the weight that i puts on what j sends."""
    weights = tuple(tuple((j, w) for j, w in enumerate(row) if w) for row in rows)
    n = len(rows)
    return [Talk(due=due, num_members=n, me=me, num_shards=n, weights=weights) for me in range(n)]


def led_by(talk: Talk, leader: int) -> Talk:
    """`talk` with a leader: whoever owns a shard takes the leader's part and nobody else's.

    Raises:
        ValueError: the leader is not among the members.
    """
    if not 0 <= leader < talk.num_members:
        raise ValueError(f"leader {leader} is not one of {talk.num_members} members")
    return replace(talk, leader=leader, weights=(((leader, 1.0),),) * talk.num_shards)


def owner_of(talk: Talk, shard: int) -> int:
    """Who combines a shard."""
    return shard % talk.num_members


def exchange(
    rule: Rule,
    walkers: Sequence[Walker],
    grads: Sequence[Mapping[str, Tensor]],
    terms: Sequence[Terms],
    talks: Sequence[Talk],
) -> list[Walker]:
    """The walkers after a step that ends with this exchange; `walkers` stay as they are.

    Whoever combines for itself alone gets its own shard back, else everybody gets all of them.
    """
    after = [walker.copy() for walker in walkers]
    for walker, grad, own in zip(after, grads, terms, strict=True):
        rule.local_step(walker, grad, own, talks=True)
    sent = [rule.contribution(walker, talk) for walker, talk in zip(after, talks, strict=True)]
    results: dict[int, Tensors] = {}
    for shard in range(talks[0].num_shards):
        owner = owner_of(talks[0], shard)
        parts = [sent[member][shard] for member, _ in talks[owner].weights[shard]]
        results[shard] = rule.combine(after[owner], talks[owner], shard, parts)
    for walker, talk, own in zip(after, talks, terms, strict=True):
        mine = {talk.me: results[talk.me]} if talk.is_by_row else results
        rule.apply(walker, talk, rule.join(walker, talk, mine), own)
    return after


# --- in two halves ---


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Results that nobody has applied yet, and what members have sent for them: `sent[member][shard]`."""

    talks: tuple[Talk, ...]
    sent: tuple[Mapping[int, Tensors], ...]
    results: Mapping[int, Tensors]

    @property
    def num_bytes(self) -> int:
        """What has crossed a network: parts to owners, results to all others; one's own part stays where it is."""
        num_members = self.talks[0].num_members
        up = sum(
            bytes_of(tensors)
            for member, parts in enumerate(self.sent)
            for shard, tensors in parts.items()
            if owner_of(self.talks[0], shard) != member
        )
        return up + (num_members - 1) * sum(map(bytes_of, self.results.values()))


def bytes_of(tensors: Tensors) -> int:
    """Weight of the tensors' elements as they travel, without headers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def take(rule: Rule, walkers: Sequence[Walker], talks: Sequence[Talk]) -> InFlight:
    """Asks all for their parts and the owners for the results; `walkers` keep what waits for `put`, in place."""
    sent = [rule.contribution(walker, talk) for walker, talk in zip(walkers, talks, strict=True)]
    results: dict[int, Tensors] = {}
    for shard in range(talks[0].num_shards):
        owner = owner_of(talks[0], shard)
        parts = [sent[member][shard] for member, _ in talks[owner].weights[shard]]
        results[shard] = rule.combine(walkers[owner], talks[owner], shard, parts)
    return InFlight(talks=tuple(talks), sent=tuple(sent), results=results)


def put(rule: Rule, walkers: Sequence[Walker], exchange: InFlight, terms: Sequence[Terms]) -> None:
    """Applies the results to all walkers, in place."""
    for walker, talk, own in zip(walkers, exchange.talks, terms, strict=True):
        rule.apply(walker, talk, rule.join(walker, talk, exchange.results), own)
