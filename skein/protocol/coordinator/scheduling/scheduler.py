"""The scheduler: which jobs have a run, and which workers each run has. It asks the rule, and carries out its answer.

Rules of this file
- A worker goes from one run to another at the end of a step, as one that is drained does: its run plans without it,
  lets it go, and only then it is anybody else's. So it holds nothing of the first when the second gets it.
- A process that comes back goes back to the run that had it last.
- After a loss that a job misses, and after a start of the coordinator, nobody is moved for a while that its job can
  use: who is away may come back.
- One job that takes whatever there is has everybody, as if there were no scheduler.
"""

from collections.abc import Callable, Collection, Mapping
from math import inf

from skein.config.job import JobSpec
from skein.config.quota import UNBOUNDED, QuotasSpec
from skein.protocol.coordinator import lifecycle
from skein.protocol.coordinator.coordinator_io import Outbox
from skein.protocol.coordinator.runs.placing.planning import num_wanted
from skein.protocol.coordinator.runs.run import Run
from skein.protocol.coordinator.scheduling.crews import Crews
from skein.protocol.coordinator.scheduling.fitting import Fitting
from skein.protocol.coordinator.scheduling.sharing import JobAsk, NamespaceLimits, Shares, WorkerStand, share
from skein.protocol.log.history import JobHistory
from skein.protocol.membership import membership
from skein.protocol.messages.directives import Dismiss
from skein.types import Incarnation, JobId, WorkerId

SETTLE_S = 5.0
"""Seconds after such a loss, or a start of the coordinator, in which no worker is moved that its job can use."""
LATE_S = 5.0
"""Seconds that a job waits for workers of its gang that were called away for it, before it begins with fewer."""
LOOK_S = 1.0
"""Seconds between two looks at who should be where, while nothing tells of a change."""
SMALL_S = 5.0
"""Seconds for which a job works on fewer workers than its gang until those are all that it is sure to keep."""
_MOVED = "is with another job"

Live = Mapping[WorkerId, membership.Entry]
Begin = Callable[[JobHistory, Live, float], Run]


