"""The Coordinator machine: membership, the queue of jobs, and the runs of those that are active.

Rules of this file
- What is recorded changes through `History.apply` alone, live as in replay; so equal logs give equal hard state.
- A command that follows an Append must not be carried out before that record is durable.
- Each job that is active has a run, and each run a crew of workers of its own (`scheduling`); the others wait.
- A report that cannot be is its worker's failure, whatever it was about; who sends several is turned away.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf
from types import MappingProxyType
from typing import assert_never

from skein.config.quota import UNBOUNDED, QuotasSpec
from skein.protocol.coordinator import coordinator_io as io
from skein.protocol.coordinator import lifecycle
from skein.protocol.coordinator.quotas import OverQuotaError, QuotaUses
from skein.protocol.coordinator.relaying import Pair, Relaying, Told
from skein.protocol.coordinator.remeasuring import JobPace, Pacing, Remeasuring
from skein.protocol.coordinator.reprobing import Reprobing
from skein.protocol.coordinator.runs.checkpoints.storage import judge_checkpoint
from skein.protocol.coordinator.runs.parts import Parts
from skein.protocol.coordinator.runs.run import Run
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.runs.workers.plausible import implausible
from skein.protocol.coordinator.scheduling.scheduler import Scheduler
from skein.protocol.coordinator.sweeping.sweeps import Sweeps
from skein.protocol.coordinator.view import CoordinatorView, RunView
from skein.protocol.deadline import TimePassed
from skein.protocol.log.history import History, HistoryHead, JobHistory, KnownJob
from skein.protocol.log.records import Drained, EpochOpened, JobSubmitted, Record
from skein.protocol.log.shelved import Fetch
from skein.protocol.membership import membership
from skein.protocol.membership.absence import Absence
from skein.protocol.messages import reports
from skein.protocol.messages.directives import Dismiss, Measure, OtherLog, Probe, Refused, Welcome
from skein.protocol.messages.positions import LogPosition
from skein.topology.fleet import Link
from skein.types import DEFAULT_NAMESPACE, Incarnation, JobId, WorkerId

NUM_PROBED_PEERS = 16
"""A newcomer measures at most so many links; the rest stay unknown."""
MAX_LINKS = 1 << 16
"""Above it those of workers that are gone are forgotten; who comes and goes has a new name each time."""

MAX_REFUSED = 3
"""Reports that cannot be, after which their process is turned away; steps that others commit meanwhile pardon none."""

MAX_REFUSED_LOGS = 4096
"""Workers whose refusal over another run log is remembered, so that each is logged once."""

MAX_MEASURED = 16
"""Jobs whose times are kept to be looked at."""


class Coordinator:
    """All that one coordinator knows. `handle` is the only way in, what it returns the only way out."""

    def __init__(
        self,
        *,
        lease_s: float = membership.LEASE_S,
        grace_s: float = membership.GRACE_S,
        key: bytes = b"",
        quotas: QuotasSpec = UNBOUNDED,
    ) -> None:
        """`key` is random, and of this process alone: its generations' secrets are made of it."""
        self.history = History()
        self.membership = membership.Membership(lease_s=lease_s, grace_s=grace_s)
        self.absence = Absence()
        self.links: dict[tuple[WorkerId, WorkerId], Link] = {}
        self.measured: dict[JobId, Measured] = {}
        """Times of the jobs that are active and of those before them."""
        self._quotas = quotas
        self._outbox = io.Outbox(self.history, key=key)
        self._scheduler = Scheduler(self.membership.live, self._outbox, self._begin, quotas)
        self._sweeps = Sweeps(self.membership.live, self._scheduler, self._outbox)
        self._remeasuring = Remeasuring()
        self._pacing = Pacing()
        self._relaying = Relaying(self.membership.live, self._outbox.to_probe)
        self._reprobing = Reprobing(self.membership.live, self._relaying.dials)
        self._num_refused: Counter[Incarnation] = Counter()
        self._refused_logs: dict[WorkerId, str] = {}
        """Reason by worker for which it was refused last over its run log, until it is welcome."""

    def sign_with(self, log_key: bytes) -> None:
        """Before the first event: the key that positions of the run log are signed with."""
        self._outbox.sign_with(log_key)

    def replay(self, records: Iterable[Record]) -> None:
        """Take the run log, before the first event. The last record opens this coordinator's own epoch."""
        for record in records:
            self.history.apply(record)
            if isinstance(record, Drained):
                self.membership.handle(
                    membership.LeaveRemembered(incarnation=record.incarnation), now=record.wall_s
                )
            elif isinstance(record, EpochOpened):
                self._remember_names(now=record.wall_s)

    def recall(self, head: HistoryHead, jobs: Iterable[KnownJob], fetch: Fetch) -> None:
        """Begin with a snapshot of the run log, before any record; see `History.restore`."""
        self.history.restore(head, jobs, fetch)
        for incarnation in sorted(self.history.drained):
            self.membership.handle(membership.LeaveRemembered(incarnation=incarnation), now=0.0)
        for opening in self.history.openings[-1:]:
            self._remember_names(now=opening.record.wall_s)

    def _remember_names(self, *, now: float) -> None:
        for job in self.history.pending():
            for member in job.members:
                self.membership.handle(membership.NameRemembered(member=member), now=now)

    # --- the way in ---

    def handle(self, event: io.CoordinatorEvent, *, now: float) -> list[io.CoordinatorCommand]:
        """Take one event at time `now` (wall clock seconds, never stepping back); gives what to do, in order."""
        match event:
            case io.ReportArrived():
                self._report(event.worker, event.incarnation, event.report, now=now)
            case io.ReportRefused():
                self._refused(event, now=now)
            case io.StreamBroken():
                broke = membership.StreamBroke(worker=event.worker, incarnation=event.incarnation)
                self._hear(broke, now=now)
            case io.SubmitAsked():
                self._submit(event, now=now)
            case io.CancelAsked() | io.PauseAsked() | io.ResumeAsked():
                self._wish(event, now=now)
            case io.DeleteAsked():
                lifecycle.delete_asked(event, self.history, self._outbox, now=now)
            case io.DrainAsked():
                self._drain(event.worker, now=now)
            case io.MeasureAsked():
                for worker in (*self.membership.live,) if event.worker is None else (event.worker,):
                    self._measure(worker, now=now)
            case io.PlanMade():
                for run in self.runs:
                    run.planned(event, now=now)
            case io.RowsChosen():
                if (choosing := self._scheduler.runs.get(event.run)) is not None:
                    choosing.chose(event, now=now)
            case io.ManifestWritten():
                if (run_of := self._scheduler.runs.get(event.checkpoint.job)) is not None:
                    run_of.manifest_written(event, now=now)
            case io.CheckpointVerified():
                judge_checkpoint(self.history.jobs[event.checkpoint.job], event, self._outbox, now=now)
                for run in self.runs:
                    run.verified(event, now=now)
            case TimePassed():
                self._hear(TimePassed(), now=now)
                self._turn_away_stuck(now=now)
                self._probe_again(now=now)
                for run in self.runs:
                    run.tick(now=now)
            case _:
                assert_never(event)
        if self._sweeps.look(now=now):
            self._scheduler.asked()
        self._scheduler.look(now=now)
        return self._outbox.drain()

    def deadline(self) -> float | None:
        """Time at which `TimePassed` is wanted next; None: it is not."""
        times = [
            self.membership.deadline(),
            self._scheduler.deadline(),
            self._sweeps.deadline(),
            self._reprobing.deadline(),
            *(run.deadline() for run in self.runs),
        ]
        return min((at for at in times if at is not None), default=None)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Runs of the jobs that are active, in the order in which they began."""
        return tuple(self._scheduler.runs.values())

    @property
    def run(self) -> Run | None:
        """The run that began first of those under way."""
        return next(iter(self.runs), None)

    # --- what clients ask ---

    @property
    def view(self) -> CoordinatorView:
        """View of the coordinator, at the moment, for those who answer clients."""
        runs = {
            run.job.job: RunView(
                job=run.job,
                plan=run.plan,
                state=run.phase.state,
                reason=run.reason,
                crew=self._scheduler.crew(run.job.job),
                savers=run.savers,
                exclusions=run.exclusions,
                open_incident=run.open_incident,
            )
            for run in self.runs
        }
        return CoordinatorView(
            history=self.history,
            live=self.membership.live,
            links=MappingProxyType(self.links),
            relays=MappingProxyType(dict(self._relaying.relays)),
            measured=MappingProxyType(self.measured),
            runs=MappingProxyType(runs),
            waits=MappingProxyType(self._scheduler.waits),
            kept_for=self._scheduler.kept_for,
            quotas=self._uses(),
        )

    def _uses(self) -> QuotaUses:
        crews = {job: len(self._scheduler.crew(job)) for job in self._scheduler.runs}
        return QuotaUses(quotas=self._quotas, history=self.history, crews=crews)

    def _submit(self, event: io.SubmitAsked, *, now: float) -> None:
        if (event.namespace, event.key) in self.history.job_by_key:
            return
        try:
            self._uses().check_submit(event.namespace, event.spec)
        except OverQuotaError:
            return  # There was room when it was asked; whoever asked is told.
        job = JobId(f"{event.spec.name}-{self.history.num_submitted + 1}")
        spec = event.spec.canonical_json()
        submitted = JobSubmitted(
            job=job,
            key=event.key,
            spec=spec,
            wall_s=now,
            begins=event.begins,
            namespace="" if event.namespace == DEFAULT_NAMESPACE else event.namespace,
        )
        self._outbox.record(submitted)
        self._outbox.log("submitted", job=job)
        self._scheduler.asked()

    def _wish(self, event: io.CancelAsked | io.PauseAsked | io.ResumeAsked, *, now: float) -> None:
        job, run = self.history.jobs.get(event.job), self._scheduler.runs.get(event.job)
        self._scheduler.asked()
        if job is None or job.sweep is not None:
            return
        if job.spec.sweep is not None:
            self._sweeps.wish(job, event, self._uses(), now=now)
            return
        match event:
            case io.CancelAsked():
                lifecycle.cancel_asked(job, run, event, self._outbox, now=now)
            case io.PauseAsked():
                lifecycle.pause_asked(job, run, event, self._outbox, now=now)
            case io.ResumeAsked():
                lifecycle.resume_asked(job, run, event, self._uses(), self._outbox, now=now)
            case _:
                assert_never(event)

    def _begin(self, job: JobHistory, crew: Mapping[WorkerId, membership.Entry], now: float) -> Run:
        """The run of a job, with its crew."""
        measured = self.measured[job.job] = Measured(job.spec)
        over = [known for known in self.measured if known not in self._scheduler.runs and known != job.job]
        for known in over[: max(0, len(self.measured) - MAX_MEASURED)]:
            del self.measured[known]
        quota = self._quotas.of(job.namespace)
        parts = Parts(job, crew, self.absence, self._outbox, self.links, measured, quota=quota, now=now)
        return Run(parts, now=now)

    # --- workers ---

    def _report(
        self, worker: WorkerId, incarnation: Incarnation, report: reports.Report, *, now: float
    ) -> None:
        if isinstance(report, reports.Hello):
            self._hello(report, now=now)
            return
        progress = report.progress if isinstance(report, reports.Beat) else None
        heard = membership.Heard(worker=worker, incarnation=incarnation, progress=progress)
        self._hear(heard, now=now)
        if not self.membership.is_current(worker, incarnation):
            return
        run = self._scheduler.run_of(worker)
        if (reason := self._implausible(worker, report)) is not None:
            self._refused(io.ReportRefused(worker=worker, incarnation=incarnation, reason=reason), now=now)
            return
        match report:
            case reports.SpeedMeasured():
                self._speed_measured(worker, report, now=now)
            case reports.LinksMeasured():
                self._measured(worker, report, now=now)
            case reports.PeersSeen():
                self.absence.looked(report, now=now)
            case reports.Leaving():
                self._hear(membership.LeaveHeard(worker=worker), now=now)
            case reports.Suspected():
                doubted = membership.Doubted(
                    worker=report.peer, reason=f"{worker} cannot reach it: {report.reason}"
                )
                self._hear(doubted, now=now)
                self._tell(self._relaying.doubted(worker, report.peer))
            case _:
                pass
        if run is not None:
            run.report(worker, report, now=now)
        if isinstance(report, reports.Beat):
            self._turn_away_stuck(now=now)
            if self._remeasuring.is_due(worker, self._pace(worker), now=now):
                self._measure(worker, now=now)

    def _implausible(self, worker: WorkerId, report: reports.Report) -> str | None:
        """Fault in a report that says what nobody can have seen; an older generation's may be of another job."""
        run = self._scheduler.run_of(worker)
        is_now = run is not None and getattr(report, "generation", None) == run.job.generation
        return implausible(worker, report, run.job.spec if run is not None and is_now else None)

    def _refused(self, event: io.ReportRefused, *, now: float) -> None:
        """Count a refused report as a failure of its worker, for its content is lost; the worker lives all the same."""
        heard = membership.Heard(worker=event.worker, incarnation=event.incarnation, progress=None)
        self._hear(heard, now=now)
        if not self.membership.is_current(event.worker, event.incarnation):
            return
        self._num_refused[event.incarnation] += 1
        self._outbox.log(f"report refused: {event.reason}", worker=event.worker)
        if self._num_refused[event.incarnation] >= MAX_REFUSED:
            reason = f"{MAX_REFUSED} reports that cannot be, the last one: {event.reason}"
            evicted = membership.Evicted(worker=event.worker, reason=reason)
            self._hear(evicted, now=now)
        elif (run := self._scheduler.run_of(event.worker)) is not None:
            trouble = reports.Trouble(generation=run.job.generation, is_fatal=False, reason=event.reason)
            run.report(event.worker, trouble, now=now)

    def _measure(self, worker: WorkerId, *, now: float) -> None:
        entry = self.membership.live.get(worker)
        if entry is not None:
            self._remeasuring.asked(worker, now=now)
            self._outbox.send(Measure(), entry.process)

    def _pace(self, worker: WorkerId) -> JobPace:
        return self._pacing.of(self._scheduler.run_of(worker), self.measured)

    def _speed_measured(self, worker: WorkerId, report: reports.SpeedMeasured, *, now: float) -> None:
        before = self.membership.live[worker].hello.profile.flops_per_s
        speed = membership.SpeedHeard(worker=worker, flops_per_s=report.flops_per_s, spread=report.spread)
        self._hear(speed, now=now)
        run = self._scheduler.run_of(worker)
        if run is not None and not self._pace(worker).is_at_work(worker):
            self.measured[run.job.job].measured_again(worker, report.flops_per_s / max(1.0, before))
        self._outbox.log(
            f"worker={worker} measured {report.flops_per_s / 1e9:.3g} GFLOP/s (runs {report.spread:.0%} apart), "
            f"before {before / 1e9:.3g}"
        )

    def _measured(self, worker: WorkerId, report: reports.LinksMeasured, *, now: float) -> None:
        report = self._reprobing.believed(report, self.links)
        before = {pair: relay for pair, relay in self._relaying.relays.items() if worker in pair}
        self._know(link for link in report.links if link.via is None)
        self._tell(self._relaying.measured(worker, report))
        self._reprobing.measured(worker, report, self._relaying.relays, now=now)
        self._log_relays(worker, before)
        if len(self.links) > MAX_LINKS:
            live = self.membership.live
            for pair in [pair for pair in self.links if not live.keys() >= set(pair)]:
                del self.links[pair]

    def _log_relays(self, worker: WorkerId, before: Mapping[Pair, WorkerId]) -> None:
        """Log which relays of a worker's pairs have changed, and the fault that makes one necessary."""
        after = self._relaying.relays
        for pair in sorted(before.keys() | {pair for pair in after if worker in pair}):
            if before.get(pair) == after.get(pair) or not self.membership.live.keys() >= set(pair):
                continue
            sender, receiver = pair
            if (relay := after.get(pair)) is None:
                self._outbox.log(f"{sender} reaches {receiver} directly again", worker=sender)
                continue
            obstacle = self._relaying.obstacles.get((min(pair), max(pair)))
            why = "" if obstacle is None else f": {obstacle.value} between them"
            self._outbox.log(
                f"{sender} reaches {receiver} by the relay {relay or 'coordinator'}{why}", worker=sender
            )

    def _probe_again(self, *, now: float) -> None:
        live = self.membership.live
        for retry in self._reprobing.due(now=now):
            peers = tuple(self._outbox.to_probe(live[peer].member) for peer in retry.peers if peer in live)
            if peers and retry.prober in live:
                self._outbox.send(
                    Probe(peers=peers, only_direct=retry.only_direct), live[retry.prober].process
                )

    def _know(self, links: Iterable[Link]) -> None:
        for link in links:
            # What cannot be would end a planner, or this: it is divided by.
            if 0 <= link.latency_s < inf and link.bytes_per_s > 0:
                self.links[link.sender, link.receiver] = link

    def _tell(self, told: Iterable[Told]) -> None:
        for each in told:
            entry = self.membership.live.get(each.worker)
            if entry is not None:
                self._outbox.send(each.directive, entry.process)
        self._know(self._relaying.links)

    def _hello(self, hello: reports.Hello, *, now: float) -> None:
        known = hello.position
        if known is not None and not self.history.covers(known):
            self._lacks(hello.worker, hello.incarnation, known)
        elif hello.epoch > self.history.epoch:
            newer = f"this worker has followed a newer coordinator (epoch {hello.epoch}, here {self.history.epoch})"
            self._refuse_other_log(hello.worker, hello.incarnation, newer)
        else:
            self._refused_logs.pop(hello.worker, None)
            self._hear(hello, now=now)

    def _lacks(self, worker: WorkerId, incarnation: Incarnation, known: LogPosition) -> None:
        """A worker knows what is not in the log: it has lost that, or it is another one."""
        here = self.history.position
        knows = f"worker {worker} knows entry {known.entry} of epoch {known.epoch}"
        if self.history.has_given_up(known):
            given_up = f"{knows}, whose loss was accepted"
            self._refuse_other_log(worker, incarnation, given_up, OtherLog.GIVEN_UP)
            return
        if here is None or here.origin_s != known.origin_s or self.history.has_decided:
            self._refuse_other_log(worker, incarnation, f"{knows}, which is not in the run log")
            return
        if not self._outbox.has_signed(known):
            # Any worker could say so; what is true and cannot be proved is for people to look at.
            unproved = f"{knows}, as it says without a signature of this run log, which has no such entry"
            self._refuse_other_log(worker, incarnation, unproved)
            return
        reason = (
            f"{self._ending()}, but {knows}: restore it from a backup; or give --accept-lost-log, "
            "which goes on without what was lost"
        )
        self._outbox.log(f"ends this coordinator: {reason}", worker=worker)
        self._outbox.do(io.Halt(reason=reason))

    def _ending(self) -> str:
        """Place where the log ended before this coordinator opened it, in words."""
        *before, own = self.history.openings
        if not before:
            return "the run log was empty"
        return f"the run log ended at entry {own.entry - 1} of epoch {before[-1].record.epoch}"

    def _refuse_other_log(
        self, worker: WorkerId, incarnation: Incarnation, why: str, log: OtherLog = OtherLog.UNKNOWN
    ) -> None:
        """Turn a worker away that knows another log; it may ask again, which is logged once while nothing changes."""
        cure = (
            "what it holds counts no more"
            if log is OtherLog.GIVEN_UP
            else "if its log is elsewhere, start the coordinator on that; if not, start the worker again"
        )
        reason = f"{why}: {cure}"
        self._outbox.send(Refused(reason=reason, log=log), (worker, incarnation))
        if self._refused_logs.get(worker) != reason:
            if len(self._refused_logs) >= MAX_REFUSED_LOGS:
                self._refused_logs.clear()
            self._refused_logs[worker] = reason
            self._outbox.log(f"refused: {reason}", worker=worker)

    def _turn_away_stuck(self, *, now: float) -> None:
        for worker, reason in [stuck for run in self.runs for stuck in run.stuck(now=now)]:
            self._hear(membership.Evicted(worker=worker, reason=reason), now=now)

    def _hear(self, event: membership.MembershipEvent, *, now: float) -> None:
        """Have the membership take this in, and everybody else what changes by it."""
        changes = self.membership.handle(event, now=now)
        # Of several changes at once a run that hears of the first sees what all have come to.
        for change, run in [(change, self._scheduler.changed(change, now=now)) for change in changes]:
            match change:
                case membership.IncarnationJoined() | membership.Returned():
                    self.absence.joined(self.membership.live[change.worker].member, now=now)
                    self._welcome(
                        change.worker, is_new=isinstance(change, membership.IncarnationJoined), now=now
                    )
                case membership.Rejected():
                    self._outbox.send(Refused(reason=change.reason), (change.worker, change.incarnation))
                    self._outbox.log(f"refused: {change.reason}", worker=change.worker)
                case membership.Lost():
                    if change.is_final:
                        self._num_refused.pop(change.incarnation, None)
                        self._outbox.send(Refused(reason=change.reason), (change.worker, change.incarnation))
                    self._remeasuring.lost(change.worker)
                    self._tell(self._relaying.lost(change.worker))
                    self._reprobing.lost(change.worker)
                    self.absence.lost(
                        change.incarnation, silent_s=change.silent_s, is_dead=change.is_final, now=now
                    )
                    how = membership.LEFT if change.reason == membership.LEFT else f"lost: {change.reason}"
                    self._outbox.log(how, worker=change.worker)
                case membership.IsLeaving():
                    self._outbox.log("leaving", worker=change.worker)
                    # With a job that is to begin or to go on, what a worker holds may be the last of it.
                    if run is None and not self._may_be_wanted(change.worker):
                        entry = self.membership.live[change.worker]
                        self._outbox.send(Dismiss(job=None, may_exit=True), entry.process)
                case _:
                    assert_never(change)
            if run is not None:
                run.changed(change, now=now)

    def _may_be_wanted(self, worker: WorkerId) -> bool:
        """Whether a worker without a run may hold something of a job that is to begin or to go on."""
        incarnation = self.membership.live[worker].hello.incarnation
        return any(incarnation in job.followers for job in self.history.pending())

    def _welcome(self, worker: WorkerId, *, is_new: bool, now: float) -> None:
        entry = self.membership.live[worker]
        welcome = Welcome(
            lease_s=self.membership.lease_s,
            beat_s=self.membership.beat_s,
            position=self._outbox.position,
            door=self._outbox.to_probe(entry.member).door,
        )
        self._outbox.send(welcome, entry.process)
        for job in self.history.pending():
            if _may_be_outdated(job, entry.hello.incarnation):
                self._outbox.send(Dismiss(job=job.job, may_exit=False), entry.process)
        self._tell(self._relaying.joined(worker))
        if not is_new:
            return
        self._outbox.log("joined", worker=worker)
        self._remeasuring.joined(worker, now=now)
        others = [w for w in sorted(self.membership.live) if w != worker][:NUM_PROBED_PEERS]
        peers = tuple(self._outbox.to_probe(self.membership.live[other].member) for other in others)
        if peers:
            self._outbox.send(Probe(peers=peers), entry.process)

    def _drain(self, worker: WorkerId, *, now: float) -> None:
        """Record it: the worker would not tell the next coordinator."""
        entry = self.membership.live.get(worker)
        if entry is None:
            return
        incarnation = entry.hello.incarnation
        if incarnation not in self.history.drained:
            self._outbox.record(Drained(worker=worker, incarnation=incarnation, wall_s=now))
        self._hear(membership.LeaveHeard(worker=worker), now=now)


def _may_be_outdated(job: JobHistory, incarnation: Incarnation) -> bool:
    """Whether a process may hold something of a history that was rolled back, or be fetching it: then it forgets."""
    return incarnation in job.outdated or (bool(job.rollbacks) and incarnation not in job.followers)
