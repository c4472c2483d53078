"""A stage of which a mesh computes the functions; its parameters, whole, are those of the worker's own module.

Rules of this file
- What devices hold is a copy. They are given parameters before they compute with others; which have changed, torch's
  own count of changes in place says, so nobody who changes any needs to know of devices.
- Sums of gradients are made on the devices, and handed over when somebody wants to read them: they are added to the
  whole accumulators then, and begin at zero. A lost device ends the worker, so none is ever read in part.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from skein.config.job import JobSpec
from skein.plan.clock.holding import StageForm
from skein.plan.mesh.devices import chosen_form, device_load
from skein.units import format_bytes
from worker.compute.payload import CHOICES, DIFFERENTIABLE, GRADIENTS, crossed, crossing, tensor_if_any
from worker.mesh.forms.boundary import BALANCE, LOSS, BoundaryCut
from worker.mesh.forms.cuts import cut_of, is_held
from worker.mesh.frames import AddUpAsk, LoadAsk, ReturnAsk, StageAsk, SumsAsk, VisitAsk
from worker.mesh.mesh import Mesh
from worker.mesh.pieces.piecing import Piecing
from worker.model.base import Crossing, Labels, Stage
from worker.model.ops import go_back
from worker.model.pending import Pending
from worker.model.sparse.junction import Junction

_log = logging.getLogger(__name__)


class MeshStage:
    """Computes what `module` would, on several devices.

    Args:
        mesh: the devices.
        job: the module's.
        module: holds the parameters, in the host's memory; their `grad` are the accumulators.
        slots: microbatches that are in flight at most, as far as known.
    """

    def __init__(self, mesh: Mesh, job: JobSpec, module: Stage, *, slots: int = 1) -> None:
        self._slots = slots
        self.form = chosen_form(
            job, module.stage, num_devices=len(mesh.devices), slots=slots, memory_bytes=mesh.device_bytes
        )
        """Form in which devices share the stage."""
        self._mesh = mesh
        self._job = job
        self._module = module
        self._chunk: int | None = None
        self.parameters: Mapping[str, Tensor] = dict(module.named_parameters())
        """Whole parameters, which whoever updates them may replace by others."""
        self._given: dict[str, tuple[Tensor, int]] = {}
        """Each parameter as the devices have it, with its count of changes then: while it is here, no other is."""
        self._piecing = Piecing(mesh, self.form, job.model, module.stage)
        self._has_sums = False
        self._aside: list[_Ticket] | None = None
        self.anchor = torch.zeros(0, requires_grad=True)
        """Makes torch come back here though no parameter is in the graph."""

    @property
    def takes_labels(self) -> bool:
        """Whether `onward` needs labels."""
        return self._module.takes_labels

    @property
    def junction(self) -> Junction:
        """Place where routers find a microbatch; those at the devices are told by way of it."""
        return self._module.junction

    def onward(self, given: Crossing, labels: Tensor | None) -> Crossing:
        """Tensors for the next stage, as of `Stage.onward`."""
        tensors: dict[str, Tensor] = {}
        known = None if labels is None else Labels(labels)
        made = self._visit(given, known, tensors, scores=False)
        return crossed(tensors | dict(zip(_differentiable(tensors), made, strict=True)))

    def score(self, given: Crossing, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, int]:
        """Loss and number of valid labels, as of `Stage.score`."""
        tensors: dict[str, Tensor] = {}
        num_tokens: list[int] = []
        known = Labels(labels, weights)
        (total,) = self._visit(given, known, tensors, scores=True, on_answer=num_tokens.append)
        return total, num_tokens[0]

    def add_gradients(self, y: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Go back, and add the gradients of all parameters to the sums at the devices, as `Stage.add_gradients`."""
        go_back(y, grads)

    def put_aside(self, y: Sequence[Tensor], grads: Sequence[Tensor] | None = None) -> deque[Pending]:
        """Go back, and put gradients aside as `Stage.put_aside` does; they stay at the devices."""
        aside: list[_Ticket] = []
        self._aside = aside
        try:
            if grads is None:
                torch.autograd.backward(y)
            else:
                go_back(y, grads)
        finally:
            self._aside = None
        return deque(Pending(parameter=self.anchor, make=x.add_up, operands=()) for x in aside)

    @torch.no_grad()
    def gather_sums(self) -> None:
        """Add what the devices have summed up to the accumulators."""
        if not self._has_sums:
            return
        answers = self._mesh.ask(self.form.size, SumsAsk(chunk=self._there))
        for name, parameter in self._module.named_parameters():
            assert parameter.grad is not None
            cut_of(name, self.form).add(
                parameter.grad, [given[name] for _, given in answers if name in given]
            )
        self._has_sums = False

    def drop_sums(self) -> None:
        """Void what the devices have summed up."""
        if self._has_sums and self._chunk is not None:
            self._mesh.drop_sums(self._chunk)
        self._has_sums = False

    def came_back(
        self, ticket: int, boundary: BoundaryCut, grads: Mapping[str, Tensor], num_tokens: int
    ) -> dict[str, Tensor]:
        """Gradients of what a visit of so many tokens was given, from those of what it made, by name of that."""
        asked = ReturnAsk(chunk=self._there, ticket=ticket, puts_aside=self._aside is not None)
        answers = self._mesh.ask_each([(asked, part) for part in boundary.cut(grads)])
        self._piecing.observe(num_tokens, answers[0][0].metered, is_forward=False)
        self._piecing.observe_sums(answers[0][0])
        if self._aside is None:
            self._has_sums = True
        return boundary.join([given for _, given in answers])

    def add_up(self, ticket: int) -> None:
        """Add what was put aside to the sums."""
        self._mesh.ask(self.form.size, AddUpAsk(chunk=self._there, ticket=ticket))
        self._has_sums = True

    def _visit(
        self,
        given: Crossing,
        labels: Labels | None,
        tensors: dict[str, Tensor],
        *,
        scores: bool,
        on_answer: Callable[[int], None] = lambda _: None,
    ) -> tuple[Tensor, ...]:
        """Tensors with gradients that the stage makes of `given`; all that it makes goes into `tensors`, by name."""
        chunk = self._ready()
        sent = crossing(given.detached(), labels=labels)
        boundary = BoundaryCut(self.form, *given.hidden.shape[:2])
        num_tokens = given.hidden.shape[:2].numel()
        ticket = _Ticket(self, self._mesh, boundary, num_tokens) if torch.is_grad_enabled() else None
        microbatch, luck = self.junction.microbatch, self.junction.luck
        assert not isinstance(luck, Tensor), "rows of an array are on one device"
        self._piecing.time_sums(chunk, num_tokens)
        pieces = self._piecing.pieces(chunk, num_tokens)
        sent |= tensor_if_any(CHOICES, None if microbatch is None else microbatch.told)
        asked = VisitAsk(
            chunk=chunk,
            ticket=None if ticket is None else ticket.number,
            follows=given.hidden.requires_grad,
            scores=scores,
            num_valid=None if microbatch is None else microbatch.num_valid,
            num_tokens=given.hidden.shape[1],
            luck=luck,
            pieces=pieces,
        )
        answers = self._mesh.ask_each([(asked, part) for part in boundary.cut(sent)])
        answer, found = answers[0][0], boundary.join([told for _, told in answers])
        self._piecing.observe(num_tokens, answer.metered, is_forward=True)
        choices, losses = found.pop(CHOICES, None), found.pop(BALANCE, None)
        self._piecing.observe_sums(answer)
        tensors |= found
        on_answer(boundary.total([told.num_tokens for told, _ in answers]))
        if microbatch is not None:
            microbatch.losses += [] if losses is None else losses.tolist()
            microbatch.counts += answer.expert_counts
            microbatch.num_choices += answer.num_choices
            microbatch.num_dropped += answer.num_dropped
            microbatch.made += [] if choices is None else choices.unbind(0)
        names = _differentiable(found)
        made = tuple(found[name] for name in names)
        if ticket is None:
            return made
        ticket.names = names
        return _visited(self.anchor, ticket, made, *given.differentiable)

    @property
    def _there(self) -> int:
        """The chunk's number at the devices, which have been asked for something."""
        assert self._chunk is not None
        return self._chunk

    def _ready(self) -> int:
        """The chunk's number at the devices, which have the parameters as they are."""
        if self._chunk is None:
            self._tell_form()
            self._mesh.form(self.form)
            self._chunk = self._mesh.new_number()
            spec = self._module.stage
            self._mesh.ask(
                self.form.size,
                StageAsk(
                    chunk=self._chunk,
                    job=self._job.model_dump_json(),
                    stage=(spec.index, spec.first, spec.stop),
                    form=self.form,
                ),
            )
            self._mesh.forms[self._chunk] = StageForm(
                stage=spec.index, form=self.form.name, num_devices=self.form.size
            )
            weakref.finalize(self, self._mesh.drop_chunk, self._chunk)
        changed = {
            name: parameter.detach()
            for name, parameter in self.parameters.items()
            if not self._is_given(name, parameter)
        }
        if changed:
            load = LoadAsk(chunk=self._chunk)
            self._mesh.ask_each([(load, self._part(changed, index)) for index in range(self.form.size)])
            whole = self.parameters
            self._given |= {name: (whole[name], whole[name]._version) for name in changed}
        return self._chunk

    def _is_given(self, name: str, parameter: Tensor) -> bool:
        """Whether the devices have the parameter as it is."""
        given, version = self._given.get(name, (None, 0))
        return given is parameter and version == parameter._version

    def _tell_form(self) -> None:
        stage, load = self._module.stage, device_load(self._job, self._module.stage, self.form)
        needed, room = load.memory_bytes(self._slots), self._mesh.device_bytes
        level = logging.INFO if needed <= room else logging.WARNING
        who = "each" if self.form.size > 1 else "it"
        sizes = f"{who} needs {format_bytes(needed)} of {format_bytes(room)}"
        _log.log(level, "stage=%d on %s: %s", stage.index, self.form, sizes)
        num_devices = len(self._mesh.devices)
        if self.form.size < num_devices:
            why = self._job.parallel.tensor.why_fewer(self._job.model, self.form)
            _log.warning("stage=%d uses %d of %d devices: %s", stage.index, self.form.size, num_devices, why)

    def _part(self, whole: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
        num_experts = self._job.model.num_experts
        return {
            name: cut_of(name, self.form).part(tensor, index, self.form.size)
            for name, tensor in whole.items()
            if is_held(name, index, self.form.size, num_experts)
        }


class _Ticket:
    """A visit's number at the devices; what they keep of it is dropped with this, if nobody comes back."""

    def __init__(self, stage: MeshStage, mesh: Mesh, boundary: BoundaryCut, num_tokens: int) -> None:
        self.number = mesh.new_number()
        self.names: tuple[str, ...] = ()
        """Names of what the visit made."""
        self._num_tokens = num_tokens
        self._stage = stage
        self._boundary = boundary
        self._unused = weakref.finalize(self, mesh.drop_ticket, self.number)

    def come_back(self, grads: Sequence[Tensor], num_given: int) -> tuple[Tensor | None, ...]:
        """Gradients of what the visit was given."""
        stage = self._stage
        if stage._aside is not None:
            stage._aside.append(self)
        else:
            self._unused.detach()
        grads_by_name = dict(zip(self.names, grads, strict=True))
        found = stage.came_back(self.number, self._boundary, grads_by_name, self._num_tokens)
        return tuple(found.get(name) for name in GRADIENTS[:num_given])

    def add_up(self, anchor: Tensor) -> Tensor:
        """Add what was put aside to the sums; the gradient of `anchor`, which has no elements."""
        self._unused.detach()
        self._stage.add_up(self.number)
        return torch.zeros_like(anchor)


class _Context(FunctionCtx):
    ticket: _Ticket
    num_given: int


class _Visited(Function):
    """Keeps the ticket; all else is kept at the devices."""

    @staticmethod
    def forward(
        ctx: _Context, _anchor: Tensor, ticket: _Ticket, made: tuple[Tensor, ...], *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.ticket, ctx.num_given = ticket, len(given)
        return made

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *ctx.ticket.come_back(grads, ctx.num_given))


def _differentiable(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of what has gradients: a loss, or a boundary's tensors."""
    return tuple(name for name in (LOSS, *DIFFERENTIABLE) if name in tensors)


# torch leaves `apply` without types.
_visited: Callable[..., tuple[Tensor, ...]] = _Visited.apply
