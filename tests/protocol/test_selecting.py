"""A choice along the run: who is waited for, what is kept of it when somebody dies, and what is recorded."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from skein.numeric.coreset.distributed import Candidates
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import ChooseRows, Log, Outbox, RowsChosen, Send
from skein.protocol.coordinator.runs.steps import proposals
from skein.protocol.coordinator.runs.steps.proposals import GRACE_S
from skein.protocol.coordinator.runs.steps.selecting import MOST_TRIES, Selecting
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import CoresetChosen, DataCounted, JobSubmitted
from skein.protocol.membership.membership import Lost
from skein.protocol.messages.coresets import CandidatesPicked, candidates_of, parts_of
from skein.sim.compute.rows import NUM_ROWS, AskedModel, picked_by
from skein.sim.shapes import shape_of
from skein.types import Generation, Incarnation, JobId, MicrobatchId, Step, WorkerId
from skein.wire import codec
from tests.support.plans import chunk, path, plan_of

NAMES = ("a", "b", "c", "d")
PLAN = plan_of([chunk(0, name) for name in NAMES], [path(chunk(0, name)) for name in NAMES])
GENERATION = Generation(1)
JOB = shape_of("line 1x4 chosen").job(steps=20)


class Bench:
    """The part, its commands, and the log that they change."""

    def __init__(self) -> None:
        self.outbox = Outbox(History())
        self.outbox.history.apply(
            JobSubmitted(job=JobId("j"), key="k", spec=JOB.canonical_json(), wall_s=0.0)
        )
        self.job: JobHistory = self.outbox.history.jobs[JobId("j")]
        self.outbox.history.apply(
            DataCounted(job=self.job.job, num_train_samples=NUM_ROWS, num_steps=None, wall_s=0.0)
        )
        self.selecting = Selecting(Members(self.job, {}, self.outbox))

    def begin(self, *, now: float = 0.0, plan: Plan = PLAN) -> None:
        self.selecting.begin(plan, now=now)

    def pick(self, name: str, *, now: float = 1.0, parts: Sequence[CandidatesPicked] | None = None) -> None:
        for part in parts or told(name):
            self.selecting.picked(WorkerId(name), part, now=now)

    def asked(self) -> ChooseRows | None:
        found = [x for x in self.outbox.drain() if isinstance(x, ChooseRows)]
        return found[-1] if found else None

    def lose(self, name: str) -> None:
        lost = Lost(
            worker=WorkerId(name),
            incarnation=Incarnation(f"i{name}"),
            reason="gone",
            silent_s=0.0,
            is_final=True,
        )
        self.selecting.lost(lost, is_missed=True, now=2.0)
        self.selecting.fenced(now=2.0)


def picked_at(version: int, blocks: Sequence[MicrobatchId]) -> Candidates:
    """Candidates among the rows of these microbatches by the job's model at a version."""
    model = AskedModel(seed=JOB.seed, step=Step(version))
    return picked_by(model, JOB, blocks, num_rows=NUM_ROWS)


