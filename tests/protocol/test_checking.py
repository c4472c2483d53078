"""A run that checks a step: what is computed again, and how the check ends where that cannot be."""

from dataclasses import replace

from skein.config.checks import ChecksSpec
from skein.model.families.mixtral import MixtralModel
from skein.numeric.sketch import SKETCH_LENGTH
from skein.plan.plan import Infeasible, Plan
from skein.protocol.coordinator.coordinator_io import MakePlan, Outbox
from skein.protocol.coordinator.runs.checking.checks import Checks
from skein.protocol.coordinator.runs.checking.inquiry import Again, Undecided
from skein.protocol.coordinator.runs.phase import GatherPhase
from skein.protocol.coordinator.runs.watching.vigil import STALL_S
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import GenerationOpened
from skein.protocol.messages.directives import TakeSketch
from skein.protocol.messages.reports import SketchTaken
from skein.types import Generation, JobId
from tests.support.desk import Desk
from tests.support.hands import record
from tests.support.plans import chunk, path, plan_of
from tests.support.reports import vote
from tests.support.runs import PAIRS, PAIRS_SPEC, later, phase, stepping

SPEC = PAIRS_SPEC.model_copy(update={"checks": ChecksSpec(fraction=1.0)})


def sketch(desk: Desk, *, value: float = 1.0, but: str = "") -> None:
    """All sketch what they were asked for, but for one worker."""
    asked = [
        (worker, command)
        for command in desk.directives()
        if isinstance(command, TakeSketch)
        for worker in PAIRS.workers
        if int(worker[1]) == int(str(command.group)[1]) and worker in desk.told(TakeSketch)
    ]
    commands = []
    for worker, command in dict.fromkeys(asked):
        if worker != but:
            taken = SketchTaken(
                generation=command.generation,
                step=command.step,
                group=command.group,
                attempt=command.attempt,
                values=(value,) * SKETCH_LENGTH,
            )
            commands += desk.report(worker, taken)
    desk.commands = commands


def suspected(desk: Desk) -> str:
    """Worker without which the step is computed again."""
    [opened] = desk.recorded(GenerationOpened)
    return next(worker for worker in PAIRS.workers if f"without {worker}, as a check" in opened.reason)


def without(worker: str, *, visits: slice = slice(None)) -> Plan:
    """`PAIRS` as others compute it; each microbatch makes those `visits`."""
    here = [x.chunk for x in PAIRS.chunks if x.chunk.worker != worker]
    holders = [next(x for x in here if x.stage == stage) for stage in (0, 1)]
    return plan_of([chunk(x.stage, x.worker) for x in here], [path(*holders[visits])] * len(PAIRS.paths))


def checked() -> tuple[Desk, str]:
    """A run that has asked for a plan without a suspect, for nobody has told of holding anything."""
    desk = stepping(SPEC, PAIRS)
    desk.step(PAIRS)
    sketch(desk)
    suspect = suspected(desk)
    desk.acknowledge(desk.live)
    assert desk.found(MakePlan)
    return desk, suspect


def test_a_check_for_which_no_plan_exists_ends_and_blames_nobody() -> None:
    desk, _ = checked()
    desk.plan(Infeasible(reason="too few"))
    [opened] = desk.recorded(GenerationOpened)
    assert opened.reason == "step 0: the check ends, for nobody else can compute the step"
    desk.acknowledge(desk.live)
    desk.plan(Infeasible(reason="too few"))
    assert phase(desk) is GatherPhase
    assert not any("excluded" in line for line in desk.lines())


def test_a_step_whose_microbatches_visit_other_stages_is_compared_with_nothing() -> None:
    desk, suspect = checked()
    other = without(suspect, visits=slice(1, None))
    desk.plan(other)
    desk.ready(other.workers)
    desk.step(other)
    sketch(desk, value=-1.0)
    [opened] = desk.recorded(GenerationOpened)
    assert opened.reason == "step 0: the check ends, for nobody else can compute the step"


def test_a_worker_that_owes_its_sketch_gets_no_more_work() -> None:
    desk = stepping(SPEC, PAIRS)
    desk.step(PAIRS)
    sketch(desk, but="w0a")
    later(desk, STALL_S + 1.0)
    assert any("excluded=w0a: no op ended" in line for line in desk.lines())
    assert not any("excluded=w0b" in line for line in desk.lines())


def checks_of(job: JobHistory) -> Checks:
    return Checks(Members(job, {}, Outbox(History())))


def job_of() -> JobHistory:
    return JobHistory(job=JobId("j"), key="k", spec=SPEC, submitted_wall_s=0.0)


def test_a_step_that_lost_contributions_is_not_checked_and_ends_a_check() -> None:
    checks, votes = checks_of(job_of()), [vote("s0"), vote("s1")]
    assert checks.seed(votes, PAIRS, is_whole=False) is None
    checks = checks_of(job_of())
    assert checks.seed(votes, PAIRS, is_whole=True) is not None
    assert checks.seed(votes, PAIRS, is_whole=False) is None
    assert checks.judged(record(), (), PAIRS) is None
    assert not checks.aside


def sparse_job() -> JobHistory:
    job = job_of()
    job.spec = SPEC.model_copy(update={"model": MixtralModel(family="mixtral", preset="mixtral-1m")})
    return job


def test_who_has_not_heard_the_choices_of_experts_is_no_witness() -> None:
    plan = plan_of([*(x.chunk for x in PAIRS.chunks), chunk(0, "w0c")], PAIRS.paths)
    for job, verdict in ((sparse_job(), Undecided), (job_of(), Again)):
        checks = checks_of(job)
        assert checks.seed([vote("s0"), vote("s1")], PAIRS, is_whole=True) is not None
        assert isinstance(checks.judged(record(), (1.0,) * SKETCH_LENGTH, PAIRS), Again)
        moved = replace(plan, paths=tuple(path(chunk(0, "w0c"), x.hops[1]) for x in PAIRS.paths))
        # Neither the suspect's result nor another one: somebody else is to compute it.
        found = checks.judged(record(), (-1.0,) * SKETCH_LENGTH, moved)
        assert isinstance(found, verdict)


def test_a_seed_that_was_told_before_there_is_a_result_is_not_used_again() -> None:
    job, votes = job_of(), [vote("s0"), vote("s1")]
    checks = checks_of(job)
    told = checks.seed(votes, PAIRS, is_whole=True)
    assert checks.seed(votes, PAIRS, is_whole=True) == told
    checks.fenced(now=0.0)
    job.generation = Generation(2)
    assert checks.seed(votes, PAIRS, is_whole=True) not in (None, told)
