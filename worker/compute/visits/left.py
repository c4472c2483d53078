"""Tensors that ops of the step in progress have left at a worker for later ones."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from skein.config.job import JobSpec
from skein.protocol.messages.progress import ResumedChunk
from skein.protocol.messages.tensors import Phase
from skein.protocol.worker.ops import GroupOp
from skein.types import MicrobatchId, StageIndex, StageSpec, Step
from worker.compute.payload import are_choices, choices_name, microbatch_of
from worker.model.base import Crossing, Labels
from worker.model.pending import Pending, add_up, held_bytes
from worker.telling.aggregating import Gauges

_Place = tuple[MicrobatchId, StageIndex]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Forward that is to be gone back.

    Attributes:
        given: its input.
        made: what came of it.
        classes: labels that it took.
        num_valid: tokens with a label, where experts need to know.
        before: choices of experts in the stage before.
        choices: those of this stage.
    """

    given: Crossing
    made: Crossing
    classes: Tensor | None = None
    num_valid: int | None = None
    before: Tensor | None = None
    choices: Tensor | None = None


@dataclass(slots=True)
class Left:
    """Input and output of forwards, gradients that were put aside, and labels of paths that end where they began.

    `routed` are choices by which the step's gradients were made, here and at other holders of the stages that are here:
    whoever computes any of it again, to see whose are wrong, is to route alike.
    """

    gauges: Gauges
    graphs: dict[_Place, Passage] = field(default_factory=dict)
    pending: dict[_Place, deque[Pending]] = field(default_factory=dict)
    pending_bytes: dict[_Place, int] = field(default_factory=dict)
    """Bytes of what was put aside."""
    labels: dict[tuple[Phase, MicrobatchId], Labels] = field(default_factory=dict)
    routed: dict[tuple[Step, MicrobatchId, StageIndex], Tensor] = field(default_factory=dict)

    def put_aside(self, place: _Place, pending: deque[Pending]) -> None:
        """Keep what an input op has put aside, for a weight op."""
        self.pending[place] = pending
        self.pending_bytes[place] = held_bytes(pending)
        self.gauges.put_aside(sum(self.pending_bytes.values()))

    def add_up(self, place: _Place) -> None:
        """Add all that was put aside of a microbatch."""
        add_up(self.pending.pop(place))
        _ = self.pending_bytes.pop(place)
        self.gauges.put_aside(sum(self.pending_bytes.values()))

    def outlasting(self) -> Self:
        """Part of it that is still wanted once the step is committed."""
        labels = {key: value for key, value in self.labels.items() if key[0].outlasts_steps}
        return type(self)(gauges=self.gauges, labels=labels)

    def routed_of(self, op: GroupOp) -> dict[str, Tensor]:
        """Choices of the stage whose sums a group adds up, by name, for its other holders; of several stages none."""
        stages = {member.stage for member in op.group.members}
        return {
            choices_name(m): choices
            for (step, m, stage), choices in self.routed.items()
            if step == op.step and {stage} == stages
        }

    def hear_routed(self, step: Step, stage: StageSpec, job: JobSpec, part: Mapping[str, Tensor]) -> None:
        """Note choices that another holder of a stage has sent, as far as they can be; what is known already stays."""
        form = job.model.choices_of(job.microbatch_tokens)
        num_layers = job.model.num_blocks_in(stage)
        for name, tensor in part.items():
            m = microbatch_of(name)
            if form is None or m is None or m >= job.batch.num_microbatches:
                continue
            if are_choices(tensor, form, num_layers):
                self.routed.setdefault((step, m, stage.index), tensor)

    def staying(self, resumed: Iterable[ResumedChunk]) -> Self:
        """Part of it that a step which goes on is told to keep, if one does; choices stay, for it may be made again."""
        chunks = tuple(resumed)
        graphs = {(m, x.stage) for x in chunks for m in x.forwards}
        pending = {(m, x.stage) for x in chunks for m in x.pending}
        return type(self)(
            gauges=self.gauges,
            graphs={place: self.graphs[place] for place in graphs & self.graphs.keys()},
            pending={place: self.pending[place] for place in pending & self.pending.keys()},
            pending_bytes={place: self.pending_bytes[place] for place in pending & self.pending_bytes.keys()},
            labels={key: value for key, value in self.labels.items() if key[0].trains and chunks},
            routed=self.routed,
        )
