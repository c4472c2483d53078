"""The judge of a disturbed job: logs made by hand, good ones and each kind of bad one."""

from dataclasses import replace

import pytest

from bench.chaosing.blows import COORDINATOR, Fault, Strike
from bench.chaosing.judge import Verdict, capacity, judge
from skein.protocol.log.records import (
    GenerationOpened,
    Incident,
    IncidentKind,
    JobEnded,
    Record,
    Remedy,
    RolledBack,
    StepCommitted,
)
from skein.protocol.messages.directives import Decision, StepRecord
from skein.types import Generation, JobId, JobState, Step, WorkerId

JOB, CALM = JobId("disturbed"), JobId("undisturbed")
NUM_STEPS, STEP_S, BEGIN_S, CALM_BEGIN_S = 40, 1.0, 1000.0, 100.0
MICROBATCH_TOKENS, STEP_TOKENS = 256, 2048


def committed(step: int, *, job: JobId = JOB, at_s: float | None = None) -> StepCommitted:
    """Step `step`, a second after the one before it."""
    begin_s = BEGIN_S if job == JOB else CALM_BEGIN_S
    record = StepRecord(
        step=Step(step),
        decision=Decision.APPLY,
        reason="",
        results=(),
        loss=4.0 - step / 100,
        num_tokens=STEP_TOKENS,
        weight=1 / STEP_TOKENS,
        gradient_norm=1.0 + step / 10,
        clip=1.0,
        learning_rate=1e-3,
        samples_after=(step + 1) * 16,
    )
    return StepCommitted(job=job, record=record, wall_s=begin_s + step * STEP_S if at_s is None else at_s)


def calm_log() -> list[Record]:
    return [committed(step, job=CALM) for step in range(NUM_STEPS)]


def good_log() -> list[Record]:
    """Everything committed once, at the pace of the undisturbed job."""
    return [*(committed(step) for step in range(NUM_STEPS)), ended(JobState.FINISHED)]


def ended(state: JobState) -> JobEnded:
    return JobEnded(job=JOB, state=state, reason="", wall_s=BEGIN_S + NUM_STEPS)


def opened(reason: str, at_s: float) -> GenerationOpened:
    return GenerationOpened(job=JOB, generation=Generation(2), members=(), reason=reason, wall_s=at_s)


def incident(worker: str, at_s: float, *, seconds: float = 0.1) -> Incident:
    return Incident(
        job=JOB,
        generation=Generation(2),
        step=Step(10),
        kind=IncidentKind.WORKER_LOST,
        workers=(WorkerId(worker),),
        reason="stream broke",
        remedy=Remedy.RESUMED,
        silent_s=0.4,
        fenced_s=0.05,
        seconds=seconds,
        num_rerouted=0,
        replayed=(),
        num_retried=0,
        num_steps_lost=0,
        num_samples_repeated=0,
        wall_s=at_s,
    )


def went_back(from_version: int, to_version: int) -> RolledBack:
    return RolledBack(
        job=JOB, from_version=Step(from_version), to_version=Step(to_version), reason="", wall_s=BEGIN_S
    )


def killed(worker: str, at_s: float, *, for_s: float = 3.0) -> Strike:
    return Strike(fault=Fault.KILL, targets=(worker,), struck_s=at_s, healed_s=at_s + for_s)


def coordinator_killed(at_s: float) -> Strike:
    return Strike(fault=Fault.HOST, targets=(COORDINATOR,), struck_s=at_s, healed_s=at_s)


def judged(log: list[Record], *strikes: Strike) -> Verdict:
    return judge(
        [*calm_log(), *log],
        strikes,
        job=JOB,
        undisturbed=CALM,
        num_workers=6,
        microbatch_tokens=MICROBATCH_TOKENS,
        max_rel_loss_diff=1e-5,
    )


def with_record(
    log: list[Record],
    step: int,
    *,
    loss: float | None = None,
    num_tokens: int | None = None,
    gradient_norm: float | None = None,
) -> list[Record]:
    """`log` with other numbers in one step."""

    def changed(record: StepRecord) -> StepRecord:
        return replace(
            record,
            loss=record.loss if loss is None else loss,
            num_tokens=record.num_tokens if num_tokens is None else num_tokens,
            gradient_norm=record.gradient_norm if gradient_norm is None else gradient_norm,
        )

    return [
        replace(r, record=changed(r.record)) if isinstance(r, StepCommitted) and r.record.step == step else r
        for r in log
    ]


def delayed(log: list[Record], step: int, by_s: float) -> list[Record]:
    """`log` with every commit from `step` on so much later."""
    return [
        replace(r, wall_s=r.wall_s + by_s) if isinstance(r, StepCommitted) and r.record.step >= step else r
        for r in log
    ]


# --- what was counted ---


def test_an_undisturbed_log_has_nothing_against_it() -> None:
    verdict = judged(good_log())
    assert verdict.is_finished
    assert (verdict.counts.committed, verdict.counts.lost) == (NUM_STEPS, 0)
    assert (verdict.counts.missing, verdict.counts.doubled) == (0, 0)
    assert (verdict.microbatches_lost, verdict.double_counted) == (0, 0)
    assert (verdict.bends.loss, verdict.bends.norm, verdict.bends.first_bent_step) == (0.0, 0.0, None)
    assert verdict.throughput_ratio == pytest.approx(1.0)


