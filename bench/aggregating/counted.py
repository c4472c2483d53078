"""An exchange among walkers in one process, and what it weighs: the tensors that would cross a network."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from skein.config.aggregation import Due
from skein.numeric.aggregate.exchange import owner_of, talks_by_shard
from skein.numeric.aggregate.rule import Rule, Terms
from skein.numeric.walker import Walker


def exchanged(
    rule: Rule, walkers: Sequence[Walker], grads: Sequence[Mapping[str, Tensor]], terms: Terms, due: Due
) -> float:
    """A step of all `walkers`, in place, with a shard for each; bytes that one of them sends on average.

    Parts go to the owners of their shards, results to all others; what stays at home weighs nothing.
    """
    talks = talks_by_shard(due, num_members=len(walkers), num_shards=len(walkers))
    for walker, grad in zip(walkers, grads, strict=True):
        rule.local_step(walker, grad, terms, talks=True)
    sent = [rule.contribution(walker, talk) for walker, talk in zip(walkers, talks, strict=True)]
    results, total = {}, 0
    for shard in range(len(walkers)):
        owner = owner_of(talks[0], shard)
        parts = [part[shard] for part in sent]
        results[shard] = rule.combine(walkers[owner], talks[owner], shard, parts)
        total += sum(num_bytes(part) for peer, part in enumerate(parts) if peer != owner)
        total += (len(walkers) - 1) * num_bytes(results[shard])
    for walker, talk in zip(walkers, talks, strict=True):
        rule.apply(walker, talk, rule.join(walker, talk, results), terms)
    return total / len(walkers)


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """What these weigh, without names and shapes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
