"""Copies of chunks in host memory for peers, and what was applied since; and how such a copy is brought up to date.

Rules of this file
- Snapshots change on the torch thread alone. What is given out is never written to again, so any thread may read it.
- A large chunk is copied in pieces between ops, and whatever is left of it before an update.
- Memory has a limit: what does not fit is dropped or not taken, the oldest first, and peers hear that it is not here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from skein.errors import LocalError
from skein.model.layers import AnyModel
from skein.model.reduced import names_by_group
from skein.numeric.aggregate.rule import Rule
from skein.numeric.gradients import unflatten
from skein.protocol.messages.directives import ChunkVersion, StepRecord
from skein.protocol.worker.keeping.snapshots import SnapshotTerm, changes, outlived
from skein.protocol.worker.ops import SnapshotOp
from skein.types import Generation, GroupId, JobId, Own, StageIndex, StageSpec, Step
from worker.bundle import WireTensor, to_wire
from worker.compute.chunk import Chunk, update
from worker.compute.state import copied, named_tensors, walker_from

PIECE_BYTES = 64 << 20
"""Copied at once: raise it if snapshots of large chunks take too many ops to be complete."""


@dataclass(slots=True, kw_only=True)
class _Snapshot(SnapshotTerm):
    """`results` are what steps from its version on applied, by group."""

    job: JobId
    left: list[tuple[str, Tensor]]
    tensors: dict[str, WireTensor] = field(default_factory=dict)
    results: dict[Step, dict[str, WireTensor]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that are here or still to be copied, results included."""
        results = sum(len(tensor.data) for result in self.results.values() for tensor in result.values())
        here = sum(len(tensor.data) for tensor in self.tensors.values())
        return here + results + sum(tensor.nbytes for _, tensor in self.left)

    def copy(self, num_bytes: int | None) -> None:
        """Copy at least so many bytes; None: all that is left."""
        copied = 0
        while self.left and (num_bytes is None or copied < num_bytes):
            name, tensor = self.left[-1]
            self.tensors[name] = to_wire(name, tensor.to("cpu", copy=True))
            # Not before: on another thread, a snapshot with nothing left counts as whole.
            self.left.pop()
            copied += tensor.nbytes


