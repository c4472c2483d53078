"""An exchange in memory in two halves: taken at the end of one step, applied at the end of that or a later one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skein.numeric.aggregate.exchanging.in_memory import owner_of
from skein.numeric.aggregate.rule import Rule, Talk, Terms
from skein.numeric.walker import Tensors, Walker


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
