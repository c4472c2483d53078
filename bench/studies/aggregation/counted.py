"""An exchange among walkers in one process, and what it weighs: the tensors that would cross a network."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from skein.config.rule import Due
from skein.numeric.aggregate.rule import Rule, Terms
from skein.numeric.walker import Walker
from tests.support.exchanges import put, take, talks_by_shard


def exchanged(
    rule: Rule, walkers: Sequence[Walker], grads: Sequence[Mapping[str, Tensor]], terms: Terms, due: Due
) -> float:
    """A step of all `walkers`, in place, with a shard for each; bytes that one of them sends on average."""
    talks = talks_by_shard(due, num_members=len(walkers), num_shards=len(walkers))
    for walker, grad in zip(walkers, grads, strict=True):
        rule.local_step(walker, grad, terms, talks=True)
    found = take(rule, walkers, talks)
    put(rule, walkers, found, [terms] * len(walkers))
    return found.num_bytes / len(walkers)
