"""A device process: its share of the stages that a worker holds, and what it is asked to do with them.

Rules of this file
- All devices of a mesh are asked the same, in the same order; what they answer is told by the first, or by each.
- Nothing is caught: whoever cannot go on ends, and the whole mesh with it, for the others wait for its sums.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor

from skein.config.job import read_spec
from skein.config.mesh.tensor import MeshForm
from skein.errors import LocalError
from skein.plan.pieces.choice import TimedRows
from worker.compute.payload import CHOICES, GRADIENTS, LABELS, WEIGHTS, crossed, crossing, tensor_if_any
from worker.mesh.forms.boundary import BALANCE, LOSS, tells
from worker.mesh.forms.cuts import AnyCut, ShareCut, cut_of, partial_by_layer
from worker.mesh.forms.grid import Grid, GridShare
from worker.mesh.forms.sequence import SequenceShare
from worker.mesh.frames import (
    AddUpAsk,
    Asked,
    DeviceAnswer,
    DeviceSpeed,
    DropAsk,
    GroupAsk,
    LoadAsk,
    ReturnAsk,
    SpeedAsk,
    StageAsk,
    SumsAsk,
    TimeRowsAsk,
    TimeSumsAsk,
    VisitAsk,
)
from worker.mesh.groups import DeviceGroup
from worker.mesh.pieces.meter import Meter
from worker.mesh.share import WHOLE, Share
from worker.mesh.traffic import CollectiveCount
from worker.model.base import Crossing, Stage, parameter_dtype
from worker.model.pending import Pending, add_up
from worker.model.sparse.layer import SparseMlp
from worker.model.stage import empty_stage
from worker.probe import measure_device, synchronize

_NUM_TIMES = 3

Answered = tuple[DeviceAnswer, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visited:
    """A stage's input, and what came of it."""

    stage: Stage
    form: MeshForm
    share: Share
    given: Crossing
    made: tuple[Tensor, ...]


@dataclass(slots=True)
class _Kept:
    """Stages that one device holds, and what visits have left there."""

    stages: dict[int, Stage] = field(default_factory=dict)
    forms: dict[int, MeshForm] = field(default_factory=dict)
    """Form in which each stage is shared."""
    shares: dict[int, Share] = field(default_factory=dict)
    """Share that this device has of each stage's blocks."""
    visits: dict[int, _Visited] = field(default_factory=dict)
    pending: dict[int, deque[Pending]] = field(default_factory=dict)


