"""A lost stage as the average of its neighbours: equal bytes and equal weights give equal bits on every holder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.config.job import JobSpec
from skein.errors import LocalError
from skein.model.neighbours import counterparts
from skein.numeric.aggregate.rules import rule_of
from skein.numeric.walker import Walker
from skein.types import StageSpec
from worker.compute.state import copied, named_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A stage beside the lost one: its tensors in host memory, by name, and its weight in the average."""

    stage: StageSpec
    weight: float
    tensors: Mapping[str, Tensor]


def names_wanted(job: JobSpec, stage: StageSpec, neighbour: StageSpec) -> frozenset[str]:
    """Names of the tensors of `neighbour` that the average for `stage` needs.

    Raises:
        LocalError: the two stages are not alike.
    """
    names = counterparts(job.model, stage, neighbour)
    if names is None:
        raise LocalError(f"{neighbour} is not like {stage}, which should be made of it")
    return frozenset(names.values())


@torch.no_grad()
def averaged_state(job: JobSpec, stage: StageSpec, sides: Sequence[Side]) -> dict[str, Tensor]:
    """The state of `stage`, each parameter p = sum of w_i p_i / sum of w_i over `sides`; the optimizer begins anew.

    Sums are in float64 and in the order of `sides`, then rounded to the parameter's type.

    Raises:
        LocalError: a side is not like `stage`, or lacks a tensor.

    Source: arXiv 2506.15461, CheckFree; moments and their count are zero, as in the authors' code.
    """
    total = sum(side.weight for side in sides)
    sums: dict[str, Tensor] = {}
    types: dict[str, torch.dtype] = {}
    for side in sides:
        names = counterparts(job.model, stage, side.stage)
        if names is None or not side.tensors.keys() >= set(names.values()):
            raise LocalError(f"{side.stage} does not have what {stage} should be made of")
        for name, other in names.items():
            given = side.tensors[other]
            part = given.to(torch.float64) * (side.weight / total)
            sums[name] = sums[name] + part if name in sums else part
            types[name] = given.dtype
    params = {name: summed.to(types[name]) for name, summed in sums.items()}
    rule = rule_of(job.aggregation, job.optimizer)
    return named_tensors(Walker(params=params, state=rule.init(params)), copied(rule.slots))
