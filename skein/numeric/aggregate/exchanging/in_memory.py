"""An exchange among walkers that are all in one process: what workers do over the network, in the same calls."""

from collections.abc import Mapping, Sequence

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
