"""What a worker that joined under its own name says in place of others, or of them: it counts for nobody else."""

from collections.abc import Callable, Iterable

import pytest

from skein.protocol.log.records import GenerationOpened, StepCommitted
from skein.protocol.messages.reports import Ack, ChunksReady, PeersSeen, Report, Suspected
from skein.types import Generation, WorkerId
from tests.support.desk import Desk
from tests.support.reports import ledger, stage_done, vote
from tests.support.runs import PLAN, stepping

HONEST, LIAR = WorkerId("w0a"), "stranger"
Claims = Callable[[Desk], Iterable[Report]]


def votes(desk: Desk) -> Iterable[Report]:
    return [vote(group.group, digest="other", squared_norm=9e9) for group in PLAN.groups]


def ledgers(desk: Desk) -> Iterable[Report]:
    """The first in its own name, as the edge refuses others'; that is another test's."""
    return [stage_done(ledger(stage, LIAR, 0, 1), loss_sum=9e9, tokens=(1, 1)) for stage in (0, 1)]


def generations(desk: Desk) -> Iterable[Report]:
    """Acknowledges and is ready for what nobody has told it to, of this generation and of others."""
    for generation in (desk.generation, Generation(desk.generation + 1), Generation(0)):
        yield Ack(generation=generation, chunks=(), progress=(), backups=())
        yield ChunksReady(
            generation=generation, num_train_samples=1, num_validation_samples=1, data_fingerprint="other"
        )


def health(desk: Desk) -> Iterable[Report]:
    """Says of somebody who lives that it is gone."""
    yield Suspected(generation=desk.generation, peer=HONEST, reason="it is silent")
    yield PeersSeen(reached=(), gone=(desk.incarnations[HONEST],))


@pytest.mark.parametrize("claims", [votes, ledgers, generations, health])
def test_who_has_no_part_in_a_step_changes_nothing_of_it(claims: Claims) -> None:
    honest, desk = stepping(), stepping()
    desk.join(LIAR)
    honest.step(PLAN)
    [wanted] = honest.recorded(StepCommitted)

    def lie() -> None:
        for report in claims(desk):
            desk.report(LIAR, report)
            assert not desk.recorded(StepCommitted)
            assert not desk.recorded(GenerationOpened)

    lie()
    desk.ledgers(PLAN)
    lie()
    desk.votes(PLAN)
    [found] = desk.recorded(StepCommitted)
    assert found.record == wanted.record
    assert desk.machine.membership.live.keys() >= set(PLAN.workers)
    lie()
    desk.step(PLAN)
    assert desk.recorded(StepCommitted)
