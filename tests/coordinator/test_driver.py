"""The driver: durable before said, one commit for what waits together, and no promise to a stream that is gone."""

import asyncio
import logging
import threading
import time

import numpy as np
import pytest

from coordinator.checkpoints import DamagedError
from coordinator.driver import CLOCK_S, MOST_DEAF_S, ClockSetError, check_wall_clock, wall_clock
from coordinator.filing import Filing
from coordinator.records.logfile import LogFull
from coordinator.records.store import Fenced
from coordinator.service.control import EncodedDirectives
from coordinator.streams import Stream
from skein.config.data.coreset import CoresetSpec
from skein.errors import LocalError, RemoteError, UserError
from skein.numeric.coreset.distributed import Candidates
from skein.plan.plan import Infeasible
from skein.protocol.coordinator.coordinator_io import (
    CancelAsked,
    CoordinatorCommand,
    CoordinatorEvent,
    DrainAsked,
    MakePlan,
    PlanMade,
    SubmitAsked,
    WriteManifest,
)
from skein.protocol.log.records import (
    CheckpointCommitted,
    CoresetChosen,
    GenerationOpened,
    HaltAsked,
    JobEnded,
    JobSubmitted,
)
from skein.protocol.messages.coresets import parts_of
from skein.protocol.messages.directives import (
    Assign,
    Evaluate,
    NewGeneration,
    Start,
    UseChoice,
    Welcome,
)
from skein.protocol.messages.reports import Beat, ChunksReady
from skein.protocol.messages.tensors import Phase
from skein.storage.outside import Outside
from skein.types import Condition, Epoch, Incarnation, JobId, JobState, Step, WorkerId
from skein.wire.codec import DIRECTIVE
from skein.wire.extra import Downward
from skein.wire.v1 import control_pb2
from tests.coordinator.builders import (
    Files,
    MemoryLog,
    checkpointed,
    eventually,
    hello,
    job_spec,
    lab,
    opened,
    plan_at_once,
    submitted,
)


def submit(key: str, name: str = "digits") -> SubmitAsked:
    return SubmitAsked(key=key, spec=job_spec(name))


async def taken(stream: Stream) -> list[Downward]:
    """What waits on a stream."""
    found = []
    while stream.num_waiting:
        directive = await stream.take()
        assert directive is not None
        found.append(directive)
    return found


async def test_nothing_is_said_before_it_is_durable() -> None:
    async with lab() as it:
        stream = await it.join()
        assert [type(d) for d in await taken(stream)] == [Welcome]
        it.log.gate.clear()
        asked = asyncio.create_task(it.driver.ask(submit("a")))
        await it.log.is_entered()
        # The machine has decided; the disk has not answered.
        assert it.driver.machine.history.jobs
        assert stream.num_waiting == 0
        assert not asked.done()
        it.log.gate.set()
        records = await asked
        assert [type(r) for r in records] == [JobSubmitted, GenerationOpened]
        assert [type(d) for d in await taken(stream)] == [NewGeneration]


async def test_what_waits_while_the_disk_works_is_committed_together() -> None:
    async with lab() as it:
        it.log.gate.clear()
        first = asyncio.create_task(it.driver.ask(submit("0")))
        await it.log.is_entered()
        others = [asyncio.create_task(it.driver.ask(submit(str(n)))) for n in range(1, 6)]
        _, pending = await asyncio.wait(others, timeout=0)
        assert len(pending) == len(others)
        it.log.gate.set()
        await asyncio.gather(first, *others)
        assert [len(records) for records in it.log.appends] == [1, 5]


async def test_who_spoke_in_a_turn_that_took_long_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "coordinator")
    async with lab() as it:
        stream = await it.join()
        machine, handle = it.driver.machine, it.driver.machine.handle

        def slow(event: CoordinatorEvent, *, now: float) -> list[CoordinatorCommand]:
            commands = handle(event, now=now)
            if isinstance(event, CancelAsked):
                # Less than a second after the lease is over.
                it.clock.now += machine.membership.lease_s + 0.5
            return commands

        monkeypatch.setattr(machine, "handle", slow)
        await it.driver.ask(CancelAsked(job=JobId("none")))
        await it.driver.reported(stream, Beat(progress=0, running_s=0.0, statistics=()))
        monkeypatch.setattr(machine, "handle", handle)
        await it.handled()
        assert machine.membership.is_current(stream.worker, stream.incarnation)
    assert "joined" in caplog.text
    assert "lost" not in caplog.text


