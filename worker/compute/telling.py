"""Numbers by which an exchange tells of itself: what is still to be said, what it weighs, and how often they are told.

Rules of this file
- Functions here change nothing; each number is a pass over the parameters, so rules that talk in every step tell of one
  exchange in `EVERY`.
"""

import math
from collections.abc import Mapping

from skein.config.rule import Due
from skein.numeric.aggregate.rule import Rule, Talk
from skein.numeric.gradients import squared_norm
from skein.numeric.walker import Tensors, Walker

EVERY = 10


def is_told(rule: Rule, due: Due) -> bool:
    """Whether an exchange is one to tell of: every one of a rule that talks seldom."""
    return rule.talks_seldom or due.round % EVERY == 0


def residual_norm(rule: Rule, walker: Walker) -> float | None:
    """Norm of what a walker's own parts have rounded away and not yet said; None without error feedback."""
    slots = (walker.state[slot] for slot in rule.residuals if slot in walker.state)
    found = [tensor for slot in slots for tensor in slot.values()]
    return math.sqrt(math.fsum(squared_norm(tensor.flatten()) for tensor in found)) if found else None


def sent_bytes(sent: Mapping[int, Tensors], talk: Talk) -> int:
    """Bytes of one vector as it is sent: all its shards, or what one neighbour gets."""
    weights = [sum(x.numel() * x.element_size() for x in shard.values()) for shard in sent.values()]
    return max(weights, default=0) if talk.is_by_row else sum(weights)
