"""What an exchange tells of itself: how far walkers are apart, and what is still to be said.

Rules of this file
- Nothing here changes anything; each number is a pass over the parameters, so rules that talk in every step tell of one
  exchange in `EVERY`.
"""

import math
from collections.abc import Mapping

from torch import Tensor

from skein.config.aggregation import AggregationSpec, DiLoCo, Gossip, Lsgd
from skein.config.rule import Due
from skein.numeric.aggregate import all_reduce, diloco, gossip, lsgd
from skein.numeric.aggregate.fragments import fragment_spans, gathered
from skein.numeric.aggregate.one_bit import freezing as one_bit
from skein.numeric.aggregate.rule import Talk
from skein.numeric.gradients import squared_norm, unflatten
from skein.numeric.walker import Tensors, Walker

EVERY = 10
_PARAMETERS = "y"
"""What gossip calls the parameters among what it sends."""
_RESIDUALS = frozenset({all_reduce.RESIDUAL, diloco.RESIDUAL, one_bit.ERROR})


def is_told(spec: AggregationSpec, due: Due) -> bool:
    """Whether an exchange is one to tell of: every one of a rule that talks seldom."""
    return isinstance(spec, DiLoCo | Lsgd) or due.round % EVERY == 0


def distance(spec: AggregationSpec, walker: Walker, due: Due, joined: Tensor) -> float | None:
    """How far a walker is from where an exchange draws it; None under rules of one walker.

    That is the mean of its neighbours and itself (gossip), of all walkers (DiLoCo, for the exchange's fragment), or the
    leader (LSGD).

    Args:
        spec: the rule.
        walker: as the exchange has it, before its result is applied.
        due: which exchange it is.
        joined: its result, as the rule's `join` gives it.
    """
    match spec:
        case Gossip():
            sent = walker.state[gossip.SENT]
            return _norm(sent[_PARAMETERS] - unflatten(joined, sent)[_PARAMETERS])
        case DiLoCo():
            spans = fragment_spans(walker.params, fragment=due.fragment, num_fragments=spec.fragments)
            changed = gathered(walker.state[diloco.GLOBAL], spans) - gathered(walker.params, spans)
            return _norm(changed - joined)
        case Lsgd():
            return _norm(walker.state[lsgd.START]["all"] - joined)
        case _:
            return None


def residual_norm(walker: Walker) -> float | None:
    """Norm of what a walker's own parts have rounded away and not yet said; None without error feedback."""
    found = [tensor for slot in _RESIDUALS & walker.state.keys() for tensor in walker.state[slot].values()]
    return math.sqrt(math.fsum(squared_norm(tensor.flatten()) for tensor in found)) if found else None


def sent_bytes(sent: Mapping[int, Tensors], talk: Talk) -> int:
    """What one vector weighs as it is sent: all its shards, or what one neighbour gets."""
    weights = [sum(x.numel() * x.element_size() for x in shard.values()) for shard in sent.values()]
    return max(weights, default=0) if talk.is_by_row else sum(weights)


def _norm(difference: Tensor) -> float:
    return math.sqrt(squared_norm(difference))
