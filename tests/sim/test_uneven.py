"""Walkers of unequal speeds under rules that do not wait for all, and exchanges that go on beside steps."""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from statistics import median

import pytest

from skein.plan.agreeing.rounds import exchanged_stage
from skein.protocol.log.records import GenerationOpened, Incident, StepCommitted
from skein.protocol.messages.directives import StepRecord
from skein.sim.compute.aggregating import AggregatingModel
from skein.sim.scenario import LIMIT_S, make_world, run_to_end, small_fleet
from skein.sim.shapes import shape_of
from skein.sim.world import World
from skein.types import ChunkRef, Exchanged, Local, StageIndex
from tests.support.extent import part
from tests.support.worlds import of_kind, worker

STEPS = 12


def run(text: str, disturb: Callable[[World], None]) -> tuple[list[StepRecord], AggregatingModel]:
    """All steps of a disturbed job; every exchange was one of all members, lost nothing, and nobody was in trouble."""
    shape = shape_of(text)
    job = shape.job(steps=STEPS, every=6)
    model = AggregatingModel(job)
    world = make_world(job, small_fleet(shape), seed=0, new_world=partial(World, new_executor=model.executor))
    disturb(world)
    run_to_end(world, limit_s=LIMIT_S)
    assert not of_kind(world.log, Incident)
    assert len(of_kind(world.log, GenerationOpened)) == 1
    records = [record.record for record in of_kind(world.log, StepCommitted)]
    assert [record.step for record in records] == list(range(STEPS))
    named = {
        (x.group, x.attempt) for record in records for x in record.results if isinstance(x.group, Exchanged)
    }
    assert named
    assert named <= model.checked
    return records, model


def slow(index: int, factor: float, *, at_s: float, seconds: float | None = None) -> Callable[[World], None]:
    return lambda world: world.clock.at(
        at_s, partial(world.slow_worker, worker(index), factor, seconds=seconds)
    )


def left_out(records: list[StepRecord], num_chunks: int) -> list[int]:
    """Steps that some chunks have no part in."""
    return [
        record.step
        for record in records
        if sum(isinstance(x.group, Local) for x in record.results) < num_chunks
    ]


@pytest.mark.parametrize(
    ("base", "rule", "seconds"),
    part(list(product(("line 1x3", "line 2x3"), ("diloco", "overlapped"), (4.0, None))), every=5),
)
def test_who_becomes_slow_is_left_out_and_never_twice_in_a_row(
    base: str, rule: str, seconds: float | None
) -> None:
    records, _ = run(f"{base} by {rule}", slow(1, 15.0, at_s=3.0, seconds=seconds))
    shape = shape_of(base)
    late = left_out(records, shape.stages * shape.replicas)
    assert late
    assert all(after - before > 1 for before, after in pairwise(late))


def test_who_has_always_been_slow_is_waited_for() -> None:
    records, _ = run("line 1x3 by diloco", slow(1, 4.0, at_s=0.0))
    assert left_out(records, 3) == []


def beside_others(draw: random.Random) -> float:
    """An op of a machine that others use too: noise, and now and then it has to stand back for long."""
    stands_back = draw.paretovariate(1.5) if draw.random() < 0.02 else 0.0
    return draw.lognormvariate(0.0, 0.3) + stands_back


def noisy_run(
    *, seed: int, steps: int, disturb: Callable[[World], None] = lambda _: None
) -> list[StepCommitted]:
    shape = shape_of("line 1x3 by diloco")
    job = shape.job(steps=steps, every=0)
    world = make_world(job, small_fleet(shape), seed=0)
    world.times_as_long = partial(beside_others, random.Random(seed))
    disturb(world)
    run_to_end(world, limit_s=LIMIT_S)
    return of_kind(world.log, StepCommitted)


def test_noise_makes_hardly_anybody_late() -> None:
    records = [made.record for seed in part(range(3), every=3) for made in noisy_run(seed=seed, steps=72)]
    num_samples = 12
    assert sum(record.num_late_samples for record in records) <= 0.01 * num_samples * len(records)


def test_amid_noise_who_becomes_really_slow_is_left_out_soon() -> None:
    calm = noisy_run(seed=0, steps=30)
    usual_s = median(after.wall_s - before.wall_s for before, after in pairwise(calm))
    begins_at = calm[11].wall_s
    made = noisy_run(seed=0, steps=30, disturb=slow(1, 15.0, at_s=begins_at))
    late = [(a.wall_s, b.wall_s) for a, b in pairwise(made) if b.record.num_late_samples]
    assert late
    began, ended = late[0]
    assert ended < begins_at + 6 * usual_s
    assert ended - began < 5 * usual_s


@pytest.mark.parametrize(
    ("rule", "at_s"),
    part(list(product(("diloco", "overlapped", "lsgd_eager"), (1.3, 1.5, 1.7, 2.0))), every=3),
)
def test_who_stands_still_for_a_while_catches_up(rule: str, at_s: float) -> None:
    run(
        f"line 1x3 by {rule}",
        lambda world: world.clock.at(at_s, partial(world.freeze_worker, worker(1), 2.0)),
    )


def test_exchanges_beside_steps_end_as_many_steps_later_and_the_last_with_the_job() -> None:
    records, _ = run("line 2x3 by overlapped", lambda _: None)
    ended = [
        (record.step, x.group) for record in records for x in record.results if isinstance(x.group, Exchanged)
    ]
    of_one = [(step, group) for step, group in ended if exchanged_stage(group) == 0]
    # Due at the end of steps 0, 2, 3, 5, 6, 8, 9 and 11, two steps later; the job has none after 11.
    assert [step for step, _ in of_one] == [2, 4, 5, 7, 8, 10, 11, 11]
    assert len(ended) == 2 * len(of_one)


def test_between_two_exchanges_fast_walkers_make_more_steps() -> None:
    records, _ = run("line 1x3 by lsgd_eager", slow(1, 4.0, at_s=0.0))
    made = Counter(x.group for record in records for x in record.results if isinstance(x.group, Local))
    slowest = Local(ChunkRef(stage=StageIndex(0), worker=worker(1)))
    assert all(n > made[slowest] for group, n in made.items() if group != slowest)
    at_exchanges = [
        record for record in records if any(isinstance(x.group, Exchanged) for x in record.results)
    ]
    assert [record.step for record in at_exchanges] == [3, 7, 11]
    assert all(sum(isinstance(x.group, Local) for x in record.results) == 3 for record in at_exchanges)