def told(name: str) -> tuple[CandidatesPicked, ...]:
    """Candidates of a worker, as it tells of them in several parts."""
    blocks = [MicrobatchId(m) for m in range(NUM_ROWS // 2) if m % len(NAMES) == NAMES.index(name)]
    found = picked_at(0, blocks)
    parts = parts_of(found, GENERATION, Step(0), part_bytes=200)
    assert len(parts) > 1
    return parts


def answered(bench: Bench, asked: ChooseRows) -> CoresetChosen:
    made = asked.answer()
    assert bench.selecting.is_answer(made)
    bench.selecting.chose(made, now=3.0)
    return bench.job.chosen[-1]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_candidates_are_the_same_in_however_many_parts_they_come() -> None:
    found = candidates_of(told("b"))
    whole = candidates_of(
        parts_of(
            picked_at(0, [MicrobatchId(m) for m in range(1, 60, 4)]),
            GENERATION,
            Step(0),
        )
    )
    assert found.counts == whole.counts
    for one, other in zip(
        (found.ids, found.sizes, *found.factors), (whole.ids, whole.sizes, *whole.factors), strict=True
    ):
        assert np.array_equal(one, other)


def test_a_worker_tells_four_bytes_for_each_number_of_its_candidates_and_a_kilobyte() -> None:
    blocks = [MicrobatchId(m) for m in range(NUM_ROWS // 2)]
    found = picked_at(0, blocks)
    parts = parts_of(found, GENERATION, Step(0))
    num_bytes = sum(codec.REPORT.encode(part).ByteSize() for part in parts)
    num_numbers = sum(found.widths) + 2
    assert num_bytes <= 4 * len(found.ids) * num_numbers + 1024
    assert [codec.REPORT.decode(codec.REPORT.encode(part)) for part in parts] == list(parts)


def test_a_choice_is_asked_for_when_all_have_picked_and_recorded_before_it_is_told(bench: Bench) -> None:
    bench.begin()
    for name in NAMES:
        assert bench.asked() is None
        bench.pick(name)
    asked = bench.asked()
    assert asked is not None
    assert bench.selecting.is_choosing
    record = answered(bench, asked)
    assert (record.version, record.num_rows, record.num_set_aside, record.num_faults) == (0, NUM_ROWS, 1, 0)
    assert record.seconds == 3.0
    assert record.told.read().sizes.sum() == NUM_ROWS - 1
    assert not bench.selecting.is_due()
    assert not bench.selecting.is_choosing


def test_an_answer_to_an_older_question_is_none(bench: Bench) -> None:
    bench.begin()
    for name in NAMES:
        bench.pick(name)
    first = bench.asked()
    assert first is not None
    bench.selecting.fenced(now=2.0)
    assert not bench.selecting.is_answer(first.answer())
    bench.begin(now=4.0)
    second = bench.asked()
    assert second is not None
    assert second.answer().chosen.choice.digest == first.answer().chosen.choice.digest


def test_an_answer_that_comes_while_the_run_does_something_else_is_recorded_once_it_is_due(
    bench: Bench,
) -> None:
    bench.begin()
    for name in NAMES:
        bench.pick(name)
    asked = bench.asked()
    assert asked is not None
    bench.selecting.keep(asked.answer(), now=2.0)
    bench.selecting.fenced(now=3.0)
    assert bench.selecting.settle(now=4.0)
    (record,) = bench.job.chosen
    assert (record.digest, record.seconds) == (asked.answer().chosen.choice.digest, 2.0)
    assert not bench.selecting.settle(now=5.0)


def test_who_dies_alone_is_replaced_by_chance_and_others_are_not_asked_again(bench: Bench) -> None:
    bench.begin()
    for name in "abd":
        bench.pick(name)
    bench.lose("c")
    bench.begin(now=4.0, plan=plan_of([chunk(0, "a")], [path(chunk(0, "a"))]))
    asked = bench.asked()
    assert asked is not None
    assert not [x for x in bench.outbox.commands if isinstance(x, Send)]
    record = answered(bench, asked)
    assert (record.num_faults, record.num_by_chance) == (1, NUM_ROWS // 4)
    assert record.told.read().sizes.sum() == pytest.approx(NUM_ROWS - record.num_set_aside)


def test_what_a_death_took_is_none_of_a_choices_cost(bench: Bench) -> None:
    bench.begin(now=0.0)
    for name in "abd":
        bench.pick(name)
    bench.lose("c")  # at 2
    bench.selecting.fenced(now=50.0)
    bench.begin(now=100.0)
    asked = bench.asked()
    assert asked is not None
    bench.selecting.chose(asked.answer(), now=101.0)
    assert bench.job.chosen[-1].seconds == 3.0


def test_where_others_were_not_done_either_it_begins_anew(bench: Bench) -> None:
    bench.begin()
    bench.pick("a")
    bench.lose("c")
    bench.begin(now=4.0)
    assert bench.asked() is None
    for name in NAMES:
        bench.pick(name, now=5.0)
    asked = bench.asked()
    assert asked is not None
    assert all(isinstance(x, Candidates) for x in asked.proposed.values())


def test_after_many_tries_chance_draws_of_everything(bench: Bench) -> None:
    for _ in range(MOST_TRIES):
        bench.begin()
        assert bench.asked() is None
        bench.selecting.fenced(now=1.0)
    bench.begin(now=4.0)
    asked = bench.asked()
    assert asked is not None
    record = answered(bench, asked)
    assert (record.num_faults, record.num_by_chance) == (4, NUM_ROWS)


def test_who_is_late_is_not_waited_for(bench: Bench) -> None:
    bench.begin(now=10.0)
    assert bench.selecting.late_at() == inf
    bench.pick("a", now=11.0)
    bench.pick("b", now=12.0)
    assert bench.selecting.late_at() == 10.0 + 3 * 2.0 + GRACE_S
    bench.pick("c", now=13.0)
    bench.selecting.late()
    asked = bench.asked()
    assert asked is not None
    assert bench.selecting.late_at() == inf
    bench.pick("d", now=18.0)  # too late
    assert bench.asked() is None
    assert dict(asked.answer().chosen.faults) == {WorkerId("d"): "it was late"}


def test_who_cannot_pick_or_tells_nonsense_is_counted(bench: Bench) -> None:
    bench.begin()
    failed = CandidatesPicked(
        generation=GENERATION, version=Step(0), part=0, num_parts=1, error="MemoryError: of rows"
    )
    bench.pick("a", parts=[failed])
    bench.pick(
        "b", parts=[CandidatesPicked(generation=GENERATION, version=Step(0), part=0, num_parts=1, ids=b"odd")]
    )
    bench.pick("c")
    bench.pick("d")
    asked = bench.asked()
    assert asked is not None
    record = answered(bench, asked)
    assert record.num_faults == 2
    lines = [x.words for x in bench.outbox.drain() if isinstance(x, Log)]
    assert any("rows of a are drawn by chance: MemoryError: of rows" in line for line in lines)


# Of a release that is not ours.
ODD = CandidatesPicked(
    generation=GENERATION, version=Step(0), part=0, num_parts=2, ids=b"1234", factors=(b"1234",)
)


@pytest.mark.parametrize(
    "part",
    [
        replace(ODD, groups=(0,), counts=(2**32 - 1,), factors=()),
        replace(ODD, groups=(0, 1, 2), counts=(0, 0, 0)),
        replace(ODD, part=2**31),
    ],
)
def test_a_part_that_is_none_is_not_kept(bench: Bench, part: CandidatesPicked) -> None:
    bench.begin()
    bench.pick("a", parts=[part])
    bench.pick("a")
    for name in NAMES[1:]:
        bench.pick(name)
    asked = bench.asked()
    assert asked is not None
    assert isinstance(asked.proposed[WorkerId("a")], str)
    assert list(asked.answer().chosen.faults) == [WorkerId("a")]


def test_who_tells_of_too_much_pays_for_it_and_not_who_is_last(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposals, "MOST_CANDIDATE_BYTES", 1 << 20)
    bench.begin()
    empty = CandidatesPicked(generation=GENERATION, version=Step(0), part=0, num_parts=1 << 20)
    bench.pick("a", parts=[replace(empty, part=number) for number in range(2000)])
    for name in NAMES[1:]:
        bench.pick(name)
    bench.pick("a", parts=[replace(empty, part=number) for number in range(2000, 2100)])
    asked = bench.asked()
    assert asked is not None
    assert list(asked.answer().chosen.faults) == [WorkerId("a")]


def test_a_choice_stays_where_too_many_rows_cannot_be_compared(bench: Bench) -> None:
    bench.begin()
    for name in NAMES:
        bench.pick(name)
    asked = bench.asked()
    assert asked is not None
    first = answered(bench, asked)
    bench.job.version = Step(4)  # many rows are odd at it
    bench.begin(now=9.0)
    for name in NAMES:
        blocks = [MicrobatchId(m) for m in range(NUM_ROWS // 2) if m % len(NAMES) == NAMES.index(name)]
        found = picked_at(4, blocks)
        bench.pick(name, parts=parts_of(found, GENERATION, Step(4)))
    again = bench.asked()
    assert again is not None
    made: RowsChosen = again.answer()
    assert made.chosen.choice.num_set_aside == 12
    bench.selecting.chose(made, now=10.0)
    second = bench.job.chosen[-1]
    assert (second.version, second.digest, second.num_faults) == (4, first.digest, 1)