class DeviceShare:
    """Stages as one device of a mesh holds them, and the ops on them.

    Args:
        index: of this device among those of the mesh.
        device: where it computes.
    """

    def __init__(self, index: int, device: torch.device) -> None:
        self._index = index
        self._device = device
        self._group: DeviceGroup | None = None
        self._lines: tuple[DeviceGroup, DeviceGroup] | None = None
        """Devices of this one's row, and of its column."""
        self._traffic = CollectiveCount()
        self._meter = Meter(is_timed=device.type == "cpu")
        self._kept = _Kept()

    def carry_out(self, asked: Asked | DeviceAnswer, tensors: Mapping[str, Tensor]) -> Answered:
        """Do what is asked; the answer, and tensors with it."""
        answer, given = self._do(asked, tensors)
        synchronize(self._device)
        collectives, elements = self._traffic.taken()
        counted = {
            "collectives": collectives,
            "elements": elements,
            "metered": self._meter.take(self._traffic.waited_s),
        }
        self._traffic.waited_s = 0.0
        return answer.model_copy(update=counted), given

    def _do(self, asked: Asked | DeviceAnswer, tensors: Mapping[str, Tensor]) -> Answered:
        match asked:
            case SpeedAsk():
                return DeviceAnswer(speed=self._speed(asked.seconds)), {}
            case GroupAsk():
                self._form(asked)
            case StageAsk():
                self._build(asked)
            case LoadAsk():
                self._load(asked, tensors)
            case VisitAsk():
                return self._visit(asked, self._placed(tensors))
            case TimeRowsAsk():
                return DeviceAnswer(row_times=self._time_rows(asked)), {}
            case TimeSumsAsk():
                return DeviceAnswer(sum_times=self._time_sums(asked)), {}
            case ReturnAsk():
                return DeviceAnswer(), self._return(asked, self._placed(tensors))
            case AddUpAsk():
                add_up(self._kept.pending.pop(asked.ticket))
            case SumsAsk():
                return DeviceAnswer(), self._give_sums(asked.chunk)
            case DropAsk():
                self._drop(asked)
            case DeviceAnswer():
                raise LocalError("a device process is asked, and not answered")
            case _:
                assert_never(asked)
        return DeviceAnswer(), {}

    def _speed(self, seconds: float) -> DeviceSpeed:
        found = measure_device(self._device, seconds=seconds)
        return DeviceSpeed(
            name=found.device_name,
            flops_per_s=found.flops_per_s,
            memory_bytes=found.memory_bytes,
            spread=found.spread,
        )

    def _form(self, asked: GroupAsk) -> None:
        self._group, self._lines, form = None, None, asked.form
        if self._index >= form.size or form.size == 1:
            return
        meet = partial(
            DeviceGroup.met, self._device, Path(asked.folder), epoch=asked.epoch, traffic=self._traffic
        )
        if not form.is_grid:
            self._group = meet(index=self._index, size=form.size)
            return
        row, column = divmod(self._index, form.side)
        of_row = meet(index=column, size=form.side, name=f"row{row}")
        self._lines = of_row, meet(index=row, size=form.side, name=f"column{column}")

    def _build(self, asked: StageAsk) -> None:
        job = read_spec(asked.job)
        share = WHOLE
        if asked.form.size > 1:
            share = self._share(asked.form, parameter_dtype(job.precision))
            share.meter = self._meter
        stage = empty_stage(
            asked.form.share_of(job.model),
            asked.spec,
            sequence_tokens=asked.form.padded_tokens(job.data.sequence_tokens),
            precision=job.precision,
            device=self._device,
            share=share,
        )
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        parameters = dict(stage.named_parameters())
        share.sum_beside(
            [[parameters[x] for x in names] for names in partial_by_layer(list(parameters), asked.form)]
        )
        self._kept.stages[asked.chunk] = stage
        self._kept.forms[asked.chunk] = asked.form
        self._kept.shares[asked.chunk] = share

    def _share(self, form: MeshForm, dtype: torch.dtype) -> Share:
        if form.is_grid:
            assert self._lines is not None, "a stage in blocks without rows and columns of devices"
            return GridShare(Grid(*self._lines, dtype))
        assert self._group is not None, "a stage in parts without a group of devices"
        return SequenceShare(self._group, dtype) if form.in_sequence else Share(self._group, dtype)

    @torch.no_grad()
    def _load(self, asked: LoadAsk, tensors: Mapping[str, Tensor]) -> None:
        stage = self._kept.stages[asked.chunk]
        for name, tensor in tensors.items():
            stage.get_parameter(name).copy_(tensor)

    # --- there and back ---

    def _placed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors, which have come to the host, where the device computes."""
        return {name: x.to(self._device) for name, x in tensors.items()}

    def _visit(self, asked: VisitAsk, tensors: Mapping[str, Tensor]) -> Answered:
        stage, form = self._kept.stages[asked.chunk], self._kept.forms[asked.chunk]
        given, labels = crossed(tensors), tensors.get(LABELS)
        share = self._kept.shares[asked.chunk]
        share.pieces, share.num_tokens = asked.pieces, asked.num_tokens
        with (
            torch.set_grad_enabled(asked.ticket is not None),
            stage.junction.visited(asked.num_valid, tensors.get(CHOICES), asked.luck) as microbatch,
        ):
            if asked.ticket is not None:
                given = given.followed(is_sample=not asked.follows)
            if asked.scores:
                assert labels is not None, "a loss without labels"
                total, num_tokens = stage.score(given, labels, tensors.get(WEIGHTS))
                made: tuple[Tensor, ...] = (total,)
                tensors_made = {LOSS: total.detach()}
            else:
                boundary, num_tokens = stage.onward(given, labels), 0
                made, tensors_made = boundary.differentiable, crossing(boundary.detached())
        if asked.ticket is not None:
            self._kept.visits[asked.ticket] = _Visited(
                stage=stage, form=form, share=share, given=given, made=made
            )
        answer = DeviceAnswer(
            num_tokens=num_tokens,
            expert_counts=tuple(microbatch.counts),
            num_choices=microbatch.num_choices,
            num_dropped=microbatch.num_dropped,
        )
        tensors_made |= tensor_if_any(CHOICES, microbatch.choices)
        if microbatch.losses:
            tensors_made[BALANCE] = torch.tensor(microbatch.losses, dtype=torch.float64)
        return answer, self._told(tensors_made, form)

    @torch.no_grad()
    def _time_rows(self, asked: TimeRowsAsk) -> tuple[TimedRows, ...]:
        """Times of the first layer of experts: all of a stage are alike."""
        layers = (x for x in self._kept.stages[asked.chunk].modules() if isinstance(x, SparseMlp))
        found = next(layers).timed(asked.num_rows, self._device)
        self._forget_traffic()
        return found

    def _time_sums(self, asked: TimeSumsAsk) -> tuple[float, ...]:
        """The least of a few times of each."""
        share, found = self._kept.shares[asked.chunk], []
        for num_elements in asked.num_elements:
            x = torch.zeros(num_elements, device=self._device)
            times = []
            for _ in range(_NUM_TIMES):
                began_s = self._now_s()
                share.sum(x)
                times.append(self._now_s() - began_s)
            found.append(min(times))
        self._forget_traffic()
        return tuple(found)

    def _forget_traffic(self) -> None:
        """Leave collectives that were measured for their time alone out of all counts."""
        self._traffic.taken()
        self._traffic.waited_s = 0.0

    def _now_s(self) -> float:
        synchronize(self._device)
        return time.perf_counter()

    def _return(self, asked: ReturnAsk, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gradients of what the stage was given."""
        visited = self._kept.visits.pop(asked.ticket)
        gradients = list(tensors.values())
        if asked.puts_aside:
            self._kept.pending[asked.ticket] = visited.stage.put_aside(visited.made, gradients)
        else:
            visited.stage.add_gradients(visited.made, gradients)
        if visited.share.idle_sums is not None:
            visited.share.idle_sums.finish()
        found = zip(GRADIENTS, visited.given.differentiable, strict=False)
        return self._told({name: x.grad for name, x in found if x.grad is not None}, visited.form)

    def _told(self, tensors: Mapping[str, Tensor], form: MeshForm) -> Mapping[str, Tensor]:
        """Tensors for the answer: what all devices have equal is told by the first."""
        return {name: x for name, x in tensors.items() if tells(name, x, form, self._index)}

    # --- sums ---

    @torch.no_grad()
    def _give_sums(self, chunk: int) -> Mapping[str, Tensor]:
        given, form = {}, self._kept.forms[chunk]
        for name, parameter in self._kept.stages[chunk].named_parameters():
            assert parameter.grad is not None
            if self._index == 0 or _is_own(parameter.grad, cut_of(name, form)):
                given[name] = parameter.grad.to("cpu", copy=True)
            parameter.grad.zero_()
        return given

    @torch.no_grad()
    def _drop(self, asked: DropAsk) -> None:
        kept = self._kept
        for ticket in asked.tickets:
            kept.visits.pop(ticket, None)
            kept.pending.pop(ticket, None)
        for chunk in asked.sums:
            for parameter in kept.stages[chunk].parameters() if chunk in kept.stages else ():
                assert parameter.grad is not None
                parameter.grad.zero_()
        for chunk in asked.chunks:
            kept.stages.pop(chunk, None)
            kept.forms.pop(chunk, None)
            kept.shares.pop(chunk, None)


def _is_own(gradient: Tensor, cut: AnyCut) -> bool:
    """Whether a device other than the first has anything of the gradient that no other has."""
    if cut is ShareCut.PARTIAL:
        # All may be summed already, and with the first device.
        return bool(gradient.any())
    return cut.comes_from_all
