"""Groups of a plan by what each reduces: which stages are in it, and which of their parameters; and who keeps these.

Rules of this file
- A parameter of a stage is reduced in one group: the one that takes it, or else the stage's own.
- A worker has a parameter once, whatever stages of its it is in: the first of them keeps it.
- All others ask here, so a new kind of group is a class in `skein.types` and a case here.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

from skein.model.layers import AnyModel, num_elements
from skein.model.parameters import stage_shapes
from skein.model.rows import VocabularySplit
from skein.types import Exchanged, GroupId, Local, Own, StageIndex, StageSpec, Tied


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """Stages whose holders are in one group, and how much of each of them it reduces."""

    stages: tuple[StageIndex, ...]
    num_parameters: int
    num_tensors: int


def names_by_group(
    groups: Iterable[GroupId], stage: StageIndex, held: Sequence[str], layers: Sequence[Collection[str]]
) -> dict[GroupId, tuple[str, ...]]:
    """Parameters of a stage by the group that reduces them, in the order of `held`; its own group is always there.

    Args:
        groups: those of the plan; some take nothing of the stage.
        stage: in question.
        held: names of the stage's parameters.
        layers: names of the parameters of each of the model's layers.

    >>> names_by_group([Own(StageIndex(1)), Tied()], StageIndex(1), ["b", "e"], [["e"], ["b"], ["e"]])
    {Own(stage=1): ('b',), Tied(first=None, stop=None): ('e',)}
    """
    own = Own(stage)
    group_by_name = {name: group for group in groups for name in _taken(group, layers)}
    found: dict[GroupId, tuple[str, ...]] = {own: ()}
    for name in held:
        group = group_by_name.get(name, own)
        found[group] = (*found.get(group, ()), name)
    return found


def keepers_of(names: Mapping[StageIndex, Collection[str]]) -> dict[StageIndex, dict[str, StageIndex]]:
    """For each stage of a worker the parameters that an earlier one keeps, with the stage that does.

    >>> keepers_of({StageIndex(2): ["n", "e"], StageIndex(0): ["e", "b"]})
    {0: {}, 2: {'e': 0}}
    """
    keepers: dict[str, StageIndex] = {}
    kept: dict[StageIndex, dict[str, StageIndex]] = {}
    for stage in sorted(names):
        kept[stage] = {name: keepers[name] for name in names[stage] if name in keepers}
        keepers = dict.fromkeys(names[stage], stage) | keepers
    return kept


@lru_cache(maxsize=64)
def reduced_by_group(model: AnyModel, stages: tuple[StageSpec, ...]) -> dict[GroupId, Reduced]:
    """Groups of a plan with these stages, those of one stage first, with what each reduces."""
    layers = model.layer_parameters()
    planned: list[GroupId] = [Own(stage.index) for stage in stages]
    if model.vocabulary_split is not VocabularySplit.OFF:
        ends = (stage for stage in stages if stage.stop > model.inner_layers.stop + 1)
        planned += [Tied(first=stage.first, stop=stage.stop) for stage in ends]
    elif len(stages) > 1:
        planned.append(Tied())
    found: dict[GroupId, Reduced] = {}
    for stage in stages:
        shapes = stage_shapes(model, stage)
        for group, names in names_by_group(planned, stage.index, [*shapes], layers).items():
            before = found[group].stages if group in found else ()
            found[group] = Reduced(
                stages=(*before, stage.index),
                num_parameters=num_elements({name: shapes[name] for name in names}),
                num_tensors=len(names),
            )
    return {group: found[group] for group in planned if group in found}


def _taken(group: GroupId, layers: Sequence[Collection[str]]) -> Collection[str]:
    """Names of the parameters that a group takes from the own groups of the stages that hold them."""
    match group:
        case Tied(first=first, stop=stop):
            ahead = layers[: len(layers) - 1 if first is None else first]
            return (
                set().union(*layers[first:stop] if stop else layers[-1:]).intersection(*[set().union(*ahead)])
            )
        case Own() | Local() | Exchanged():
            return ()
        case _:
            assert_never(group)
