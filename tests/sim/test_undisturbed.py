"""Jobs that nothing happens to: what the run log must then say."""

import pytest

from skein.config.job import JobSpec
from skein.protocol.coordinator.coordinator_io import SubmitAsked
from skein.protocol.log.records import Evaluated, GenerationOpened, JobEnded, StepCommitted
from skein.sim.scenario import LIMIT_S, run_to_end, undisturbed_curve
from skein.sim.shapes import shape_of
from skein.types import JobState, Layout
from tests.support.extent import part
from tests.support.jobs import small_job
from tests.support.worlds import of_kind, simulate, undisturbed

SHAPES = {
    "one worker": (small_job(stages=1, replicas=1), 1),
    "line": (small_job(), 4),
    "loop": (small_job(layout=Layout.LOOP), 4),
    "tied": (small_job(is_tied=True), 4),
    "tied loop": (small_job(is_tied=True, layout=Layout.LOOP), 4),
    "three stages": (small_job(stages=3), 6),
    "one stage, three replicas": (small_job(stages=1, replicas=3), 3),
    "more stages than workers": (small_job(stages=4, replicas=1), 2),
    "fewer workers than wanted": (small_job(stages=2, replicas=3, microbatches=6), 4),
    "more workers than wanted": (small_job(), 7),
    "line that skips": (small_job(stages=4, skip_ratio=0.25), 8),
    "loop that skips, tied": (small_job(stages=4, skip_ratio=0.5, layout=Layout.LOOP, is_tied=True), 8),
    "one microbatch": (small_job(replicas=1, microbatches=1), 2),
}


@pytest.mark.parametrize(("job", "num_workers"), part(list(SHAPES.values()), every=2))
def test_each_step_is_committed_once_under_one_generation(job: JobSpec, num_workers: int) -> None:
    run = undisturbed(job, num_workers)
    assert [record.step for record in run.curve] == list(range(job.total_steps))
    assert len(of_kind(run.world.log, GenerationOpened)) == 1
    assert run.num_rollbacks == 0


@pytest.mark.parametrize(("job", "num_workers"), SHAPES.values(), ids=SHAPES)
def test_every_sample_counts_in_exactly_one_step(job: JobSpec, num_workers: int) -> None:
    run = undisturbed(job, num_workers)
    assert [record.num_tokens for record in run.curve] == [job.batch.num_microbatches] * job.total_steps
    assert [record.samples_after for record in run.curve] == [
        (step + 1) * job.batch.samples for step in range(job.total_steps)
    ]


@pytest.mark.parametrize("shape", ["line 2x2 sparse", "loop 2x2 sparse split"])
def test_the_balance_of_experts_is_recorded_of_a_sparse_model_alone(shape: str) -> None:
    # Of each layer as many as the microbatch's number: 1, 2, 3 and 4.
    told = [(record.balance_loss, record.drop_ratio) for record in undisturbed_curve(shape_of(shape), 2)]
    # One of four choices of every other microbatch finds its expert full.
    assert told == [(2.5, 1 / 8)] * 2
    dense = undisturbed_curve(shape_of(shape.replace(" sparse", "")), 2)
    assert [record.balance_loss for record in dense] == [None, None]


def test_the_last_version_is_evaluated_and_saved() -> None:
    run = undisturbed(small_job(steps=5), 4)
    assert [record.version for record in of_kind(run.world.log, Evaluated)] == [5]
    assert run.saved == [5]
    assert isinstance(run.world.log[-1], JobEnded)


def test_evaluations_and_checkpoints_come_as_often_as_asked() -> None:
    run = undisturbed(small_job(steps=7, evaluate_every=2, save_every=3, keep=2), 4)
    assert [record.version for record in of_kind(run.world.log, Evaluated)] == [0, 2, 4, 6, 7]
    assert run.saved == [3, 6, 7]
    [job] = run.outcome.history.jobs.values()
    assert [checkpoint.version for checkpoint in job.checkpoints] == [6, 7]


@pytest.mark.parametrize("num_microbatches", [1, 3, 4, 9])
def test_an_evaluation_counts_every_microbatch_once(num_microbatches: int) -> None:
    run = undisturbed(small_job(steps=1, evaluation_microbatches=num_microbatches), 4)
    [evaluated] = of_kind(run.world.log, Evaluated)
    assert evaluated.num_tokens == num_microbatches
    # The cost model's loss of microbatch m is m + 1.
    assert evaluated.loss == sum(range(1, num_microbatches + 1)) / num_microbatches


def test_the_same_seed_gives_the_same_log_and_other_links_give_other_times() -> None:
    job = small_job(evaluate_every=2, save_every=2)
    first, again, other = (simulate(job, 4, seed=seed) for seed in (5, 5, 6))
    assert first.world.log == again.world.log
    assert first.world.lines == again.world.lines
    assert first.outcome.num_events == again.outcome.num_events
    assert first.outcome.seconds != other.outcome.seconds
    assert first.curve == other.curve


def test_jobs_run_one_after_the_other() -> None:
    job = small_job(steps=2)
    run = simulate(job, 4, disturb=lambda world: world.tell(SubmitAsked(key="second", spec=job)))
    assert run.world.coordinator is not None
    second = list(run.world.coordinator.history.jobs)[1]
    assert run.world.coordinator.view.state_of(second) is not JobState.FINISHED
    while run.world.coordinator.view.state_of(second) is not JobState.FINISHED:
        assert run.world.clock.step()
        assert run.world.clock.now < LIMIT_S
    steps = [(record.job, record.record.step) for record in of_kind(run.world.log, StepCommitted)]
    assert steps == [("small-1", 0), ("small-1", 1), ("small-2", 0), ("small-2", 1)]


def test_submitting_a_key_again_changes_nothing() -> None:
    job = small_job(steps=2)
    run = simulate(job, 4, disturb=lambda world: world.tell(SubmitAsked(key="sim", spec=job)))
    assert len(run.outcome.history.jobs) == 1


def test_a_run_that_has_ended_ends_again_at_once() -> None:
    run = undisturbed(small_job(steps=2), 4)
    assert run_to_end(run.world, limit_s=LIMIT_S).state is JobState.FINISHED
