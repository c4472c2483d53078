"""Header of a tensor on its way between workers: its identity, and the routing of the moment.

Names here are those of protos/skein/wire/v1; `skein.wire.codec` maps them field by field.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from skein.plan.ops import Direction
from skein.plan.plan import Path
from skein.types import (
    Attempt,
    ChunkRef,
    Epoch,
    Generation,
    GroupId,
    Incarnation,
    JobId,
    MicrobatchId,
    Step,
    WorkerId,
)


class Phase(StrEnum):
    """Purpose of a microbatch: a step's gradient, the loss on validation data, that of each walker on a probe, or what
    training rows are to the model, so that some are chosen.

    In all but the first nothing goes backward but the word that a slot is free again.
    """

    TRAIN = "train"
    EVALUATE = "evaluate"
    PROBE = "probe"
    SELECT = "select"

    @property
    def trains(self) -> bool:
        """Whether gradients come of it: its ops are planned, added up and timed, what crosses a boundary is logged."""
        return self is Phase.TRAIN

    @property
    def keeps_graph(self) -> bool:
        """Whether a forward is kept for its backward."""
        return self is Phase.TRAIN

    @property
    def validates(self) -> bool:
        """Whether its losses are those of the job on validation data, on the same samples at every version."""
        return self is Phase.EVALUATE

    @property
    def scores_walkers(self) -> bool:
        """Whether its losses say who leads, so that each goes with a claim of the parameters that it is of."""
        return self is Phase.PROBE

    @property
    def selects(self) -> bool:
        """Whether its samples are the training rows, in their order, and their features are kept where paths end."""
        return self is Phase.SELECT

    @property
    def outlasts_steps(self) -> bool:
        """Whether it may go on while steps are committed, with the parameters of the version that it began at."""
        return self is Phase.SELECT

    @property
    def replicates_samples(self) -> bool:
        """Whether all walkers get the same samples."""
        return self is Phase.PROBE


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTensor:
    """A boundary tensor of microbatch `microbatch`, input of hop `hop` (FORWARD) or gradient of its output (BACKWARD).

    The path travels along: routing is the source's. `step` is the version of the parameters it was computed with.
    """

    direction: Direction
    phase: Phase
    step: Step
    microbatch: MicrobatchId
    hop: int
    path: Path

    @property
    def outlasts_steps(self) -> bool:
        """Whether it is still wanted once its step is committed."""
        return self.phase.outlasts_steps


class ShardKind(StrEnum):
    """A member's summand on its way to the shard's owner, a sum of several on the way there, or the result."""

    PART = "part"
    SUM = "sum"
    RESULT = "result"

    @property
    def is_own(self) -> bool:
        """Whether it comes from the member that it names; a result may be passed on."""
        return self is not ShardKind.RESULT


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTensor:
    """Shard of one reduction.

    `member` is the first chunk of the worker that contributes (PART) or added up (SUM), or the shard's owner (RESULT).
    """

    kind: ShardKind
    step: Step
    group: GroupId
    attempt: Attempt
    shard: int
    member: ChunkRef

    @property
    def outlasts_steps(self) -> bool:
        """Whether it is still wanted once its step is committed: a reduction ends with that."""
        return False

    def __hash__(self) -> int:
        # Not of all fields, for each tensor is looked up many times: the others seldom tell two of one step apart.
        return hash((self.kind, self.step, self.shard, self.member.worker))


TensorHeader = HopTensor | ShardTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Envelope of a tensor's bytes on a peer stream: routing (who, which generation) and identity (`header`)."""

    job: JobId
    epoch: Epoch
    generation: Generation
    sender: WorkerId
    incarnation: Incarnation
    header: TensorHeader
    secret: str = field(default="", repr=False)
    """Secret that the coordinator has told the members of the generation of this sender."""


class Refusal(StrEnum):
    """Reason for which a tensor was not taken; refused is not lost, the sender offers it again."""

    STALE = "stale"
    NOT_YET = "not_yet"
    CORRUPT = "corrupt"
    TOO_LARGE = "too_large"
    UNKNOWN_JOB = "unknown_job"
    UNEXPECTED = "unexpected"
    FORGED = "forged"
