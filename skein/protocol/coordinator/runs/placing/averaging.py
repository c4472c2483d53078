"""Stages that nobody holds any more, made of those beside them, for jobs that would rather have that than go back.

Source: Blagoev, Ersoy and Chen, "All is Not Lost: LLM Recovery without Checkpoints", arXiv 2506.15461, CheckFree: a
lost stage becomes the average of the stages before and after it, each with the squared norm of its last gradient as
its weight. Only a stage with both neighbours can be made so, and the optimizer begins anew on it. The paper's way to
make the first and the last stage (CheckFree+) asks for swapped stages all the time, and is not here; nor is its higher
learning rate after a loss: a step has one learning rate for all stages, and it follows from the step alone.
"""

from collections.abc import Collection, Mapping, Sequence
from math import inf

from skein.model.neighbours import counterparts
from skein.protocol.log.history import JobHistory
from skein.protocol.messages.directives import StepRecord
from skein.types import Own, StageIndex, StageSpec

Beside = tuple[tuple[StageSpec, float], tuple[StageSpec, float]]
"""The stages before and after a lost one, each with its weight."""


def besides(
    job: JobHistory, stages: Sequence[StageSpec], held: Collection[StageSpec]
) -> Mapping[StageSpec, Beside]:
    """Neighbours that each stage is made of that is not `held`; empty if one of those stages cannot be made so.

    Args:
        job: allows averages or not; its last step tells what neighbours weigh.
        stages: all of the model, in order.
        held: those of them that some worker has.
    """
    if not job.spec.backup.neighbour_average:
        return {}
    lost = [at for at, stage in enumerate(stages) if stage not in held]
    found: dict[StageSpec, Beside] = {}
    for at in lost:
        beside = (*stages[at - 1 : at], *stages[at + 1 : at + 2])
        are_alike = (x in held and counterparts(job.spec.model, stages[at], x) is not None for x in beside)
        if len(beside) < 2 or not all(are_alike):
            return {}
        before, after = beside
        weights = (
            own_squared_norm(job.last_commit, before.index),
            own_squared_norm(job.last_commit, after.index),
        )
        if not all(0.0 < weight < inf for weight in weights):
            weights = 1.0, 1.0  # Nothing is known of one of them: both count the same.
        found[stages[at]] = (before, weights[0]), (after, weights[1])
    return found


def own_squared_norm(record: StepRecord | None, stage: StageIndex) -> float:
    """Squared norm of the mean gradient of what only `stage` has, before clipping; 0 if the step says nothing of it."""
    results = () if record is None else record.results
    return sum(x.squared_norm * x.weight * x.weight for x in results if x.group == Own(stage))