def test_steps_that_were_rolled_back_are_lost_and_made_again_without_being_doubled() -> None:
    log = good_log()
    again = [*log[:20], went_back(20, 17), *log[17:]]
    counts = judged(again).counts
    assert (counts.committed, counts.lost, counts.missing, counts.doubled) == (NUM_STEPS, 3, 0, 0)


def test_a_step_that_is_nowhere_is_missing() -> None:
    log = [r for r in good_log() if not (isinstance(r, StepCommitted) and r.record.step == 12)]
    counts = judged(log).counts
    assert (counts.committed, counts.missing, counts.doubled) == (NUM_STEPS - 1, 1, 0)


def test_a_step_that_is_committed_twice_is_doubled() -> None:
    log = good_log()
    counts = judged([*log[:13], committed(12), *log[13:]]).counts
    assert (counts.committed, counts.missing, counts.doubled) == (NUM_STEPS, 0, 1)


def test_a_rollback_does_not_excuse_what_it_did_not_undo() -> None:
    log = good_log()
    counts = judged([*log[:20], went_back(20, 18), *log[17:]]).counts
    assert (counts.lost, counts.doubled) == (2, 1)


def test_another_jobs_records_count_for_nothing() -> None:
    other = replace(went_back(9, 2), job=JobId("another"))
    assert judged([*good_log()[:9], other, *good_log()[9:]]).counts.lost == 0


def test_a_lost_microbatch_and_a_doubled_one_are_told_apart() -> None:
    lost = judged(with_record(good_log(), 5, num_tokens=STEP_TOKENS - MICROBATCH_TOKENS))
    assert (lost.microbatches_lost, lost.double_counted) == (1, 0)
    doubled = judged(with_record(good_log(), 5, num_tokens=STEP_TOKENS + 2 * MICROBATCH_TOKENS))
    assert (doubled.microbatches_lost, doubled.double_counted) == (0, 2)


def test_one_lost_and_one_doubled_in_different_steps_do_not_cancel() -> None:
    log = with_record(good_log(), 5, num_tokens=STEP_TOKENS - MICROBATCH_TOKENS)
    verdict = judged(with_record(log, 6, num_tokens=STEP_TOKENS + MICROBATCH_TOKENS))
    assert (verdict.microbatches_lost, verdict.double_counted) == (1, 1)


def test_a_short_microbatch_counts_as_one() -> None:
    assert judged(with_record(good_log(), 5, num_tokens=STEP_TOKENS - 100)).microbatches_lost == 1


def test_a_bent_loss_is_found_where_it_begins() -> None:
    bent = good_log()
    for step in range(25, NUM_STEPS):
        bent = with_record(bent, step, loss=(4.0 - step / 100) * (1 + 2e-5))
    bends = judged(bent).bends
    assert bends.first_bent_step == 25
    assert bends.loss == pytest.approx(2e-5)
    assert bends.final == pytest.approx(2e-5)


def test_rounding_is_no_bend_but_is_measured() -> None:
    bends = judged(with_record(good_log(), 25, loss=(4.0 - 0.25) * (1 + 4e-7))).bends
    assert bends.first_bent_step is None
    assert bends.loss == pytest.approx(4e-7)


def test_a_step_that_was_lost_is_compared_too() -> None:
    """Its number was wrong before it was made again."""
    log = good_log()
    again = [*with_record(log, 18, loss=9.0)[:20], went_back(20, 17), *log[17:]]
    assert judged(again).bends.first_bent_step == 18


def test_a_loss_that_is_no_number_is_infinitely_far_off() -> None:
    bends = judged(with_record(good_log(), 7, loss=float("nan"))).bends
    assert bends.first_bent_step == 7
    assert bends.loss == float("inf")


def test_a_gradient_counted_twice_at_one_stage_shows_in_the_norm() -> None:
    assert judged(with_record(good_log(), 10, gradient_norm=2.2)).bends.norm == pytest.approx(0.1)


def test_a_job_that_failed_did_not_end_well() -> None:
    assert not judged([*good_log()[:-1], ended(JobState.FAILED)]).is_finished
    assert not judged(good_log()[:-1]).is_finished


def test_a_job_of_a_few_steps_has_no_pace() -> None:
    with pytest.raises(ValueError, match="disturbed committed 2 steps"):
        judged(good_log()[:2])


# --- how long it took ---


def test_a_death_is_noticed_by_the_first_generation_that_names_the_worker() -> None:
    log = delayed(good_log(), 11, 1.5)
    log += [opened("lost w30 (lease)", 1010.3), opened("lost w3 (stream broke)", 1010.7)]
    verdict = judged(log, killed("w3", 1010.2))
    assert verdict.detection_s == pytest.approx((0.5,))
    assert verdict.commit_s == pytest.approx((2.3,))  # step 11 at 1012.5
    assert verdict.recovery_s == ()  # nothing says when work went on
    assert verdict.num_unnoticed == 0


