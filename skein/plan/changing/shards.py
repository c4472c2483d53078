"""Shards of the vocabulary in a plan: which stages they are, and clauses about who holds which rows of each end."""

from collections.abc import Iterator, Mapping, Sequence

from skein.model.layers import AnyModel
from skein.model.parameters import stage_shapes
from skein.model.rows import parse_block
from skein.plan.changing.clauses import Clause
from skein.plan.plan import Plan
from skein.types import StageIndex, StageSpec

_MOST_TOLD = 8


def shard_clauses(model: AnyModel, plan: Plan) -> Iterator[Clause]:
    """Clauses of the ends of `plan` that are in shards, the input first; none for a vocabulary in one piece."""
    for end, stages in _ends(model, plan.stages).items():
        held = [
            f"{rows} on {' and '.join(plan.holders(x.index))}" for x in stages if (rows := _rows(model, x))
        ]
        if len(held) > 1:
            more = f" and {len(held) - _MOST_TOLD} more" if len(held) > _MOST_TOLD else ""
            yield Clause(f"rows of the {end}: {', '.join(held[:_MOST_TOLD])}{more}")


def shard_stages(model: AnyModel, stages: Sequence[StageSpec]) -> frozenset[StageIndex]:
    """Stages that hold rows of an end which several of `stages` share."""
    ends = _ends(model, stages).values()
    return frozenset(stage.index for held in ends if len(held) > 1 for stage in held)


def _ends(model: AnyModel, stages: Sequence[StageSpec]) -> Mapping[str, list[StageSpec]]:
    """Stages that hold nothing but the rows of an end, or a part of them."""
    inner = model.inner_layers
    return {
        "input": [stage for stage in stages if stage.stop <= inner.start],
        "output": [stage for stage in stages if stage.first > inner.stop],
    }


def _rows(model: AnyModel, stage: StageSpec) -> str:
    """First and last row of a stage's blocks; empty where it has none."""
    blocks = [block for name in stage_shapes(model, stage) if (block := parse_block(name)) is not None]
    return f"{blocks[0].rows.start} to {blocks[-1].rows.stop - 1}" if blocks else ""
