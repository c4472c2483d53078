"""Workers that contribute wrongly to real numbers: to gradients, or to what they send along a path."""

from collections.abc import Callable
from enum import StrEnum

import numpy as np

from skein.protocol.worker.ops import HopKey, TensorKey
from skein.sim.compute.aggregating import AggregatingExecutor, AggregatingModel
from skein.sim.compute.numeric import F64, NumericExecutor
from skein.types import GroupId, StageIndex, Step, WorkerId


class LieKind(StrEnum):
    """Way in which a worker contributes wrongly.

    STALE: the sums of its first step for ever; COPIED: another holder's in place of its own; SENT: what
    it sends to other stages.
    """

    SIGN_FLIP = "sign_flip"
    HUNDREDFOLD = "hundredfold"
    NAN = "nan"
    STALE = "stale"
    COPIED = "copied"
    SENT = "sent"


class LyingExecutor(AggregatingExecutor):
    """Computes as others do, and hands out something else from step `since` on."""

    def __init__(
        self,
        model: AggregatingModel,
        worker: WorkerId,
        flops_per_s: float,
        *,
        kind: LieKind,
        since: Step,
        another: Callable[[StageIndex], NumericExecutor],
    ) -> None:
        """`another` gives another holder of a stage."""
        super().__init__(model, worker, flops_per_s)
        self._kind = kind
        self._since = since
        self._another = another
        self._first: dict[GroupId, F64] = {}

    def sums(self, group: GroupId, stage: StageIndex) -> F64:
        honest = super().sums(group, stage)
        first = self._first.setdefault(group, honest)
        if self.chunks[stage].version < self._since:
            return honest
        match self._kind:
            case LieKind.SIGN_FLIP:
                return -honest
            case LieKind.HUNDREDFOLD:
                return 100.0 * honest
            case LieKind.NAN:
                return np.full_like(honest, np.nan)
            case LieKind.STALE:
                return first
            case LieKind.COPIED:
                return self._another(stage).sums(group, stage)
            case LieKind.SENT:
                return honest

    def _give(self, key: TensorKey, values: F64) -> None:
        is_sent = isinstance(key, HopKey) and key.phase.trains and key.step >= self._since
        is_lie = self._kind is LieKind.SENT and is_sent
        super()._give(key, values[::-1] + 1.0 if is_lie else values)
