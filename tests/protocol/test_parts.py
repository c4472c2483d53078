"""A part of a run that keeps state is told of every generation, loss, commit and plan, exactly once."""

from skein.protocol.coordinator.coordinator_io import Outbox
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.parts import Parts
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.membership.absence import Absence
from skein.protocol.membership.membership import Membership
from tests.support.desk import Desk
from tests.support.jobs import small_job


def test_every_part_that_keeps_state_is_told_once() -> None:
    desk = Desk()
    desk.submit(small_job())
    [job] = desk.machine.history.jobs.values()
    outbox = Outbox(desk.machine.history)
    parts = Parts(job, Membership(), Absence(), outbox, {}, Measured(job.spec), now=0.0)
    told = [id(part) for part in parts.told]
    assert sorted(told) == sorted(id(part) for part in vars(parts).values() if isinstance(part, RunPart))
