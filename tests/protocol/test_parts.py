"""A part of a run that keeps state is told of every generation, loss, commit and plan, exactly once."""

from skein.protocol.coordinator.coordinator_io import Outbox, Send
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.parts import Parts
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.membership.absence import Absence
from skein.protocol.membership.membership import Membership
from skein.protocol.messages.directives import Dismiss, Measure, Start
from skein.types import Incarnation, Step, WorkerId
from tests.support.desk import Desk
from tests.support.jobs import small_job
from tests.support.runs import PLAN, SPEC


def test_every_part_that_keeps_state_is_told_once() -> None:
    desk = Desk()
    desk.submit(small_job())
    [job] = desk.machine.history.jobs.values()
    outbox = Outbox(desk.machine.history)
    parts = Parts(job, Membership(), Absence(), outbox, {}, Measured(job.spec), now=0.0)
    told = [id(part) for part in parts.told]
    assert sorted(told) == sorted(id(part) for part in vars(parts).values() if isinstance(part, RunPart))


def test_what_leaves_is_of_the_newest_epoch_and_generation_as_far_as_it_is_of_any() -> None:
    desk = Desk()
    desk.join(*PLAN.workers)
    desk.submit(SPEC)
    history, to = desk.machine.history, (WorkerId("w0a"), Incarnation("i"))
    assert min(history.epoch, history.generation) > 0
    outbox = Outbox(history)
    for said in (Start(step=Step(0)), Dismiss(job=None, may_exit=True), Measure()):
        outbox.send(said, to, to)
    start, other, dismiss, _, measure, _ = [x.directive for x in outbox.drain() if isinstance(x, Send)]
    assert start is other == Start(epoch=history.epoch, generation=history.generation, step=Step(0))
    assert dismiss == Dismiss(epoch=history.epoch, job=None, may_exit=True)
    assert measure == Measure()