async def test_same_key_makes_one_job() -> None:
    async with lab() as it:
        first, again = await asyncio.gather(it.driver.ask(submit("a")), it.driver.ask(submit("a")))
        assert [type(record) for record in (*first, *again)] == [JobSubmitted]
        assert list(it.driver.machine.history.jobs) == ["digits-1"]


async def test_an_answer_waits_until_what_it_says_is_durable() -> None:
    async with lab() as it:
        it.log.gate.clear()
        asked = asyncio.create_task(it.driver.ask(submit("a")))
        await it.log.is_entered()
        settled = asyncio.create_task(it.driver.settled())
        _, pending = await asyncio.wait({settled}, timeout=0)
        assert pending
        it.log.gate.set()
        await settled
        assert it.log.appends
        await asked


async def test_on_a_full_disk_who_asks_is_answered_from_memory_and_told_so() -> None:
    async with lab() as it:
        assert await it.driver.settled() == ""
        it.log.gate.clear()
        asked = asyncio.create_task(it.driver.ask(submit("a")))
        await it.log.is_entered()
        said = await it.driver.settled(patience_s=0.01)
        assert said.endswith("so nothing is decided: the storage of the state directory does not answer")
        it.log.gate.set()
        await asked
        assert await it.driver.settled() == ""


async def test_a_checkpoint_in_question_is_read_and_what_was_found_is_told() -> None:
    async with lab() as it:
        checkpoint = checkpointed("digits-1", 1)
        assert (await it.driver.files.verify(checkpoint)).condition is Condition.WHOLE
        it.files.error = DamagedError("stage-000 is not there")
        found = await it.driver.files.verify(checkpoint)
        assert (found.condition, found.reason) == (Condition.DAMAGED, "stage-000 is not there")
        it.files.error = UserError("checkpoint.url", "s3://b", "no such host")
        assert (await it.driver.files.verify(checkpoint)).condition is Condition.UNKNOWN


async def test_calls_that_wait_behind_a_hung_place_fail_at_once_and_other_places_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, never = Files(), threading.Event()
    filing = Filing(files, Outside(silent_s=0.5))
    asked: list[str | None] = []

    def verify(checkpoint: CheckpointCommitted) -> None:
        asked.append(checkpoint.url)
        if checkpoint.url == "s3://hung":
            never.wait()

    monkeypatch.setattr(files, "verify", verify)
    versions = range(1, 9)
    hung = [asyncio.create_task(filing.verify(checkpointed("a", v, url="s3://hung"))) for v in versions]
    elsewhere = await filing.verify(checkpointed("b", 1, url="s3://well"))
    assert elsewhere.condition is Condition.WHOLE
    assert not any(each.done() for each in hung)
    found = await asyncio.gather(*hung)
    assert {each.condition for each in found} == {Condition.UNKNOWN}
    assert "did not answer a moment ago: is it mounted" in found[-1].reason
    assert asked.count("s3://hung") == 1, "each call waits for the silence of the one before"
    assert (await filing.verify(checkpointed("c", 1))).condition is Condition.WHOLE
    never.set()


@pytest.mark.parametrize("error", [LogFull("disk full"), Fenced("epoch 1 is over")])
async def test_a_log_that_takes_no_more_ends_the_driver_and_nobody_hears_of_it(error: Exception) -> None:
    async with lab() as it:
        stream = await it.join()
        await taken(stream)
        it.log.error = error
        it.log.gate.clear()
        asked = asyncio.create_task(it.driver.ask(submit("a")))
        await it.log.is_entered()
        waiting = asyncio.create_task(it.driver.ask(submit("b")))
        _, pending = await asyncio.wait({waiting}, timeout=0)
        assert pending
        it.log.gate.set()
        with pytest.raises(type(error)):
            await it.running
        for one in (asked, waiting, it.driver.ask(submit("c"))):
            with pytest.raises(LocalError, match="stopping"):
                await one
        assert stream.reason == "the coordinator stops"
        assert await stream.take() is None
        assert it.log.appends == []


