"""A plan, from asking for it to chunks that are ready: what every worker is to hold, and where it comes from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from skein.plan.agreeing.broadcast import BroadcastProblem, parents_of
from skein.plan.changing.clauses import About, Clause
from skein.plan.changing.redundancy import shortfalls
from skein.plan.changing.reroute import renamed, rerouted, ways
from skein.plan.check import violations
from skein.plan.load import stage_loads
from skein.plan.plan import ChunkPlan, Plan
from skein.protocol.coordinator.coordinator_io import MakePlan, PlanMade
from skein.protocol.coordinator.runs.ending import LEARNING_RATE_RATIO, rewind_of
from skein.protocol.coordinator.runs.improving.replanning import SHORT_PAUSE_S, Backoff
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.placing.holdings import Holdings
from skein.protocol.coordinator.runs.placing.neighbours import neighbours_of
from skein.protocol.coordinator.runs.placing.planning import (
    fleet_of,
    recorded_plan,
    who_reads_other_data,
)
from skein.protocol.coordinator.runs.placing.resuming import Resumed, resume
from skein.protocol.coordinator.runs.placing.sources import Sources, assignments, choose_sources
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.records import Averaged, PlanAdopted, RolledBack
from skein.protocol.log.row_choices import choices_in_force
from skein.protocol.membership.membership import Entry
from skein.protocol.messages.directives import Resumption, StepRecord
from skein.protocol.messages.reports import ChunksReady
from skein.topology.fleet import Fleet, Link
from skein.topology.links import link_cost_s
from skein.types import ChunkRef, MicrobatchId, WorkerId


class Placement(RunPart):
    """The plan that is in place, and how it came there. Parts of the work of a run; the run says when."""

    def __init__(
        self,
        members: Members,
        holdings: Holdings,
        measured: Measured,
        links: Mapping[tuple[WorkerId, WorkerId], Link],
    ) -> None:
        super().__init__(members)
        self.plan: Plan | None = None
        self.chosen: Plan | None = None
        """Plan that the next generation is for, if it still fits then."""
        self.awaited: int | None = None
        """The question whose answer matters."""
        self.resumed: Resumed | None = None
        """Resumed step that the plan goes on with, until it is over."""
        self._is_begun = False
        """Whether every worker has what this plan gave it, and was told to begin a step."""
        self._whole: Plan | None = None
        """The plan as it was before workers were lost."""
        self._restored: Plan | None = None
        self._tried: tuple[tuple[ChunkPlan, ...], list[WorkerId]] | None = None
        self._tries = Backoff(last_pause_s=SHORT_PAUSE_S)
        """Pauses between tries to give these workers, beside these chunks, what was lost."""
        self._spec_json = self._job.spec.canonical_json()
        self._holdings = holdings
        self.links = links
        self._measured = measured

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """The step in progress is over."""
        self.resumed = None

    def choose(self, plan: Plan | None) -> None:
        """The next generation is for this plan, or for none that is known yet."""
        self.chosen = plan

    def forget_question(self) -> None:
        """Forget the question to the planner: its answer is of no use any more."""
        self.awaited = None

    @property
    def is_settled(self) -> bool:
        """Whether no other plan is chosen or asked for."""
        return self.chosen is None and self.awaited is None

    def take_chosen(self, candidates: Iterable[Entry]) -> Plan | None:
        """The chosen plan, if there is one and it fits those members that are candidates."""
        chosen, self.chosen = self.chosen, None
        if chosen is None or violations(chosen, self._job.spec, self._fleet(candidates)):
            return None
        return chosen

    def _fleet(self, candidates: Iterable[Entry]) -> Fleet:
        members = [entry for entry in candidates if self._members.is_this(entry)]
        return fleet_of(members, self.links, self._measured)

    def ask(self, candidates: Iterable[Entry]) -> Plan | None:
        """The recorded plan if it fits those members that are candidates; else a plan is asked for."""
        fleet = self._fleet(candidates)
        recorded = recorded_plan(self._job, fleet)
        if recorded is None:
            before = self.plan or self._adopted_before()
            # What is held does not tell who belongs to one walker.
            are_lines = self._job.spec.aggregation.walkers.are_lines
            self._ask(fleet, before if are_lines and before is not None else self._holdings.held() or before)
        return recorded

    def _adopted_before(self) -> Plan | None:
        """Plan of an earlier coordinator: its cut is that of what was computed since, and of checkpoints."""
        return None if self._job.plan is None else self._job.plan.plan

    def ask_beside(self, candidates: Iterable[Entry]) -> None:
        """Ask for a plan that could follow the present one, while that goes on."""
        self._ask(fleet_of(candidates, self.links, self._measured), self.plan)

    def tree(self, workers: Sequence[WorkerId], leader: int) -> tuple[int, ...]:
        """Parents by which what one of these has, by position, is handed on, along the fastest links."""
        cost = link_cost_s(fleet_of(self._members.entries_of(workers), self.links, self._measured))
        problem = BroadcastProblem(
            leader=leader,
            latency_s=cost.latency_s,
            bytes_per_s=cost.bytes_per_s,
            num_bytes=self._largest_bytes(),
        )
        return parents_of(problem.tree(), leader)

    def _largest_bytes(self) -> int:
        """Parameters of the largest stage."""
        assert self.plan is not None
        job = self._job.spec
        return max(load.parameter_bytes for load in stage_loads(job, self.plan.stages))

    def _ask(self, fleet: Fleet, previous: Plan | None) -> None:
        self.awaited = self._out.next_request()
        asked = MakePlan(
            request=self.awaited,
            run=self._job.job,
            job=self._job.spec,
            fleet=fleet,
            previous=previous,
            steps_left=self._job.total_steps - self._job.version,
        )
        self._out.do(asked)

    def is_answer(self, made: PlanMade) -> bool:
        """Whether this is what was asked last, and is waited for still."""
        is_answer = made.request == self.awaited
        self.awaited = None if is_answer else self.awaited
        return is_answer

    def expected(self) -> Mapping[ChunkRef, tuple[MicrobatchId, ...]]:
        """The ledger that each chunk will have at the end of the present step."""
        assert self.plan is not None
        return self.plan.microbatches_by_chunk() if self.resumed is None else self.resumed.expected

    def resume(self, entries: Iterable[Entry], *, anew: Plan | None = None) -> Resumed | None:
        """The step in progress, if these members can go on with it by the plan that it was begun with.

        `anew`: by this plan, and nothing that was done of it counts.
        """
        members = [entry for entry in entries if self._members.is_this(entry)]
        if self._job.version >= self._job.total_steps or rewind_of(self._job) is not None:
            return None
        if not self._job.spec.aggregation.walkers.have_equal_holders:
            # Nobody else has the lost one's parameters, so nobody can take over its part of this step.
            return None
        acks = {entry.hello.worker: self._members.acks[entry.hello.worker] for entry in members}
        if anew is not None or (self._job.turned_at == self._job.version and not self._is_begun):
            # Who has not built what is new tells of the step as it was before.
            acks = {worker: replace(ack, progress=()) for worker, ack in acks.items()}
        may_drop = self._job.spec.recovery == "best_effort"
        # Who was lost by the plan before may be back, with all that it had done.
        before = (self._whole, self.plan or self._adopted_before()) if anew is None else (anew,)
        for plan in before:
            if plan is None:
                continue
            version = self._job.version
            resumed = resume(plan, acks, version=version, may_drop=may_drop, present=self.plan)
            if resumed is not None and not violations(resumed.plan, self._job.spec, self._fleet(members)):
                return resumed
        return None

    def restored(self, candidates: Iterable[Entry], *, now: float) -> Plan | None:
        """The plan as it was before losses, as far as there are workers for it; None if that is no more than now.

        Whoever is new takes the place of one who is gone.
        """
        present, whole = self.plan, self._whole
        if present is None or whole is None:
            return None
        listed = list(candidates)
        here = [entry.hello.worker for entry in listed]
        if not self._job.spec.aggregation.walkers.have_equal_holders:
            return None
        if not self._may_try(present, here, now=now):
            return None
        gone = [worker for worker in whole.workers if worker not in here]
        spare = [worker for worker in here if worker not in whole.workers]
        names = dict(zip(gone, spare, strict=False))
        filled = renamed(whole, names)
        alive = {x.chunk for x in filled.chunks if x.chunk.worker in here}
        plan = filled if len(alive) == len(filled.chunks) else rerouted(filled, alive, {})
        if plan is None or len(plan.chunks) <= len(present.chunks):
            return None
        if violations(plan, self._job.spec, fleet_of(listed, self.links, self._measured)):
            return None
        back = sorted(set(plan.workers).difference(present.workers))
        clause = Clause(f"{', '.join(back)} again", About.BACK)
        self._restored = replace(plan, reason=whole.reason.before(About.BACK).then(clause))
        return self._restored

    def _may_try(self, present: Plan, here: list[WorkerId], *, now: float) -> bool:
        """Whether to look now for what these workers could be given; from now on it was tried."""
        if self._tried != (present.chunks, here):
            self._tried = present.chunks, here
            self._tries = Backoff(last_pause_s=SHORT_PAUSE_S)
        if not self._tries.may(now=now):
            return False
        self._tries.happened(now=now)
        return True

    def begun(self) -> None:
        """Note that every worker has what the plan gave it, and is told to begin a step, or to go on with it."""
        self._is_begun = True

    def go_on(self, resumed: Resumed) -> Plan:
        """Record the plan without those who are gone, and have the step in progress go on by it; gives that plan."""
        if resumed.num_rerouted or resumed.plan.chunks != (self.plan or resumed.plan).chunks:
            before, after = set((self.plan or resumed.plan).workers), set(resumed.plan.workers)
            gone, back = sorted(before - after), sorted(after - before)
            clause = Clause(", ".join(gone) or "some chunks", About.GONE)
            if back and not gone:
                clause = Clause(f"{', '.join(back)} again", About.BACK)
            reason = resumed.plan.reason.before(About.GONE).before(About.BACK).then(clause)
            plan = replace(resumed.plan, reason=reason)
            resumed = replace(resumed, plan=plan)
            if self._whole is None and self.plan is not None:
                self._whole = self.plan
        self.resumed = resumed
        sources = choose_sources(
            resumed.plan,
            self._members.acks,
            version=self._job.version,
            checkpoint=None,
            job=self._job,
        )
        self._adopt(resumed.plan, sources, resumed.resumptions)
        return resumed.plan

    def put(self, plan: Plan, *, because: str = "", now: float) -> Sources:
        """Record the plan and assign it, after a recorded roll-back or average if a stage is held by nobody.

        Args:
            plan: to be put in place.
            because: what is to be said of a roll-back, beyond what nobody holds.
            now: seconds.
        """
        self.resumed = None
        self._is_begun = False
        if self._whole is not None and (
            plan is not self._restored or len(plan.chunks) >= len(self._whole.chunks)
        ):
            self._whole = None
        before = self._job.plan
        if before is not None and self._job.version and ways(before.plan) != ways(plan):
            clause = Clause("microbatches visit other stages than before, or in another order")
            plan = replace(plan, reason=plan.reason.saying(clause))
        sources = self._holdings.sources(plan)
        if sources.averaged:
            self._average(sources, now=now)
        self._roll_back_to(sources, because, now=now)
        self._holdings.gave(sources)
        self._adopt(plan, sources, {})
        return sources

    def _adopt(self, plan: Plan, sources: Sources, resumptions: Mapping[WorkerId, Resumption]) -> None:
        job = self._job
        self.plan = plan
        self._out.record(PlanAdopted(job=job.job, generation=job.generation, plan=plan))
        self._log(f"generation={job.generation} plan: {plan.reason}")
        for found in shortfalls(plan, job.spec, self._members.fleet):
            self._log(f"generation={job.generation} short: {found.words}")
        trained_on = self._out.history.trained_on(job)
        told = assignments(
            plan,
            sources,
            job=job.job,
            job_spec=self._spec_json,
            resumptions=resumptions,
            begins=job.begins,
            choices=choices_in_force(job.chosen, job.places),
            data_fingerprint="" if trained_on is None else trained_on.fingerprint,
        )
        self._members.assign(told, neighbours_of(plan))

    def _average(self, sources: Sources, *, now: float) -> None:
        """Record that these stages are others from here on: what is known of them elsewhere does not count."""
        job, version, stages = self._job.job, sources.version, sources.averaged
        self._members.free_strangers()
        self._out.record(Averaged(job=job, version=version, stages=stages, wall_s=now))
        named = ", ".join(str(stage.index) for stage in stages)
        self._log(f"version={version} averaged stage {named} of its neighbours: no worker holds it")

    def _roll_back_to(self, sources: Sources, because: str, *, now: float) -> None:
        """Record a roll-back, if any: newer state does not count, nor do those who may hold it and were not asked."""
        job, version = self._job.job, self._job.version
        if sources.version == version:
            return
        self._members.free_strangers()
        stages = ", ".join(str(stage.index) for stage in sources.unheld)
        reason = f"no worker holds stage {stages} at version {version}" + (f"; {because}" if because else "")
        rewind = rewind_of(self._job)
        back = RolledBack(
            job=job,
            from_version=version,
            to_version=sources.version,
            reason=reason if rewind is None else rewind.reason,
            wall_s=now,
            learning_rate_ratio=None if rewind is None else LEARNING_RATE_RATIO,
        )
        self._out.record(back)
        rate = (
            "" if rewind is None else f"; on with {self._job.learning_rate_ratio:g} times the learning rate"
        )
        self._log(f"rolled back from={version} to={sources.version}: {back.reason}{rate}")

    def is_built(self, worker: WorkerId, report: ChunksReady) -> bool:
        """A worker has its chunks: whether all have."""
        if not self._members.built(worker, report):
            return False
        assert self.plan is not None
        self._holdings.built(self.plan)
        return True

    def odd_readers(self) -> tuple[WorkerId, ...]:
        """Origins that read other data than the job was trained on, or before its first step than the rest."""
        members, version = self._members, self._job.version
        trained_on = self._out.history.trained_on(self._job)
        return who_reads_other_data(
            self.origins(), members.ready, members.acks, version=version, trained_on=trained_on
        )

    def data_of_all(self) -> ChunksReady:
        """Report of the first origin, which all others equal: a worker that reads other data is no origin."""
        return self._members.ready[self.origins()[0]]

    def origins(self) -> list[WorkerId]:
        """Workers at which paths begin: they read data."""
        assert self.plan is not None
        paths = (*self.plan.paths, *self.plan.evaluation_paths)
        return sorted({path.hops[0].worker for path in paths})
