"""Before steps are given up, everybody who may hold them is asked, and waited for unless their death was seen.

Rules of this file
- A plan that gives up steps, or replaces a lost stage by an average, is held back while somebody who may hold what it
  lacks is here and was not asked, or is silent and may live. It is put in place when that time is over.
- Whose death was seen is not waited for: going back then costs no time.
- The same before a run ends, at somebody's wish, without having saved steps that silent holders may have.
- While something is held back, members look at those who are silent: what they see ends the wait, or makes it longer.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.ending import rewind_of
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.placing.giving_up import LONGEST_S, clock_time, patience_s, waits_until
from skein.protocol.coordinator.runs.placing.holdings import Holdings
from skein.protocol.coordinator.runs.placing.sources import Sources
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import JobHistory
from skein.protocol.log.incident import short
from skein.protocol.log.records import GenerationMember, HaltAsked
from skein.protocol.membership.absence import Absence
from skein.protocol.membership.membership import Entry
from skein.protocol.messages.directives import ChunkVersion, Look, Member
from skein.protocol.messages.reports import Ack
from skein.types import Generation, Incarnation, StageSpec, Step, WorkerId
from skein.units import counted

LOOK_S = 1.0
"""Seconds between two looks of members at silent workers."""
NUM_LOOKING = 8
"""Members that look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """Action before a plan is put in place that would give steps up: ask newcomers, or wait for silent workers."""

    reason: str
    opens_generation: bool


