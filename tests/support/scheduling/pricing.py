"""What a schedule is simulated with: seconds and bytes of each stage, latency and bandwidth of each link."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from skein.plan.route.schedules.shape import PipelinePlacement, Shape
from skein.topology.links import F64
from tests.support.scheduling.ops import PipelineOpKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One microbatch at one stage, on the worker that holds it.

    `activation_bytes` are held from the start of the forward to the end of the backward, or of the input gradient;
    `kept_bytes` from there to the end of the weight gradient. With both 1 on every stage, bytes are slots.
    `output_bytes` go to the next stage, `gradient_bytes` come back from it. Of a vocabulary shard SCORES is the forward
    and TERM the backward; `output_bytes` are the answer of SCORES, `gradient_bytes` that of TERM if it is waited for.
    """

    forward_s: float
    input_s: float
    weight_s: float
    activation_bytes: int = 1
    kept_bytes: int = 1
    output_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s

    def op_s(self, kind: PipelineOpKind) -> float:
        """Seconds of one op of this kind."""
        match kind:
            case PipelineOpKind.FORWARD | PipelineOpKind.SCORES:
                return self.forward_s
            case PipelineOpKind.BACKWARD | PipelineOpKind.TERM:
                return self.backward_s
            case PipelineOpKind.BACKWARD_INPUT:
                return self.input_s
            case PipelineOpKind.BACKWARD_WEIGHT:
                return self.weight_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A model cut for a pipeline: the stages' costs when each worker holds `num_chunks` of them in this placement.

    `shards` are the costs of each worker's vocabulary shard, and `num_barriers` is one or two, if the output is split.
    """

    stages: tuple[StageCost, ...]
    num_chunks: int = 1
    placement: PipelinePlacement = PipelinePlacement.LOOP
    shards: tuple[StageCost, ...] = ()
    num_barriers: int = 0

    @property
    def costs(self) -> tuple[StageCost, ...]:
        """Of all stages of a schedule, shards behind the others."""
        return self.stages + self.shards

    @property
    def num_workers(self) -> int:
        return len(self.stages) // self.num_chunks

    def shape(self, num_microbatches: int) -> Shape:
        return Shape(
            num_workers=self.num_workers,
            num_microbatches=num_microbatches,
            num_chunks=self.num_chunks,
            placement=self.placement,
        )


def even_cut(shares: Sequence[StageCost], num_chunks: int, placement: PipelinePlacement) -> Cut:
    """Each worker's whole share in `num_chunks` equal chunks; tensors between stages keep their size.

    Args:
        shares: of each worker; `output_bytes` and `gradient_bytes` of the first are those of every boundary.
        num_chunks: on each worker.
        placement: of the chunks.
    """
    shape = Shape(num_workers=len(shares), num_microbatches=1, num_chunks=num_chunks, placement=placement)
    return Cut(
        stages=tuple(_part(shares[worker], shares[0], num_chunks) for worker in shape.worker_by_stage),
        num_chunks=num_chunks,
        placement=placement,
    )


def _part(share: StageCost, boundary: StageCost, num_chunks: int) -> StageCost:
    return StageCost(
        forward_s=share.forward_s / num_chunks,
        input_s=share.input_s / num_chunks,
        weight_s=share.weight_s / num_chunks,
        activation_bytes=-(-share.activation_bytes // num_chunks),
        kept_bytes=-(-share.kept_bytes // num_chunks),
        output_bytes=boundary.output_bytes,
        gradient_bytes=boundary.gradient_bytes,
    )


class Sharing(StrEnum):
    """What transfers at the same time do to each other.

    `NONE`: nothing, each has its link's bandwidth. `ENDS`: each worker's uplink, and each worker's downlink, carries
    one transfer at a time. A transfer begins when both are free of those that were ready before it; one that takes no
    time but latency neither waits nor is waited for.
    """

    NONE = "none"
    ENDS = "ends"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links:
    """Directed links between the workers of a pipeline.

    `latency_s` and `bytes_per_s` are (num_workers, num_workers), row sends to column, as in `LinkMatrices`; what stays
    on one worker takes no time.
    """

    latency_s: F64
    bytes_per_s: F64
    sharing: Sharing = Sharing.NONE

    def parts_s(self, sender: int, receiver: int, num_bytes: int) -> tuple[float, float]:
        """Seconds until the first byte arrives, and from then until the last, if nothing else delays them."""
        if sender == receiver:
            return 0.0, 0.0
        latency_s, bytes_per_s = self.latency_s[sender, receiver], self.bytes_per_s[sender, receiver]
        return float(latency_s), float(num_bytes / bytes_per_s)

    def seconds(self, sender: int, receiver: int, num_bytes: int) -> float:
        """Seconds for `num_bytes` that nothing else delays."""
        return sum(self.parts_s(sender, receiver, num_bytes))