class Scheduler:
    """Runs of a coordinator and their crews. `begin` makes the run of a job, with its crew, at a time."""

    def __init__(self, live: Live, outbox: Outbox, begin: Begin, quotas: QuotasSpec = UNBOUNDED) -> None:
        self.runs: dict[JobId, Run] = {}
        self.waits: dict[JobId, str] = {}
        """Jobs that wait for workers, each with what it waits for."""
        self.kept_for: Mapping[WorkerId, JobId] = {}
        """Workers on which no job starts but the one named, which has waited for long."""
        self._live = live
        self._out = outbox
        self._begin = begin
        self._quotas = quotas
        self._crews = Crews()
        self._fitting = Fitting(live)
        self._is_started = False
        self._is_changed = True
        self._looks_at = 0.0
        self._had_choice = True
        """Whether there was anything to decide when it was looked at last: only what is recorded since changes it."""
        self._small_since: dict[JobId, float] = {}
        self._settles_at = 0.0
        self._without_since: dict[JobId, float] = {}
        """Times since which runs are without their gang."""

    def run_of(self, worker: WorkerId) -> Run | None:
        """The run that a worker is with."""
        job = self._crews.owner(worker)
        return None if job is None else self.runs[job]

    def crew(self, job: JobId) -> tuple[WorkerId, ...]:
        """Workers that are with the run of a job, sorted."""
        return self._crews.names(job)

    def spare(self, job: JobHistory) -> int:
        """Workers that nobody has or waits for and a job may be given; below 0: those that are lacking."""
        owners = [self.run_of(worker) for worker in self.usable(job)]
        num_free = sum(run is None or run.has_ended for run in owners)
        waiting = [x for x in self._pending() if x.job not in self.runs or not self._crews.of(x.job)]
        # Whoever waits takes of its namespace's quota too.
        num_own = sum(other.namespace == job.namespace for other in waiting)
        return int(min(num_free - len(waiting), self._room(job) - num_own))

    def usable(self, sweep: JobHistory) -> list[WorkerId]:
        """Workers that may have arrays of a sweep, and have memory for a row at least."""
        may_use = self._may_use(sweep.job, sweep.spec)
        return [
            worker for worker in sorted(may_use) if self._fitting.lacks(sweep, frozenset({worker})) is None
        ]

    def deadline(self) -> float | None:
        """Time at which `look` is wanted next; None: it is not."""
        return self._looks_at if self._had_choice and self._has_choice() else None

    # --- what happens ---

    def asked(self) -> None:
        """A client wants something, which may decide who should be where."""
        self._is_changed = True

    def changed(self, change: membership.MembershipChange, *, now: float) -> Run | None:
        """A worker came, went or wants to go; gives the run that is to hear of it."""
        self._is_changed = True
        worker = change.worker
        match change:
            case membership.IncarnationJoined():
                self._joined(worker)
            case membership.Lost():
                return self._lost(worker, now=now)
            case _:
                pass
        return self.run_of(worker)

    def _joined(self, worker: WorkerId) -> None:
        """A worker is with the run that had it last, or is free."""
        job = self._home(self._live[worker].hello.incarnation)
        if job is not None:
            self._crews.take(job, self._live[worker])

    def _home(self, incarnation: Incarnation) -> JobId | None:
        """The run that waits for a process, or had it last; else the only run, if that takes everybody."""

        def claim(run: Run) -> tuple[bool, int]:
            had_it = any(member.incarnation == incarnation for member in run.job.members)
            return run.may_await(incarnation), int(run.job.generation) if had_it else 0

        claims = {job: claim(run) for job, run in self.runs.items()}
        best = max(claims, key=lambda job: claims[job], default=None)
        if best is None or not any(claims[best]):
            return next(iter(self.runs), None) if not self._has_choice() else None
        return best

    def _lost(self, worker: WorkerId, *, now: float) -> Run | None:
        """A worker is gone; gives the run that it was with."""
        job = self._crews.lose(worker)
        run = None if job is None else self.runs[job]
        # Who stood by for a run is missed by nobody, however often it comes and goes.
        is_missed = run is not None and (run.plan is None or worker in run.plan.workers)
        if is_missed and now >= self._settles_at:
            self._settles_at = now + SETTLE_S
        return run

    # --- what should be ---

    def look(self, *, now: float) -> None:
        """Begin the runs of jobs whose turn it is, and have workers go where they should be."""
        self._forget_ended()
        self._begin_at_once(now=now)
        self._had_choice = self._has_choice()
        if not self._had_choice:
            self.waits.clear()
            self.kept_for = {}
            self._have_all(now=now)
            return
        while self._is_changed or now >= self._looks_at:
            self._is_changed, self._looks_at = False, now + LOOK_S
            if now < self._settles_at:
                # The next loss may have things settle anew: until then those who wait get what is theirs.
                self._looks_at = min(self._looks_at, self._settles_at)
            self._note_small(now=now)
            shares = share(self._asks(now=now), self._stands())
            self._without_since = {
                x: self._without_since.get(x, now) for x in shares.without & self.runs.keys()
            }
            self.kept_for = shares.kept_for
            self._put(shares, now=now)
            self._forget_ended()
        self._release(now=now)

    def _forget_ended(self) -> None:
        for job in [job for job, run in self.runs.items() if run.has_ended]:
            del self.runs[job]
            self._crews.close(job)
            self._is_changed = True

    def _pending(self) -> list[JobHistory]:
        return self._out.history.pending()

    def _has_choice(self) -> bool:
        """Whether there is anything to decide: several jobs, or one that does not take everybody."""
        pending = self._pending()
        return len(pending) > 1 or any(self._is_bounded(job) for job in pending)

    def _is_bounded(self, job: JobHistory) -> bool:
        """Whether a job, or its namespace, is not to have all that there is."""
        quota = self._quotas.of(job.namespace)
        return bool(quota.workers or quota.running_jobs) or not job.spec.resources.takes_all

    def _limits(self, job: JobHistory) -> NamespaceLimits:
        quota = self._quotas.of(job.namespace)
        return NamespaceLimits(num_workers=quota.workers or inf, num_jobs=quota.running_jobs or inf)

    def _room(self, job: JobHistory) -> float:
        """Workers that a job may be given now: who was called away counts until its run has let it go."""
        limits, num_workers, others = self._limits(job), 0, set[JobId]()
        for other, run in self.runs.items():
            if run.job.namespace == job.namespace and self._crews.of(other):
                num_workers += len(self._crews.of(other))
                others.add(run.job.asked_as)
        is_one_more = len(others - {job.asked_as}) < limits.num_jobs
        return limits.num_workers - num_workers if is_one_more else 0

    def _num_least_of(self, job: JobHistory, num_here: int) -> int:
        """Gang of a job where it may use so many workers, as far as its namespace may have them."""
        return num_least(job.spec, int(min(num_here, self._limits(job).num_workers)))

    def _begin_at_once(self, *, now: float) -> None:
        """Begin what an earlier coordinator had begun, what is to end, and the first job if none is under way."""
        if not self._is_started:
            self._is_started = True
            self._settles_at = now + SETTLE_S if self._pending() else 0.0
            for job in self._pending():
                if job.members:
                    self._start(job, (), now=now)
        for job in self._pending():
            if job.halt is not None and job.job not in self.runs:
                self._start(job, (), now=now)
        while not self.runs and (waiting := self._pending()):
            first = min(waiting, key=lambda job: -job.spec.priority)
            free = () if self._has_choice() else tuple(self._live)
            self._start(first, free, now=now)

    def _start(self, job: JobHistory, workers: tuple[WorkerId, ...], *, now: float) -> None:
        """Begin the run of a job with these free workers, unless what it begins with is no more."""
        if lifecycle.end_unbegun(job, self._out.history, self._out, now=now):
            return
        crew = self._crews.open(job.job)
        for worker in workers:
            self._crews.take(job.job, self._live[worker])
        run = self.runs[job.job] = self._begin(job, crew, now)
        for worker in workers:
            run.met(worker)
        run.tick(now=now)
        self._forget_ended()

    def _have_all(self, *, now: float) -> None:
        """Give the only run everybody who is free."""
        for job, run in self.runs.items():
            for worker in self._crews.called:
                self._crews.keep(self._live[worker])
            if len(self._crews) == len(self._live):
                return  # As at almost every event.
            for worker in [worker for worker in self._live if self._crews.owner(worker) is None]:
                self._take(job, run, worker, now=now)

    def _take(self, job: JobId, run: Run, worker: WorkerId, *, now: float) -> None:
        entry = self._live[worker]
        self._have_forget_others(job, run, entry)
        self._crews.take(job, entry)
        run.changed(membership.IncarnationJoined(worker=worker), now=now)
        if entry.is_leaving:
            run.changed(membership.IsLeaving(worker=worker), now=now)

    def _have_forget_others(self, job: JobId, run: Run, entry: membership.Entry) -> None:
        """Have a worker forget the job that it had when it was lost: it would take no request of another job."""
        incarnation = entry.hello.incarnation
        if incarnation not in run.job.followers:
            self._out.send(Dismiss(job=None, may_exit=False), entry.process)
            return
        for other in self._pending():
            if other.job != job and incarnation in other.followers:
                self._out.send(Dismiss(job=other.job, may_exit=False), entry.process)

    # --- facts ---

    def _note_small(self, *, now: float) -> None:
        small = {
            job
            for job, run in self.runs.items()
            if run.plan is not None and 0 < self._num_used(job) < self._num_least_of(run.job, len(self._live))
        }
        self._small_since = {job: self._small_since.get(job, now) for job in small}

    def _num_used(self, job: JobId) -> int:
        plan = self.runs[job].plan
        return 0 if plan is None else len(self._crews.of(job).keys() & set(plan.workers))

    def _num_least(self, job: JobHistory, num_here: int, *, now: float) -> int:
        """Gang of a job; of one that has worked on fewer for a while, those."""
        least = self._num_least_of(job, num_here)
        small_since = self._small_since.get(job.job)
        is_small = small_since is not None and now >= small_since + SMALL_S
        return min(least, self._num_used(job.job)) if is_small else least

    def _waited_s(self, job: JobHistory, *, now: float) -> float:
        """Seconds that a job has waited for its gang; of one that never had any, also across coordinators."""
        since = self._without_since.get(job.job, now) if job.job in self.runs else job.last_wall_s
        return max(0.0, now - since)

    def _asks(self, *, now: float) -> list[JobAsk]:
        return [self._ask(job, now=now) for job in self._pending()]

    def _ask(self, job: JobHistory, *, now: float) -> JobAsk:
        spec, run = job.spec, self.runs.get(job.job)
        may_use = self._may_use(job.job, spec)
        least = self._num_least(job, len(may_use), now=now)
        return JobAsk(
            job=job.job,
            number=job.number,
            asked_as=job.asked_as,
            namespace=job.namespace,
            limits=self._limits(job),
            priority=spec.priority,
            used_s=self._out.history.used_s(job.namespace, now=now),
            waited_s=self._waited_s(job, now=now),
            is_active=run is not None,
            num_least=least,
            num_useful=max(self._num_least_of(job, len(may_use)), num_wanted(spec.parallel)),
            num_most=min(spec.resources.max_workers or len(self._live), self._limits(job).num_workers),
            may_use=may_use,
            fits=lambda workers: self._fitting.lacks(job, workers) is None,
        )

    def _may_use(self, job: JobId, spec: JobSpec) -> frozenset[WorkerId]:
        resources, run = spec.resources, self.runs.get(job)
        excluded = self._out.history.jobs[job].quarantined if run is None else run.excluded
        return frozenset(
            worker
            for worker, entry in self._live.items()
            if not entry.is_leaving
            and worker not in excluded
            and resources.allows(entry.hello.site, entry.hello.labels)
        )

    def _stands(self) -> list[WorkerStand]:
        plans = [run.plan for run in self.runs.values() if run.plan is not None]
        places: dict[WorkerId, int] = {}
        for holders in [plan.holders(stage.index) for plan in plans for stage in plan.stages]:
            for place, worker in enumerate(holders):
                places[worker] = min(place, places.get(worker, place))
        return [
            WorkerStand(
                worker=worker,
                owner=owner,
                place=places.get(worker, inf),
                bound_for=self._crews.bound_for(worker),
                memory_bytes=self._memory_bytes(worker),
            )
            for worker in sorted(self._live)
            if not self._live[worker].is_leaving
            for owner in (self._crews.owner(worker),)
        ]

    def _memory_bytes(self, worker: WorkerId) -> int:
        return self._live[worker].hello.profile.memory_bytes

    # --- carrying it out ---

    def _put(self, shares: Shares, *, now: float) -> None:
        """Have everybody go where the rule wants them, as far as they may now."""
        for job in self._pending():
            self.waits.pop(job.job, None)
            if job.job not in self.runs:
                self._start_with_gang(job, shares, now=now)
            elif not self._crews.of(job.job):
                self.waits[job.job] = self._why(job, shares)
        for worker, wanted in shares.by_worker.items():
            owner = self._crews.owner(worker)
            if owner is None:
                if wanted is not None and wanted in self.runs and self._room(self.runs[wanted].job) >= 1:
                    self._take(wanted, self.runs[wanted], worker, now=now)
            elif owner == wanted:
                self._crews.keep(self._live[worker])
            elif now >= self._settles_at or worker in self.runs[owner].excluded:
                self._call(worker, self.runs[owner], wanted, now=now)

    def _start_with_gang(self, job: JobHistory, shares: Shares, *, now: float) -> None:
        """Begin a job if all of a gang is free; else say what it waits for.

        Workers that are late, for their run cannot save what they hold for instance, count as if they were not here.
        """
        wanted = shares.of(job.job)
        free = frozenset(worker for worker in wanted if self._crews.owner(worker) is None)
        is_late = any(now >= self._crews.called_at(worker) + LATE_S for worker in wanted - free)
        least = self._num_least_of(job, len(free if is_late else self._may_use(job.job, job.spec)))
        has_room = 0 < len(free) <= self._room(job)
        if has_room and len(free) >= least and self._fitting.lacks(job, free) is None:
            self._start(job, tuple(worker for worker in self._live if worker in free), now=now)
        else:
            self.waits[job.job] = self._why(job, shares)

    def _why(self, job: JobHistory, shares: Shares) -> str:
        """Reason why a job has no workers yet, in words."""
        may_use, where = self._may_use(job.job, job.spec), job.spec.resources.where
        least = self._num_least_of(job, len(may_use))
        coming = [worker for worker in shares.of(job.job) if self._crews.owner(worker) is not None]
        if job.job in shares.limited or (not coming and self._room(job) < len(shares.of(job.job))):
            return self._what_limits(job)
        if coming:
            return f"waiting for {', '.join(sorted(coming))} to end a step of another job"
        if len(may_use) < least or not may_use:
            return f"waiting for workers: it wants {least} at least{where}, and {len(may_use)} are here"
        roomy = sorted(sorted(may_use), key=self._memory_bytes, reverse=True)[
            : job.spec.resources.max_workers
        ]
        if (lacking := self._fitting.lacks(job, frozenset(roomy))) is not None:
            return f"waiting for other workers{where}: {lacking}"
        wants = f"it wants {least} of {len(may_use)} workers{where} at least"
        kept_for = sorted({shares.kept_for[worker] for worker in may_use & shares.kept_for.keys()})
        if kept_for and job.job not in kept_for:
            longer = self._whom(job, kept_for)
            return f"waiting behind {longer}: {wants}, and free ones are kept for who has waited for so long"
        others = self._whom(job, [other for other in self.runs if self._crews.of(other)])
        kept = "; no other job starts on what comes free" if kept_for else ""
        return f"waiting for {others}: {wants}, and they keep theirs{kept}"

    def _what_limits(self, job: JobHistory) -> str:
        """Quota of a job's namespace that keeps workers from it, in words."""
        limits = self._limits(job)
        crews = [
            (run.job.asked_as, self._crews.of(x))
            for x, run in self.runs.items()
            if run.job.namespace == job.namespace and x != job.job
        ]
        num_workers = sum(len(crew) for _, crew in crews)
        num_jobs = len({asked for asked, crew in crews if crew} - {job.asked_as})
        has = f"{num_workers} workers, {limits.num_workers:g} at most"
        if num_jobs >= limits.num_jobs:
            has = f"{num_jobs} jobs with workers, {limits.num_jobs:g} at most"
        return f"waiting for its namespace's quota: {job.namespace} has {has}"

    def _whom(self, job: JobHistory, others: Collection[JobId]) -> str:
        """Other jobs in words, by their names as far as they are the same namespace's."""
        own = [other for other in others if self._out.history.jobs[other].namespace == job.namespace]
        return ", ".join([*own, *(["other namespaces"] if len(own) < len(others) else [])])

    def _call(self, worker: WorkerId, run: Run, job: JobId | None, *, now: float) -> None:
        """Call a worker away from its run, for another job or none."""
        if self._crews.call(self._live[worker], job, now=now):
            self._out.log(f"worker={worker} is to go to {job or 'nobody'}", job=run.job.job)
            run.changed(membership.IsLeaving(worker=worker), now=now)

    def _release(self, *, now: float) -> None:
        """Free those that were called away, once their runs can spare them."""
        released = [x for x in self._crews.called if (run := self.run_of(x)) is None or run.may_spare(x)]
        for worker in released:
            entry, run = self._live[worker], self.run_of(worker)
            assert run is not None
            self._out.send(Dismiss(job=run.job.job, may_exit=entry.is_leaving), entry.process)
            self._crews.lose(worker)
            gone = membership.Lost(
                worker=worker,
                incarnation=entry.hello.incarnation,
                reason=_MOVED,
                silent_s=0.0,
                is_final=False,
            )
            run.released(gone, now=now)
        if released:
            self._is_changed = True
            self.look(now=now)


def num_least(spec: JobSpec, num_here: int) -> int:
    """Workers without which a job does not start, and below which it is not shrunk, where so many could be used.

    Replicas that are walkers of their own would end with their workers, so none is taken from them.
    """
    if spec.resources.min_workers is not None:
        return spec.resources.min_workers
    parallel, walkers = spec.parallel, spec.aggregation.walkers
    whole = parallel.stages if walkers.have_equal_holders else num_wanted(parallel)
    most = spec.resources.max_workers or whole
    return max(1, min(whole, most, num_here))