async def test_the_newest_stream_of_a_worker_is_the_one_that_counts() -> None:
    async with lab() as it:
        older = await it.join()
        await taken(older)
        newer = await it.join()
        assert older.reason == "the worker opened another stream"
        await it.driver.closed(older, "the connection broke")
        await it.driver.reported(older, Beat(progress=7, running_s=0.0, statistics=()))
        await it.driver.reported(newer, Beat(progress=1, running_s=0.0, statistics=()))
        entry = it.driver.machine.membership.live[WorkerId("w1")]
        await it.handled()
        assert entry.progress == 1
        assert entry.is_connected
        assert it.driver.num_streams == 1


async def test_a_stranger_that_knows_an_incarnation_keeps_its_process_out_at_no_time() -> None:
    async with lab() as it:
        first = await it.join()
        await it.driver.closed(first, "reset")
        # The stream is open for as long as the stranger does not read what it is told.
        stranger = Stream(WorkerId("w1"), Incarnation("first"), secret="another")
        await it.driver.opened(stranger, hello(secret="another"))
        await it.handled()
        assert stranger.num_waiting == 1
        back = Stream(WorkerId("w1"), Incarnation("first"), secret="known")
        await it.driver.opened(back, hello())
        assert isinstance(await back.take(), Welcome)
        assert not await taken(stranger)


async def test_a_closed_stream_shortens_the_lease() -> None:
    async with lab() as it:
        stream = await it.join()
        await it.driver.closed(stream, "the connection broke")
        entry = it.driver.machine.membership.live[WorkerId("w1")]
        await it.handled()
        assert not entry.is_connected
        it.clock.now += 1.0
        await it.handled()
        assert not it.driver.machine.membership.live


async def test_a_stream_that_is_not_read_is_closed() -> None:
    async with lab() as it:
        stream = await it.join(max_waiting=1)
        await it.driver.ask(submit("a"))
        assert stream.reason == "1 directives wait and none is taken"
        assert await stream.take() is None


async def test_a_new_question_to_the_planner_ends_the_older_one() -> None:
    asked: list[int] = []
    begun, held = asyncio.Event(), asyncio.Event()

    async def plan(question: MakePlan) -> PlanMade:
        asked.append(len(asked))
        if len(asked) == 1:
            begun.set()
            await held.wait()
        return PlanMade(request=question.request, result=Infeasible(reason=f"answer {len(asked)}"))

    async with lab(plan=plan) as it:
        stream = await it.join("w1")
        await it.driver.ask(submit("a"))
        await it.acknowledge(stream)
        await begun.wait()
        await it.driver.ask(CancelAsked(job=JobId("digits-1")))
        await it.driver.ask(submit("b"))
        await it.acknowledge(stream)
        await eventually(lambda: it.driver.machine.view.reason_of(JobId("digits-2")) == "answer 2")


async def test_a_crash_of_the_planner_ends_the_driver_with_its_error() -> None:
    async def plan(question: MakePlan) -> PlanMade:
        raise ArithmeticError("no such plan")

    async with lab(plan=plan) as it:
        stream = await it.join()
        await it.driver.ask(submit("a"))
        await it.acknowledge(stream)
        with pytest.raises(ArithmeticError, match="no such plan"):
            await it.running


