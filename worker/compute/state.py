"""A walker's tensors under the names by which they travel and are saved: `<name>`, `<slot>.<name>` and `STEP`.

Rules of this file
- Which slots there are, and what they hold, the optimizer says; no slot is known here by name.
- What a slot does not want copied, or saved, begins anew wherever the state is taken over.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.config.job import JobSpec
from skein.config.rule import Walkers
from skein.errors import LocalError
from skein.model.parameters import stage_shapes
from skein.numeric.aggregate.rule import Rule
from skein.numeric.aggregate.rules import rule_of
from skein.numeric.walker import Slot, StateClass, Tensors, Walker
from skein.protocol.log.records import walker_prefix
from skein.types import Generation, JobId, StageIndex, StageSpec, Step
from worker.model.base import parameter_dtype

STEP = "step"
"""Under this name the count of updates travels with the tensors of a chunk's state."""
FATE = "fate"
"""Under this name the state of an array's row says how often it was put back, and the number of why it is retired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A chunk's state at one version, copied for a checkpoint that `generation` asked for."""

    job_id: JobId
    generation: Generation
    version: Step
    stage: StageIndex
    walker: int
    url: str | None
    params: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    """All else."""


def copied(slots: Mapping[str, Slot]) -> frozenset[str]:
    """Slots that a newcomer gets a copy of."""
    return frozenset(name for name, slot in slots.items() if slot.is_copied)


def saved(slots: Mapping[str, Slot], walkers: Walkers = Walkers.ONE) -> frozenset[str]:
    """Slots that a checkpoint has.

    Of one walker that is what all can begin with, for one holder saves it. Each of many saves its own and goes on with
    it; but who sums which shard may be another then.
    """
    return frozenset(
        name
        for name, slot in slots.items()
        if slot.is_saved
        and (slot.is_copied or (not walkers.have_equal_holders and slot.kind is not StateClass.SHARD))
    )


def named_tensors(walker: Walker, slots: Collection[str]) -> dict[str, Tensor]:
    """The walker's own tensors by name: parameters, those of `slots`, and a count of its updates."""
    num_updates = torch.tensor(walker.num_updates, dtype=torch.int64)
    return {**walker.params, **by_name(walker.state, slots), STEP: num_updates}


def by_name(state: Mapping[str, Tensors], slots: Collection[str]) -> dict[str, Tensor]:
    """The tensors of `slots`.

    >>> sorted(by_name({"mean": {"a": torch.ones(1), "b": torch.ones(1)}, "other": {}}, {"mean"}))
    ['mean.a', 'mean.b']
    """
    return {
        f"{slot}.{name}": tensor for slot in sorted(slots) for name, tensor in state.get(slot, {}).items()
    }


def walker_from(state: Mapping[str, Tensor], rule: Rule) -> Walker:
    """The walker whose tensors `named_tensors` gave; slots that it left out begin anew. No tensor is copied.

    Raises:
        LocalError: the state says not how many updates were made.
    """
    if STEP not in state:
        raise LocalError("the state says not how many updates were made")
    slots = rule.slots
    params: Tensors = {}
    by_slot: dict[str, Tensors] = {slot: {} for slot in slots}
    for name in sorted(state.keys() - {STEP}):
        slot, _, inner = name.partition(".")
        if slot in by_slot:
            by_slot[slot][inner] = state[name]
        else:
            params[name] = state[name]
    left_out = slots.keys() - copied(slots)
    if left_out:
        fresh = rule.init(params)
        by_slot |= {slot: fresh[slot] for slot in left_out if not by_slot[slot]}
    return Walker(params=params, state=by_slot, num_updates=int(state[STEP]))


# --- without a walker ---


def state_names(job: JobSpec, stage: StageSpec) -> frozenset[str]:
    """Names of all tensors that a holder of `stage` gives to another."""
    return frozenset(_given(job, stage))


def saved_names(job: JobSpec, stages: Iterable[StageSpec], walkers: Walkers = Walkers.ONE) -> frozenset[str]:
    """Names of all tensors that a checkpoint has of `stages`; of one of `MANY` walkers, its own included.

    Of an array they are those of one row.
    """
    slots = saved(rule_of(job.aggregation, job.optimizer).slots, walkers)
    return frozenset[str]().union(*(_drafted(job, stage, slots) for stage in stages))


def state_sizes(job: JobSpec, stage: StageSpec) -> dict[str, int]:
    """Bytes of each tensor that a holder of `stage` gives to another, by name."""
    return _given(job, stage)


def _given(job: JobSpec, stage: StageSpec) -> dict[str, int]:
    """Bytes of tensors as a holder gives them to another: of an array, those of each row."""
    drafted = _drafted(job, stage, copied(rule_of(job.aggregation, job.optimizer).slots))
    if not job.rows:
        return drafted
    return {f"{walker_prefix(row)}{x}": size for row in range(len(job.rows)) for x, size in drafted.items()}


def _drafted(job: JobSpec, stage: StageSpec, slots: Collection[str]) -> dict[str, int]:
    """Bytes of the state of `stage`, by name.

    What there is of it the rule says of parameters without memory: a dim of 0 is before their own. On torch's device
    for that, `meta`, the first zeros make torch import for seconds, and whoever asks is the event loop.
    """
    dtype, rule = parameter_dtype(job.precision), rule_of(job.aggregation, job.optimizer)
    params = {
        name: torch.empty((0, *shape), dtype=dtype) for name, shape in stage_shapes(job.model, stage).items()
    }
    tensors = named_tensors(Walker(params=params, state=rule.init(params)), slots)
    drafted = {name: _full_bytes(tensor) for name, tensor in tensors.items()}
    return {**drafted, FATE: 2 * torch.int64.itemsize} if job.rows else drafted


def _full_bytes(tensor: Tensor) -> int:
    """Bytes of what this is a draft of."""
    sizes = tensor.shape[1:] if tensor.shape[:1] == (0,) else tensor.shape
    return math.prod(sizes) * tensor.dtype.itemsize
