"""Aggregation rule that a job file asks for."""

from typing import assert_never

from skein.config import aggregation
from skein.config.optimizer import AdamWSpec, GossipOptimizer, LambSpec, OptimizerSpec
from skein.errors import UserError
from skein.numeric.aggregate.all_reduce import AllReduceRule
from skein.numeric.aggregate.diloco import DiLoCoRule
from skein.numeric.aggregate.gossip import GossipRule
from skein.numeric.aggregate.lsgd import LsgdRule
from skein.numeric.aggregate.one_bit.adam import OneBitAdamRule
from skein.numeric.aggregate.one_bit.lamb import OneBitLambRule
from skein.numeric.aggregate.rule import Rule
from skein.numeric.optim.optimizers import optimizer_of


def rule_of(spec: aggregation.AggregationSpec, optimizer: OptimizerSpec) -> Rule:
    """The rule that a job's `aggregation` and `optimizer` ask for together.

    Raises:
        UserError: they do not go together.
    """
    match spec:
        case aggregation.AllReduce():
            return AllReduceRule(spec=spec, optimizer=optimizer_of(optimizer))
        case aggregation.OneBitAdam():
            if not isinstance(optimizer, AdamWSpec):
                raise UserError("optimizer.name", optimizer.name, "one_bit_adam wants adamw")
            return OneBitAdamRule(spec=spec, optimizer=optimizer)
        case aggregation.OneBitLamb():
            if not isinstance(optimizer, LambSpec):
                raise UserError("optimizer.name", optimizer.name, "one_bit_lamb wants lamb")
            return OneBitLambRule(spec=spec, optimizer=optimizer)
        case aggregation.Lsgd():
            return LsgdRule(spec=spec, optimizer=optimizer_of(optimizer))
        case aggregation.Gossip():
            if not isinstance(optimizer, GossipOptimizer):
                raise UserError("optimizer.name", optimizer.name, "gossip wants adamw, sgd or lamb")
            return GossipRule(spec=spec, optimizer=optimizer)
        case aggregation.DiLoCo():
            return DiLoCoRule(spec=spec, optimizer=optimizer_of(optimizer))
        case _:
            assert_never(spec)
