"""Training that diverges in a simulated world: one update is too large, and all that comes of it has no finite loss."""

from collections.abc import Callable
from dataclasses import replace
from math import nan

from skein.protocol.messages.directives import StepRecord
from skein.protocol.worker.ops import ApplyOp, ComputeOp, Joined, Loss, Op, OpOutcome
from skein.sim.compute.executor import NO_GENERATION, SimExecutor
from skein.types import Generation, WorkerId

IsTooLarge = Callable[[StepRecord], bool]
"""Whether this update is one."""


class Diverging:
    """Makes the executors of one world, which know of each other whose parameters are spoilt: lineages tell.

    Args:
        is_too_large: of each update.
        spoils_gradients: what comes of such a loss is not finite either.
    """

    def __init__(self, is_too_large: IsTooLarge, *, spoils_gradients: bool = True) -> None:
        self.spoils_gradients = spoils_gradients
        self._is_too_large = is_too_large
        self._spoilt: set[str] = set()

    def executor(self, worker: WorkerId, flops_per_s: float) -> SimExecutor:
        """Executor of a worker, as `World` wants it."""
        return _Executor(worker, flops_per_s, self)

    def is_spoilt(self, lineage: str) -> bool:
        """Whether these parameters have no finite loss."""
        return lineage in self._spoilt

    def applied(self, before: str, after: str, record: StepRecord) -> None:
        """An update has made one lineage of another."""
        if before in self._spoilt or self._is_too_large(record):
            self._spoilt.add(after)


class _Executor(SimExecutor):
    def __init__(self, worker: WorkerId, flops_per_s: float, diverging: Diverging) -> None:
        super().__init__(worker, flops_per_s)
        self._diverging = diverging

    def run(self, op: Op, generation: Generation = NO_GENERATION) -> OpOutcome:
        before = {stage: chunk.lineage for stage, chunk in self.chunks.items()}
        outcome = super().run(op, generation)
        if isinstance(op, ApplyOp):
            for stage, chunk in self.chunks.items():
                self._diverging.applied(before[stage], chunk.lineage, op.record)
        if (
            isinstance(outcome, Loss)
            and isinstance(op, ComputeOp)
            and self._diverging.is_spoilt(before[op.chunk.stage])
        ):
            return replace(outcome, loss_sum=nan)
        is_spoilt = self._diverging.spoils_gradients and any(map(self._diverging.is_spoilt, before.values()))
        if isinstance(outcome, Joined) and is_spoilt:
            return replace(outcome, squared_norm=nan, is_finite=False)
        return outcome