def test_an_incident_tells_when_a_death_was_noticed_and_when_work_went_on() -> None:
    log = [*good_log(), opened("lost w3 (stream broke)", 1010.7), incident("w3", 1010.6, seconds=0.25)]
    verdict = judged(log, killed("w3", 1010.2))
    assert verdict.detection_s == pytest.approx((0.4,))
    assert verdict.recovery_s == pytest.approx((0.65,))
    assert verdict.incidents.num_incidents == 1
    assert verdict.incidents.num_by_remedy == {Remedy.RESUMED: 1}


def test_an_incident_of_another_worker_or_another_job_is_no_notice() -> None:
    other_job = replace(incident("w3", 1010.6), job=JobId("another"))
    verdict = judged([*good_log(), incident("w30", 1010.6), other_job], killed("w3", 1010.2))
    assert (verdict.detection_s, verdict.num_unnoticed) == ((), 1)
    assert verdict.incidents.num_incidents == 1


def test_a_death_that_no_generation_names_is_unnoticed() -> None:
    verdict = judged([*good_log(), opened("lost w4 (lease)", 1010.7)], killed("w3", 1010.2))
    assert (verdict.detection_s, verdict.commit_s, verdict.num_unnoticed) == ((), (), 1)


def test_a_later_death_of_the_same_worker_is_not_the_notice_of_the_first() -> None:
    log = [*good_log(), opened("lost w3 (stream broke)", 1020.9)]
    verdict = judged(log, killed("w3", 1010.2), killed("w3", 1020.2))
    assert verdict.detection_s == pytest.approx((0.7,))
    assert verdict.num_unnoticed == 1


def test_a_coordinator_is_back_with_the_first_step_committed_after_its_death() -> None:
    verdict = judged(delayed(good_log(), 21, 6.0), coordinator_killed(1020.5))
    assert verdict.coordinator_recovery_s == pytest.approx((6.5,))


def test_a_death_while_nobody_could_notice_is_not_held_against_detection() -> None:
    log = [*delayed(good_log(), 21, 6.0), opened("lost w3 (stream broke)", 1026.0)]
    verdict = judged(log, coordinator_killed(1020.5), killed("w3", 1021.0))
    assert (verdict.detection_s, verdict.commit_s, verdict.num_unnoticed) == ((), (), 0)


def test_the_step_of_a_death_is_measured_in_median_steps() -> None:
    log = [*delayed(good_log(), 11, 1.5), opened("lost w3 (stream broke)", 1010.7)]
    assert judged(log, killed("w3", 1010.2)).death_step_ratio == pytest.approx((2.5,))


def test_the_death_of_a_worker_without_a_place_makes_no_step_of_a_death() -> None:
    assert judged(good_log(), killed("w3", 1010.2)).death_step_ratio == ()


def test_a_step_that_something_else_befell_too_tells_nothing_about_deaths() -> None:
    log = [*delayed(good_log(), 11, 1.5), opened("lost w3 (stream broke)", 1010.7)]
    frozen = Strike(fault=Fault.FREEZE, targets=("w1",), struck_s=1010.4, healed_s=1011.0)
    assert judged(log, killed("w3", 1010.2), frozen).death_step_ratio == ()


# --- the pace ---


def test_capacity_counts_the_dead_and_the_frozen_and_no_cut_links() -> None:
    cut = Strike(fault=Fault.CUT, targets=("w0", "w1"), struck_s=0.0, healed_s=10.0)
    frozen = Strike(fault=Fault.FREEZE, targets=("w1",), struck_s=1.0, healed_s=3.0)
    strikes = [cut, frozen, killed("w0", 4.0, for_s=4.0)]
    assert capacity(strikes, 3, begin_s=0.0, end_s=10.0) == pytest.approx(1 - (2 + 4) / 30)


def test_capacity_is_cut_to_the_time_that_is_looked_at() -> None:
    assert capacity([killed("w0", 8.0, for_s=50.0)], 2, begin_s=0.0, end_s=10.0) == pytest.approx(0.9)


def test_throughput_is_beside_what_the_living_would_have_done() -> None:
    # Twice as long for every step; one of six workers is away all the time.
    slow = [
        replace(r, wall_s=BEGIN_S + 2 * (r.wall_s - BEGIN_S)) if isinstance(r, StepCommitted) else r
        for r in good_log()
    ]
    verdict = judged(slow, killed("w3", BEGIN_S, for_s=2 * NUM_STEPS))
    assert verdict.capacity == pytest.approx(5 / 6)
    assert verdict.throughput_ratio == pytest.approx(0.5 / (5 / 6))


def test_peace_after_the_last_blow_does_not_raise_the_pace() -> None:
    log = delayed(good_log(), 11, 10.0)
    struck = judged(log, killed("w3", 1010.2, for_s=11.0))
    # Steps 3 to 11 took 18 s until the blow was made good; the 28 after it took one each.
    assert struck.steps_per_s == pytest.approx(9 / 19)
