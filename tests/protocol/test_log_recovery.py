"""A log may end after any of its records: what is replayed of it is the state that was, and life goes on from there."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import (
    EpochOpened,
    Evaluated,
    GenerationMember,
    GenerationOpened,
    JobEnded,
    JobSubmitted,
    PlanAdopted,
    Record,
    RolledBack,
    StepCommitted,
)
from skein.types import Epoch, Generation, Incarnation, JobId, JobState, Step, WorkerId
from tests.support.desk import checkpoint
from tests.support.extent import examples
from tests.support.hands import record
from tests.support.incidents import incident
from tests.support.jobs import small_job
from tests.support.plans import grid_plan

SPEC = small_job(keep=2).canonical_json()
WORKERS = st.frozensets(st.sampled_from(["w0a", "w0b", "w1a", "w1b"]), min_size=1)


def told(history: History) -> str:
    """All that a history knows, written out: later changes to it do not change this."""
    return repr((history.epoch, history.generation, history.jobs, history.job_by_key))


def jobs_of(log: list[Record]) -> set[JobId]:
    return {entry.job for entry in log if isinstance(entry, JobSubmitted)}


class LogThatLosesItsEnd(RuleBasedStateMachine):
    """A live history takes records; now and then its process dies and the log has lost some of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Record] = []
        self.live = History()
        self.states = [told(self.live)]
        """After each number of records."""
        self.opens_epoch()

    def append(self, entry: Record) -> None:
        self.live.apply(entry)
        self.log.append(entry)
        self.states.append(told(self.live))

    @property
    def active(self) -> JobHistory | None:
        return next(iter(self.live.pending()), None)

    def opens_epoch(self) -> None:
        self.append(EpochOpened(epoch=Epoch(self.live.epoch + 1), wall_s=float(len(self.log))))

    @rule()
    def a_job_comes(self) -> None:
        number = len(self.live.jobs) + 1
        submitted = JobSubmitted(job=JobId(f"small-{number}"), key=f"k{number}", spec=SPEC, wall_s=1.0)
        self.append(submitted)

    @precondition(lambda self: self.active is not None)
    @rule(names=WORKERS)
    def a_generation_is_opened(self, names: frozenset[str]) -> None:
        assert self.active is not None
        members = tuple(
            GenerationMember(worker=WorkerId(name), incarnation=Incarnation(f"{name}-{self.live.epoch}"))
            for name in sorted(names)
        )
        generation = Generation(self.live.generation + 1)
        job = self.active.job
        self.append(
            GenerationOpened(job=job, generation=generation, members=members, reason="test", wall_s=2.0)
        )
        self.append(PlanAdopted(job=job, generation=generation, plan=grid_plan()))

    @precondition(lambda self: self.active is not None)
    @rule(is_saved=st.booleans(), is_evaluated=st.booleans())
    def a_step_is_committed(self, is_saved: bool, is_evaluated: bool) -> None:
        assert self.active is not None
        job, version = self.active.job, self.active.version
        self.append(StepCommitted(job=job, record=record(version), wall_s=3.0))
        if is_saved:
            self.append(checkpoint(job, version + 1))
        if is_evaluated:
            after = Step(version + 1)
            self.append(Evaluated(job=job, version=after, loss=1.0, num_tokens=8, wall_s=3.5))

    @precondition(lambda self: self.active is not None and self.active.version > 0)
    @rule(share=st.floats(0.0, 1.0))
    def committed_steps_are_lost(self, share: float) -> None:
        assert self.active is not None
        job, version = self.active.job, self.active.version
        to = Step(int(share * version))
        self.append(RolledBack(job=job, from_version=version, to_version=to, reason="test", wall_s=4.0))
        self.append(incident(job))

    @precondition(lambda self: self.active is not None)
    @rule()
    def the_job_ends(self) -> None:
        assert self.active is not None
        self.append(JobEnded(job=self.active.job, state=JobState.FINISHED, reason="done", wall_s=5.0))

    @rule(num_lost=st.integers(0, 6))
    def the_process_dies(self, num_lost: int) -> None:
        """The successor opens an epoch on what there is."""
        num_kept = max(1, len(self.log) - num_lost)
        del self.log[num_kept:]
        del self.states[num_kept + 1 :]
        successor = Coordinator()
        successor.replay(self.log)
        assert told(successor.history) == self.states[-1]
        self.live = successor.history
        self.opens_epoch()

    @rule(share=st.floats(0.0, 1.0))
    def any_prefix_gives_the_state_that_was(self, share: float) -> None:
        num_records = int(share * len(self.log))
        replayed = History()
        for entry in self.log[:num_records]:
            replayed.apply(entry)
        assert told(replayed) == self.states[num_records]

    @invariant()
    def versions_are_steps_that_count(self) -> None:
        for job in jobs_of(self.log):
            version = 0
            for entry in self.log:
                if isinstance(entry, StepCommitted) and entry.job == job:
                    version += 1
                elif isinstance(entry, RolledBack) and entry.job == job:
                    version = entry.to_version
            assert self.live.jobs[job].version == version


TestLogThatLosesItsEnd = LogThatLosesItsEnd.TestCase
TestLogThatLosesItsEnd.settings = settings(max_examples=examples(60), stateful_step_count=30)
