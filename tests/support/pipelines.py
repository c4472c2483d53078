"""The compute ops of one worker in a test: its machine, what comes to it, and what may run."""

from collections.abc import Mapping

from skein.plan.ops import Direction
from skein.plan.plan import Path
from skein.protocol.messages.directives import ChunkAssignment, Origin, SourceKind, StateSource
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.protocol.worker.ops import Loss, LossOp
from skein.protocol.worker.pipeline import NONE_KEPT, Pipeline
from skein.types import MicrobatchId, StageIndex, Step, WorkerId
from tests.support.plans import chunk, path, schedule, stage_spec

LINE = path(chunk(0, "a"), chunk(1, "b"))

LOSS = Loss(loss_sum=2.0, num_tokens=3)


def machine_of(
    worker: str,
    words: str,
    *,
    slots: int = 2,
    evaluation_paths: tuple[int, ...] = (),
    step: int = 0,
    kept: Mapping[StageIndex, Step] = NONE_KEPT,
) -> Pipeline:
    """A worker with the stages of a schedule as `F0.1 B0.1 L2.1`: kind, stage and microbatch of each op."""
    planned = schedule(worker, words)
    chunks = [
        ChunkAssignment(
            stage=stage_spec(stage),
            slots=slots,
            source=StateSource(kind=SourceKind.INITIAL, version=Step(0)),
            evaluation_paths=evaluation_paths,
        )
        for stage in sorted({op.stage for op in planned.ops})
    ]
    return Pipeline(WorkerId(worker), chunks, planned, Step(step), kept=kept)


def tensor(
    direction: Direction, microbatch: int, hop: int, way: Path, *, phase: Phase = Phase.TRAIN, step: int = 0
) -> HopTensor:
    """What comes to a hop of a path, or back to it."""
    return HopTensor(
        direction=direction,
        phase=phase,
        step=Step(step),
        microbatch=MicrobatchId(microbatch),
        hop=hop,
        path=way,
    )


def forward(microbatch: int, hop: int, way: Path = LINE, *, phase: Phase = Phase.TRAIN) -> HopTensor:
    """An activation."""
    return tensor(Direction.FORWARD, microbatch, hop, way, phase=phase)


def backward(microbatch: int, hop: int, way: Path = LINE, *, phase: Phase = Phase.TRAIN) -> HopTensor:
    """A gradient, or the release of an evaluation."""
    return tensor(Direction.BACKWARD, microbatch, hop, way, phase=phase)


def first_stage(*, num_microbatches: int = 4, slots: int = 2) -> Pipeline:
    """Worker a with stage 0 of `LINE`, in a step that has begun."""
    forwards = " ".join(f"F0.{m}" for m in range(num_microbatches))
    # Backwards stand first: whatever may run of them does.
    machine = machine_of("a", f"{forwards.replace('F', 'B')} {forwards}", slots=slots)
    origins = [Origin(microbatch=MicrobatchId(m), path=LINE) for m in range(num_microbatches)]
    machine.begin(Phase.TRAIN, origins)
    return machine


def run_ready(machine: Pipeline) -> list[str]:
    """Run what may run, and tell it as `F0 B1 L2` with microbatches."""
    ran = []
    while (op := machine.next_op()) is not None:
        ran.append(f"{type(op).__name__[0]}{op.microbatch}")
        machine.end(op, LOSS if isinstance(op, LossOp) else None)
    return ran
