"""What a coordinator sends is stamped on its way out."""

from skein.protocol.coordinator.coordinator_io import Outbox, Send
from skein.protocol.messages.directives import Dismiss, Measure, Start
from skein.types import Incarnation, Step, WorkerId
from tests.support.desk import Desk
from tests.support.runs import PLAN, SPEC


def test_what_leaves_is_of_the_newest_epoch_and_a_generation_as_far_as_it_is_of_any() -> None:
    desk = Desk()
    desk.join(*PLAN.workers)
    desk.submit(SPEC)
    history, to = desk.machine.history, (WorkerId("w0a"), Incarnation("i"))
    assert min(history.epoch, history.generation) > 0
    outbox = Outbox(history)
    for said in (Start(step=Step(0)), Dismiss(job=None, may_exit=True), Measure()):
        outbox.send(said, to, to, generation=history.generation)
    start, other, dismiss, _, measure, _ = [x.directive for x in outbox.drain() if isinstance(x, Send)]
    assert start is other == Start(epoch=history.epoch, generation=history.generation, step=Step(0))
    assert dismiss == Dismiss(epoch=history.epoch, job=None, may_exit=True)
    assert measure == Measure()