class Asking(RunPart):
    """Questions of a run before it gives steps up. It says what happens, and asks before it puts a plan in place."""

    def __init__(
        self,
        members: Members,
        absence: Absence,
        holdings: Holdings,
        measured: Measured,
        *,
        now: float,
    ) -> None:
        super().__init__(members)
        self.outcome = ""
        """Fate of the workers that were waited for, for the record of a roll-back."""
        self._live = members.live
        self._absence = absence
        self._holdings = holdings
        self._measured = measured
        self._is_ending = False
        """A run that is to end waits for those who are silent."""
        self._since: float | None = None
        self._halted: tuple[HaltAsked | None, float] | None = None
        """Since when a run that is to end waits, at which wish; who comes and goes meanwhile does not begin it anew."""
        self._until = 0.0
        self._looks_at = 0.0
        self._told: tuple[WorkerId, ...] = ()
        self._told_of: dict[Incarnation, Step] = {}
        """Version that was told as given up, for each process that came back too late."""
        self._awaited = {m.incarnation for m in self._job.members if m.worker not in self._live}
        """Members that an earlier coordinator had."""
        self._begun_at = now

    # --- what happens ---

    def joined(self, entry: Entry, *, now: float) -> None:
        """A process is here."""
        incarnation = entry.hello.incarnation
        if incarnation in self._awaited:
            self._awaited.discard(incarnation)
            self._absence.came_back_after(now - self._begun_at)
        version = self._job.given_up.get(incarnation)
        if version is not None and self._told_of.get(incarnation) != version:
            self._told_of[incarnation] = version
            self._log(
                f"worker={entry.hello.worker} is back, too late: what it may hold of version "
                f"{version} was given up, and the job is at version {self._job.version}; it begins anew"
            )

    def opened(self, *, now: float) -> None:
        """A generation was opened: who may hold what nobody here does is looked at."""
        self._is_ending = False
        silent = self._silent()
        if self._job.version and silent and self._is_short():
            self._look(silent, now=now)

    def over(self) -> None:
        """Stop waiting: nothing has to be given up."""
        self._is_ending = False
        self._since = None
        self._told = ()

    def before(self, plan: Plan, *, now: float) -> First | None:
        """Whether `plan` is put in place now: None; else what is done first."""
        sources = self._holdings.sources(plan)
        self.outcome = ""
        if rewind_of(self._job) is not None or not _is_loss(sources, self._job):
            self.over()
            return None
        if self._since is None:
            self._since = now
        strangers = self._strangers()
        if strangers and now < self._since + LONGEST_S:
            reason = f"asking {short(strangers)} before steps are given up"
            return First(reason=reason, opens_generation=True)
        return self._wait(plan, sources, self._since, now=now)

    def before_ending(self, saved: Step, *, now: float) -> str | None:
        """For whom a run waits that is to end: who may have steps newer than version `saved`; None: for nobody."""
        job = self._job
        if self._halted is None or self._halted[0] is not job.halt:
            self._halted = job.halt, now
        since = self._halted[1]
        self.outcome, self._is_ending = "", False
        if job.version <= saved or job.plan is None:
            return None
        num_steps = job.version - saved
        ends_at = self._ends_at(num_steps * self._step_s(job.plan.plan), since)
        awaited = {member: held for member, held in self._silent().items() if now < ends_at[member]}
        here = {member: held for member, held in job.may_hold.items() if self._is_here(member)}
        acks = {worker: ack for worker, ack in self._members.acks.items() if worker in self._live}
        if not awaited or self._holdings.held(self._would_tell(here | awaited) | acks) is None:
            self._tell_outcome(ends_at.keys() - awaited.keys(), now - since)
            return None
        self._is_ending = True
        cost = f"they may have {counted(num_steps, 'step')} that no checkpoint has"
        return self._hold(awaited, ends_at, cost, now=now)

    def deadline(self, *, is_held_back: bool = False) -> float | None:
        """Time at which a plan that is held back, or the end of the run, is to be looked at again; else None."""
        return min(self._until, self._looks_at) if is_held_back or self._is_ending else None

    # --- whom to wait for, and how long ---

    def _wait(self, plan: Plan, sources: Sources, since: float, *, now: float) -> First | None:
        num_steps = self._job.version - sources.version
        ends_at = self._ends_at(num_steps * self._step_s(plan), since)
        awaited = {member: held for member, held in self._silent().items() if now < ends_at[member]}
        if not self._could_be_had(plan, sources, awaited):
            self._tell_outcome(ends_at.keys() - awaited.keys(), now - since)
            return None
        cost = f"going back would cost {counted(num_steps, 'step')}"
        if not num_steps:
            cost = "a stage would be made of its neighbours"
        return First(reason=self._hold(awaited, ends_at, cost, now=now), opens_generation=False)

    def _ends_at(self, cost_s: float, since: float) -> dict[GenerationMember, float]:
        """Time from which each silent process is not waited for any more."""
        patience = patience_s(cost_s=cost_s, silences_s=self._absence.silences_s)
        seen_at = self._absence.seen_at
        return {x: waits_until(since, patience, seen_at(x.incarnation)) for x in self._silent()}

    def _hold(
        self,
        awaited: Iterable[GenerationMember],
        ends_at: Mapping[GenerationMember, float],
        cost: str,
        *,
        now: float,
    ) -> str:
        """Waits for these, and says so."""
        members = tuple(awaited)
        self._until = min(ends_at[member] for member in members)
        if now >= self._looks_at:
            self._look(members, now=now)
        names = tuple(member.worker for member in members)
        until = clock_time(max(ends_at[member] for member in members))
        told = f"waiting for {short(names)} until {until}: {cost}"
        if names != self._told:
            self._log(told)
        self._told = names
        return told

    def _tell_outcome(self, given_up: Collection[GenerationMember], seconds: float) -> None:
        if given_up and self._told:
            names = short(sorted(member.worker for member in given_up))
            self.outcome = f"{names} did not come back within {seconds:.0f} s"
        self.over()

    def _step_s(self, plan: Plan) -> float:
        return self._measured.step_s or plan.predicted_step_s

    def _strangers(self) -> tuple[WorkerId, ...]:
        """Workers that are here, were not asked, and followed the job before."""
        may_know = self._job.followers - self._job.outdated
        return tuple(
            worker
            for worker, entry in sorted(self._live.items())
            if not self._members.is_this(entry) and entry.hello.incarnation in may_know
        )

    def _silent(self) -> dict[GenerationMember, frozenset[ChunkVersion]]:
        """Processes that are not here and may live, with what they may hold."""
        nothing: frozenset[ChunkVersion] = frozenset()
        known = dict.fromkeys(self._members.keepers, nothing) | self._job.may_hold
        return {
            member: chunks
            for member, chunks in sorted(known.items(), key=lambda item: item[0].worker)
            if member.worker not in self._live
            and not self._absence.is_dead(member.worker, member.incarnation)
        }

    def _is_short(self) -> bool:
        """Whether, by what is recorded, a stage may be held by nobody who is here."""
        plan = self._job.plan
        here = (
            {held.stage for held in chunks if held.version == self._job.version}
            for member, chunks in self._job.may_hold.items()
            if self._is_here(member)
        )
        return plan is None or not set(plan.plan.stages) <= set[StageSpec]().union(*here)

    def _is_here(self, member: GenerationMember) -> bool:
        entry = self._live.get(member.worker)
        return entry is not None and entry.hello.incarnation == member.incarnation

    def _could_be_had(
        self, plan: Plan, sources: Sources, silent: Mapping[GenerationMember, frozenset[ChunkVersion]]
    ) -> bool:
        """Whether less would be given up if those who are silent came back with all that they may hold."""
        if not silent:
            return False
        acks = {**self._members.acks, **self._would_tell(silent)}
        if self._holdings.held(acks) is not None:
            return True
        return _loss(self._holdings.sources(plan, acks)) < _loss(sources)

    def _would_tell(self, known: Mapping[GenerationMember, frozenset[ChunkVersion]]) -> dict[WorkerId, Ack]:
        """Acknowledgements that these processes would send if they have all that they may hold."""
        copies = self._members.keepers
        return {
            x.worker: Ack(
                generation=Generation(0), chunks=tuple(held), progress=(), backups=copies.get(x, ())
            )
            for x, held in known.items()
        }

    def _look(self, silent: Iterable[GenerationMember], *, now: float) -> None:
        self._looks_at = now + LOOK_S
        known = (
            Member(
                worker=member.worker,
                incarnation=member.incarnation,
                address=self._absence.address_of(member.incarnation) or member.address,
            )
            for member in silent
        )
        peers = tuple(member for member in known if member.address)
        for worker in list(self._live)[:NUM_LOOKING] if peers else ():
            self._members.tell(Look(peers=peers), worker)


def _is_loss(sources: Sources, job: JobHistory) -> bool:
    return sources.version < job.version or bool(sources.averaged)


def _loss(sources: Sources) -> tuple[int, int]:
    """More is worse."""
    return -sources.version, len(sources.averaged)
