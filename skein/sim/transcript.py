"""A small life of a job, event by event: `python -m skein.sim --transcript` prints it.

This is the page on which a training step reads from top to bottom, for the machines are the real ones: what stands
behind `<` happened to whoever the line names, and what follows behind `>` is all that its machine did about it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial

from skein.config.job import BatchSpec, EvaluationSpec
from skein.plan.plan import Path, Plan
from skein.protocol.coordinator.coordinator_io import CoordinatorCommand, CoordinatorEvent, Log, ReportArrived
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import GenerationMember, Record, StepCommitted
from skein.protocol.messages.directives import Member
from skein.protocol.messages.reports import Beat
from skein.protocol.messages.tensors import Envelope
from skein.protocol.worker.worker_io import SendReport, WorkerCommand, WorkerEvent
from skein.sim.processes.worker import SimWorker
from skein.sim.scenario import LIMIT_S, FleetShape, make_world, run_to_end
from skein.sim.shapes import shape_of
from skein.sim.world import World
from skein.types import ChunkRef, GroupId, SiteId, StageSpec, WorkerId

_WIDTH = 150
_MANY = 4
"""Number of values above which only the first and the number are shown."""
_LONG = 48
"""Characters; texts are cut there."""
_LEFT_OUT = frozenset(
    (
        "address",
        "digest",
        "door",
        "epoch",
        "fleet",
        "generation",
        "host",
        "incarnation",
        "job",
        "job_spec",
        "key",
        "position",
        "profile",
        "proof",
        "protocol_version",
        "seconds",
        "secret",
        "signature",
        "site",
        "spec",
        "spread",
        "wall_s",
    )
)
"""Fields that a reader has no use for on every line."""
_ROUTINE = (Beat,)
"""Reports that come as the clock goes on."""


class Transcript(World):
    """A world that writes down what each machine is given, and what it answers."""

    def __init__(self, sites: tuple[SiteId, ...], *, seed: int) -> None:
        super().__init__(sites, seed=seed)
        self.page: list[str] = []

    def _decide(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        commands = super()._decide(event)
        if commands or not (isinstance(event, ReportArrived) and isinstance(event.report, _ROUTINE)):
            self._write("coordinator", event, [x for x in commands if not isinstance(x, Log)])
        return commands

    def _decide_for(self, worker: SimWorker, event: WorkerEvent) -> list[WorkerCommand]:
        commands = super()._decide_for(worker, event)
        told = [x for x in commands if not (isinstance(x, SendReport) and isinstance(x.report, _ROUTINE))]
        self._write(worker.machine.identity.worker, event, told)
        return commands

    def _write(self, who: str, event: object, commands: Sequence[object]) -> None:
        if isinstance(event, TimePassed) and not commands:
            return
        self.page.append(f"{self.clock.now:6.3f} {who} < {brief(event)}"[:_WIDTH])
        self.page.extend(f"       > {brief(command)}"[:_WIDTH] for command in commands)


def brief(value: object) -> str:
    """A value in few words: defaults, and what is the same on every line, are left out.

    >>> brief(ChunkRef(stage=1, worker="w0"))
    'w0/1'
    """
    match value:
        case ChunkRef():
            return f"{value.worker}/{value.stage}"
        case Path():
            return ">".join(brief(hop) for hop in value.hops)
        case Plan():
            return f"Plan({brief(str(value.reason))})"
        case _ if isinstance(value, GroupId):
            return str(value)
        case Member() | GenerationMember():
            return value.worker
        case StageSpec():
            return f"stage {value.index}"
        case Envelope():
            return f"{value.sender} {brief(value.header)}"
        case Enum():
            return str(value.value)
        case float():
            return f"{value:.3g}"
        case str():
            return value if len(value) <= _LONG else f"{value[:_LONG]}…"
        case Mapping():
            return brief(tuple(value))
        case tuple() | list() | frozenset():
            shown = [brief(x) for x in (sorted(value) if isinstance(value, frozenset) else value)]
            more = f" … {len(shown)}" if len(shown) > _MANY else ""
            return f"[{', '.join(shown[:_MANY])}{more}]"
    if not is_dataclass(value):
        return str(value)
    told = {
        field.name: inner
        for field in fields(value)
        if field.name not in _LEFT_OUT
        and (inner := getattr(value, field.name)) not in (field.default, "", None, ())
    }
    name = type(value).__name__
    if len(told) == 1 and is_dataclass(inner := next(iter(told.values()))):
        return f"{name} {brief(inner)}"
    return f"{name}({', '.join(f'{field}={brief(inner)}' for field, inner in told.items())})"


def small_life() -> Transcript:
    """Four workers train two stages; one dies in the third step, and another comes and takes its place."""
    batch, evaluation = BatchSpec(samples=4, microbatch_samples=2), EvaluationSpec(every_steps=0, samples=2)
    changes = {"name": "life", "batch": batch, "evaluation": evaluation}
    job = shape_of("line 2x2 tied").job(steps=5, every=0).model_copy(update=changes)
    fleet = FleetShape(num_workers=4, num_sites=2, flops_per_s=2e9)
    world = make_world(job, fleet, seed=0, new_world=Transcript)
    assert isinstance(world, Transcript)
    world.after_append = partial(_go_on, world)
    run_to_end(world, limit_s=LIMIT_S)
    return world


def _go_on(world: World, num_records: int) -> None:
    """Kill a worker in the third step, and start another in the fourth."""
    newest: Record = world.log[num_records - 1]
    if isinstance(newest, StepCommitted) and newest.record.step == 1:
        world.clock.after(0.03, partial(world.kill_worker, WorkerId("w0003")))
    if isinstance(newest, StepCommitted) and newest.record.step == 2:
        come = partial(
            world.add_worker, WorkerId("w0004"), SiteId("site1"), flops_per_s=2e9, memory_bytes=2**34
        )
        world.clock.after(0.0, come)