async def test_rows_are_chosen_beside_the_loop_and_recorded_before_anybody_hears_of_it() -> None:
    spec = job_spec()
    coreset = CoresetSpec(method="craig", fraction=0.5)
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"coreset": coreset})})
    picked = Candidates(
        counts={0: 2, 1: 2},
        ids=np.array([0, 3, 1, 2], np.int32),
        sizes=np.array([2, 2, 3, 1], np.float32),
        factors=(np.arange(4, dtype=np.float32)[:, None],),
        num_set_aside=0,
    )
    async with lab() as it:
        stream = await it.join()
        await it.driver.ask(SubmitAsked(key="a", spec=spec))
        generation = (await it.acknowledge(stream)).generation
        assert isinstance(await stream.take(), Assign)
        ready = ChunksReady(
            generation=generation, num_train_samples=8, num_validation_samples=0, data_fingerprint="rows"
        )
        await it.driver.reported(stream, ready)
        asked = await stream.take()
        assert isinstance(asked, Evaluate)
        assert (asked.phase, asked.num_microbatches, asked.num_rows) == (Phase.SELECT, 4, 8)
        for part in parts_of(picked, generation, Step(0), part_bytes=40):
            await it.driver.reported(stream, part)
        told = await stream.take()
        assert isinstance(told, UseChoice)
        (record,) = [x for x in it.log.records if isinstance(x, CoresetChosen)]
        assert told.choice == record.told
        assert record.told.read().ids.tolist() == [0, 1, 2, 3]
        assert record.told.read().sizes.tolist() == [2, 3, 1, 2]
        assert isinstance(await stream.take(), Start)


async def test_a_name_that_no_file_of_a_checkpoint_has_fails_the_checkpoint_not_the_coordinator() -> None:
    async with lab() as it:
        await it.driver.ask(submit("a"))
        it.files.error = RemoteError("'../x' is no name of a checkpoint's file")
        it.driver._do(WriteManifest(checkpoint=checkpointed("digits-1", 1)))
        await eventually(lambda: it.files.manifests != [])
        await it.driver.ask(CancelAsked(job=JobId("digits-1")))
        assert not it.running.done()


async def test_a_drained_worker_without_work_is_told_to_go() -> None:
    async with lab() as it:
        stream = await it.join()
        await taken(stream)
        await it.driver.ask(DrainAsked(worker=WorkerId("w1")))
        assert stream.num_waiting == 1


async def test_a_replayed_driver_goes_on_under_its_own_epoch() -> None:
    log = MemoryLog([opened(1), submitted("digits-1"), opened(2)])
    async with lab(log, plan=plan_at_once) as it:
        stream = await it.join()
        # The fence waits for its record, the welcome for nothing.
        await it.handled()
        welcome, fence = await taken(stream)
        assert isinstance(welcome, Welcome)
        assert isinstance(fence, NewGeneration)
        assert (welcome.epoch, fence.epoch, fence.job) == (Epoch(2), Epoch(2), "digits-1")
        records = await it.driver.ask(CancelAsked(job=JobId("digits-1")))
        assert [type(record) for record in records] == [HaltAsked, JobEnded]
        assert it.driver.machine.view.state_of(JobId("digits-1")) is JobState.CANCELLED


async def test_a_clock_that_is_set_forward_begins_a_new_epoch_and_one_that_is_set_back_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not check_wall_clock(1000.0, wall_s=1000.0 + CLOCK_S, was_behind=False)
    with pytest.raises(ClockSetError, match="3600 s ahead"):
        check_wall_clock(1000.0, wall_s=4600.0, was_behind=False)
    assert check_wall_clock(5000.0, wall_s=1400.0, was_behind=False)
    assert check_wall_clock(5001.0, wall_s=1401.0, was_behind=True)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("the wall clock was set back by 3600 s")


def test_the_clock_never_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = wall_clock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert clock() >= before


async def test_a_busy_loop_is_not_believed_to_have_heard_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lab() as it:
        await it.join()
        monkeypatch.setattr("coordinator.driver._CALM_S", -1.0)
        before = it.driver._heard_until
        it.clock.now += MOST_DEAF_S / 2
        await asyncio.sleep(0)
        await it.handled()
        assert it.driver._heard_until == before
        it.clock.now += MOST_DEAF_S
        await eventually(lambda: it.driver._heard_until > before)


def test_a_directive_for_many_is_encoded_once() -> None:
    encoded = EncodedDirectives(size=2)
    one, same = Start(step=Step(1)), Start(step=Step(1))
    assert encoded(one) is encoded(one)
    assert encoded(same) == encoded(one)
    first = encoded(one)
    for step in (2, 3):
        encoded(Start(step=Step(step)))
    assert encoded(one) == first
    assert DIRECTIVE.decode(control_pb2.Directive.FromString(first)) == one
