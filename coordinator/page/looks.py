"""Looks at a coordinator, for its page: views of its state, in the JSON that the command prints with `--json`.

What is given is to be made JSON of by `plain`, on a thread: that of a thousand workers takes long.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import skein
from coordinator.driver import Driver
from coordinator.page.bars import bars_of
from coordinator.service.tenants import jobs_of, worker_for
from coordinator.telling.listing import shelved_lines
from coordinator.telling.metrics import CoordinatorMetrics
from coordinator.telling.status import Roster, brief_status, expert_tokens, job_status
from skein.plan.changing.shards import shard_stages
from skein.plan.ops import OpKind
from skein.types import JobId
from skein.wire import codec
from skein.wire.identity.names import Caller
from skein.wire.shown.points import Course, Point, fewer_points
from skein.wire.views import JobStatus, Key

MAX_JOBS = 100
"""In an overview: those that have not ended, then the newest of the others."""
MAX_LINKS = 2000
MAX_INCIDENTS = 200
MAX_LAYERS = 128
"""Layers of which tokens of experts are shown, from the first on."""
MAX_POINTS = 600
"""Points of a curve: as many as a screen has columns for."""
MAX_COURSES = 4
"""Jobs whose curve is kept between two looks."""
_AGGREGATED = "skein_worker_aggregation_bytes_total"
Shown = Mapping[str, object]


class Looks:
    """Looks at a driver's machine, on its loop."""

    def __init__(self, driver: Driver, roster: Roster, metrics: CoordinatorMetrics) -> None:
        self._driver = driver
        self._roster = roster
        self._metrics = metrics
        self._courses: OrderedDict[JobId, _Followed] = OrderedDict()

    def knows(self, job: str, reader: Caller) -> bool:
        """Whether there is such a job for this reader."""
        found = self._driver.machine.view.history.jobs.get(JobId(job))
        return found is not None and reader.sees(found.namespace)

    def overview(self, reader: Caller) -> Shown:
        """Jobs, workers, links and bytes of aggregation; of a job all but its file, which may be long."""
        view, now = self._driver.machine.view, self._driver.now()
        known = [job.job for job in jobs_of(view.history, reader)]
        going = [job for job in known if not view.state_of(job).is_final][:MAX_JOBS]
        others = [job for job in known if job not in set(going)]
        shown = {*going, *others[len(others) - (MAX_JOBS - len(going)) :]}
        return {
            "now_wall_s": now,
            "release": skein.__version__,
            "epoch": view.history.epoch,
            "num_jobs": len(known),
            "jobs": self._briefs([job for job in known if job in shown]),
            "workers": [worker_for(x, view.history, reader) for x in self._roster.workers(now=now)],
            "num_links": len(view.links),
            "links": [view.links[pair] for pair in sorted(view.links)[:MAX_LINKS]],
            "aggregation": self._aggregation(),
        }

    def job(self, job: str) -> object:
        """A job in full, as `skein status --json` prints it."""
        return self._status(job)

    def incidents(self, job: str) -> object:
        """The newest incidents of a job, oldest first, as `skein incidents --json` prints them."""
        return self._driver.machine.view.history.jobs[JobId(job)].incidents[-MAX_INCIDENTS:]

    async def curve(self, job: str) -> object:
        """Points of a job's course, as `skein curve --json` prints them; the newest is always there."""
        key = JobId(job)
        followed = self._courses.setdefault(key, _Followed())
        self._courses.move_to_end(key)
        while len(self._courses) > MAX_COURSES:
            self._courses.popitem(last=False)
        return fewer_points(await followed.points(self._driver, key), MAX_POINTS)

    def experts(self, job: str) -> object:
        """Tokens of each expert in the newest step, by layer; nothing of a job that has none, or does not run."""
        view = self._driver.machine.view
        last = view.history.jobs[JobId(job)].last_commit
        if last is None or last.balance_loss is None:
            return []
        found = expert_tokens(view.crew_of(JobId(job)), self._metrics.reported)
        return [{"layer": layer, "tokens": found[layer]} for layer in sorted(found)[:MAX_LAYERS]]

    def step(self, job: str) -> Callable[[], Shown]:
        """Makes the ops of one step, planned and as measured; takes long, and reads nothing that changes."""
        history = self._driver.machine.view.history.jobs[JobId(job)]
        status, plan = self._status(job), None if history.plan is None else history.plan.plan
        model = history.spec.model
        latency_s = {pair: link.latency_s for pair, link in self._driver.machine.view.links.items()}

        def made() -> Shown:
            if plan is None:
                return {"planned": None, "measured": None}
            planned_ways, planned_ops = plan.transfer_times, plan.chunk_times
            ops = [times.measured or times.planned for times in status.chunk_times]
            ways = [times.measured or times.planned for times in status.transfer_times]
            is_measured = any(times.measured is not None for times in status.chunk_times)
            return {
                "workers": list(plan.workers),
                "words": {kind.value: kind.row.words for kind in OpKind},
                "shards": sorted(shard_stages(model, plan.stages)),
                "planned_s": status.predicted_step_s,
                "planned": bars_of(plan, planned_ops, planned_ways, latency_s),
                "measured_s": status.measured_step_s,
                "measured": bars_of(plan, ops, ways, latency_s) if is_measured else None,
            }

        return made

    def _status(self, job: str) -> JobStatus:
        view, journal = self._driver.machine.view, self._driver.journal
        return job_status(view, journal, JobId(job), self._metrics.reported)

    def _briefs(self, jobs: Sequence[JobId]) -> Sequence[JobStatus]:
        view, journal = self._driver.machine.view, self._driver.journal
        lines = shelved_lines(view, journal, jobs)
        found = (
            codec.JOB_STATUS.from_bytes(lines[job])
            if job in lines
            else brief_status(view, journal, job, self._metrics.reported)
            for job in jobs
        )
        return list(found)

    def _aggregation(self) -> Sequence[Shown]:
        """Bytes that each worker has sent for aggregation since it began, by rule and receiver."""
        found = []
        for worker, values in sorted(self._metrics.reported(_AGGREGATED).items()):
            for label, value in sorted(values.items()):
                rule, _, receiver = label.partition("/")
                found.append({"rule": rule, "sender": worker, "receiver": receiver, "num_bytes": value})
        return found


class _Followed:
    """A job's course as far as it was read."""

    def __init__(self) -> None:
        self._course = Course()
        self._read: Key = (0, 0)
        self._reading = asyncio.Lock()

    async def points(self, driver: Driver, job: JobId) -> tuple[Point, ...]:
        async with self._reading:
            events = driver.journal.watch(
                job, since=self._read[0], since_line=self._read[1], is_following=False
            )
            async for event in events:
                self._course.take(event)
                self._read = event.key
            return self._course.points()
