"""Kinds of what workers send each other, by where in the model it is sent from."""

from collections.abc import Mapping
from enum import StrEnum

from skein.model.layers import AnyModel
from skein.model.rows import VocabularySplit
from skein.plan.ops import Direction
from skein.types import StageSpec


class TrafficKind(StrEnum):
    """Kind of what workers send each other in a step.

    ROWS are of the input, on their way from their owners or, as gradients, back; VOCABULARY_OUT and _BACK activations
    to shards of the output and gradients from them; EDGE any other boundary tensor; REDUCTION shards of sums.
    """

    EDGE = "edge"
    ROWS = "rows"
    VOCABULARY_OUT = "vocabulary_out"
    VOCABULARY_BACK = "vocabulary_back"
    REDUCTION = "reduction"


def traffic_of(model: AnyModel, stage: StageSpec) -> Mapping[Direction, TrafficKind]:
    """Kind of the boundary tensors that a holder of `stage` sends each way."""
    inner, is_cut = model.inner_layers, model.vocabulary_split
    there = back = TrafficKind.EDGE
    if is_cut is not VocabularySplit.OFF and stage.stop > inner.stop:
        there = TrafficKind.VOCABULARY_OUT
    if is_cut is not VocabularySplit.OFF and stage.first > inner.stop:
        back = TrafficKind.VOCABULARY_BACK
    if is_cut is VocabularySplit.BOTH and stage.stop <= inner.start:
        there = TrafficKind.ROWS
    if is_cut is VocabularySplit.BOTH and stage.first <= inner.start:
        back = TrafficKind.ROWS
    return {Direction.FORWARD: there, Direction.BACKWARD: back}