class Snapshots:
    """Snapshots that this worker keeps of its own chunks. `memory_bytes` is what all may take; None: no limit."""

    def __init__(self, memory_bytes: int | None = None) -> None:
        self.memory_bytes = memory_bytes
        self._kept: tuple[_Snapshot, ...] = ()
        """In the order of taking."""
        self._generation = Generation(0)

    @property
    def num_bytes(self) -> int:
        """Bytes that are taken now."""
        return sum(snapshot.num_bytes for snapshot in self._kept)

    def held(self) -> tuple[ChunkVersion, ...]:
        """Snapshots that are complete."""
        return tuple(ChunkVersion(stage=x.stage, version=x.version) for x in self._kept if not x.left)

    # --- taking ---

    def take(self, op: SnapshotOp, job: JobId, chunk: Chunk) -> None:
        """Begin a snapshot, and complete it if it is small; `copy_some` does the rest."""
        for known in self._of_stage(chunk.stage):
            if known.version == op.version:
                known.asked_again(op)
                return
        snapshot = _Snapshot(
            job=job,
            stage=chunk.stage,
            version=op.version,
            generation=op.generation,
            keeps_results=op.keeps_results,
            left=list(chunk.state().items()),
        )
        if self._has_room(snapshot.num_bytes, replaces=chunk.stage):
            snapshot.copy(PIECE_BYTES)
            self._kept = (*self._kept, snapshot)
            self._drop(outlived(self._kept, chunk.stage))

    def copy_some(self) -> bool:
        """Copy another piece of what is not complete; whether anything is left after that."""
        unfinished = [snapshot for snapshot in self._kept if snapshot.left]
        if unfinished:
            unfinished[0].copy(PIECE_BYTES)
        return any(snapshot.left for snapshot in unfinished)

    def finish(self) -> None:
        """Chunks are about to change: copy what is left."""
        for snapshot in self._kept:
            snapshot.copy(None)

    def applied(self, chunk: Chunk, record: StepRecord, result_by_group: Mapping[GroupId, Tensor]) -> None:
        """`chunk` has been updated: keep what was applied, where somebody may catch up with it."""
        for known in self._of_stage(chunk.stage):
            known.stepped(self._generation)
            self._let_go(known)
        keeping = [x for x in self._kept if x.stage == chunk.stage and x.keeps_results]
        if not keeping or not changes(record, chunk.stage.index):
            return
        result = {
            str(group): to_wire(str(group), self._to_keep(chunk, group, result_by_group[group]))
            for group in chunk.groups
        }
        num_bytes = sum(len(tensor.data) for tensor in result.values())
        while keeping and not self._has_room(num_bytes, spares=keeping[-1]):
            # Without this result nothing later is of use either.
            self._drop_results(keeping.pop(0))
        if keeping:
            keeping[-1].results[record.step] = result

    def _to_keep(self, chunk: Chunk, group: GroupId, flat: Tensor) -> Tensor:
        """The vector on the host: an accumulator is zeroed next, other results are nobody's after the update."""
        is_lent = flat.data_ptr() == chunk.accumulator(group).data_ptr()
        return flat.to("cpu", copy=is_lent or flat.device.type != "cpu")

    def _drop_results(self, snapshot: _Snapshot) -> None:
        snapshot.keeps_results = False
        self._let_go(snapshot)

    def _let_go(self, snapshot: _Snapshot) -> None:
        """Drop the results of a snapshot that keeps none any more."""
        if not snapshot.keeps_results:
            snapshot.results.clear()

    def _has_room(
        self, num_bytes: int, *, spares: _Snapshot | None = None, replaces: StageSpec | None = None
    ) -> bool:
        """Whether so many bytes fit, if need be after letting go of snapshots that have, or will have, a successor."""
        limit = self.memory_bytes
        while limit is not None and self.num_bytes + num_bytes > limit:
            others = [x for x in self._kept if x is not spares]
            victims = [x for x in others if x.stage == replaces or len(self._of_stage(x.stage)) > 1]
            if not victims:
                return False
            self._drop(victims[:1])
        return True

    def _of_stage(self, stage: StageSpec) -> list[_Snapshot]:
        return [x for x in self._kept if x.stage == stage]

    # --- giving ---

    def state_of(self, job: JobId, stage: StageIndex, version: Step) -> Mapping[str, WireTensor] | None:
        """A complete snapshot by tensor name; after another cut, of all stages of that index."""
        found: dict[str, WireTensor] = {}
        for x in self._kept:
            if (x.job, x.stage.index, x.version) == (job, stage, version) and not x.left:
                found |= x.tensors
        return found or None

    def result_of(self, job: JobId, stage: StageIndex, step: Step) -> Mapping[str, WireTensor] | None:
        """Result that `step` applied to the stage, by group; None if no snapshot has it."""
        alike = [x for x in self._kept if (x.job, x.stage.index) == (job, stage)]
        return next((x.results[step] for x in alike if step in x.results), None)

    # --- dropping ---

    def adopt(self, generation: Generation) -> None:
        """A new generation: results are kept till the one after that in which they were asked for is over."""
        self._generation = generation
        for snapshot in self._kept:
            snapshot.adopted(generation)
            self._let_go(snapshot)
        for stage in {snapshot.stage for snapshot in self._kept}:
            self._drop(outlived(self._kept, stage))

    def drop_above(self, version: Step) -> None:
        """The job has gone back to `version`: nothing that came after it counts."""
        self._kept = tuple(snapshot for snapshot in self._kept if snapshot.version <= version)
        for snapshot in self._kept:
            snapshot.results = {step: x for step, x in snapshot.results.items() if step < version}

    def clear(self) -> None:
        """The job is over."""
        self._kept = ()

    def _drop(self, snapshots: Iterable[_Snapshot]) -> None:
        dropped = tuple(snapshots)
        self._kept = tuple(x for x in self._kept if all(x is not y for y in dropped))


# --- bringing a copy up to date ---


@torch.no_grad()
def bring_forward(
    state: dict[str, Tensor],
    record: StepRecord,
    result_by_group: Mapping[GroupId, Tensor],
    *,
    stage: StageIndex,
    model: AnyModel,
    rule: Rule,
) -> None:
    """Do to a chunk's copied state what `Chunk.apply` does to the chunk, to the last bit and in place.

    Raises:
        LocalError: the results are not those of the state's parameters; nothing has changed then.
    """
    if not changes(record, stage):
        return
    walker = walker_from(state, rule)
    grads = _gradients(walker.params, record, result_by_group, stage=stage, model=model)
    weight = next(x.weight for x in record.results if x.group == Own(stage))
    update(rule, walker, grads, record, weight=weight)
    state |= named_tensors(walker, copied(rule.slots))


def _gradients(
    params: Mapping[str, Tensor],
    record: StepRecord,
    result_by_group: Mapping[GroupId, Tensor],
    *,
    stage: StageIndex,
    model: AnyModel,
) -> dict[str, Tensor]:
    groups = names_by_group(
        (x.group for x in record.results), stage, sorted(params), model.layer_parameters()
    )
    grads: dict[str, Tensor] = {}
    for group, names in groups.items():
        wanted = {name: params[name] for name in names}
        num_elements = sum(tensor.numel() for tensor in wanted.values())
        flat = result_by_group.get(group)
        if wanted and (flat is None or flat.numel() != num_elements):
            raise LocalError(f"stage {stage}: the result of {group} should have {num_elements} elements")
        if wanted and flat is not None:
            grads |= unflatten(flat, wanted)
    return grads
