"""Calls of clients about jobs, workers, links and the version."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from pydantic import ValidationError

import skein
from coordinator.driver import Driver
from coordinator.page.board import Board
from coordinator.service.calls import BusyError, NotFoundError
from coordinator.service.tenants import job_of, jobs_of, namespace_of, worker_for
from coordinator.telling.listing import AskedPage, job_page
from coordinator.telling.status import Roster, job_status
from skein.config.job import JobSpec
from skein.errors import UserError
from skein.plan.admission import check_admissible, settled_job
from skein.protocol.coordinator.coordinator_io import (
    CancelAsked,
    DrainAsked,
    MeasureAsked,
    PauseAsked,
    ResumeAsked,
    SubmitAsked,
)
from skein.protocol.coordinator.lifecycle import beginning, check_resumable
from skein.protocol.log.records import Incident, JobSubmitted
from skein.protocol.messages.directives import Beginning
from skein.storage.places import Places
from skein.types import JobId, Step, WorkerId
from skein.wire import codec
from skein.wire.context import Context
from skein.wire.greeting import VersionReply
from skein.wire.identity.names import caller_of
from skein.wire.mapping import check_request
from skein.wire.v1 import jobs_pb2, jobs_pb2_grpc, log_pb2
from skein.wire.views import JobStatus, SubmitReply

MAX_SPEC_BYTES = 1 << 20
MAX_KEY_CHARACTERS = 256
MAX_REASON_CHARACTERS = 256
MAX_PENDING = 1000
"""Jobs that may wait."""
MAX_INCIDENTS = 500
"""In one reply."""
MAX_INCIDENT_BYTES = 1 << 20
"""In one reply, which may be 4 MiB; a lost site with all its microbatches takes some 10 kB."""
MAX_BALLAST_BYTES = 1 << 20
"""In one reply, for whoever times the way here."""


class Jobs(jobs_pb2_grpc.JobsServicer):
    """Answers from the machine's state once that is durable; wishes go through the driver's inbox."""

    def __init__(self, driver: Driver, roster: Roster, places: Places, board: Board) -> None:
        self._driver = driver
        self._places = places
        self._machine = driver.machine
        self._roster = roster
        self._board = board

    async def Submit(self, request: jobs_pb2.SubmitRequest, context: Context) -> jobs_pb2.SubmitReply:
        _check_key(request.key)
        spec = await asyncio.to_thread(settled_job, parse_spec(request.spec))
        history, namespace = self._machine.view.history, namespace_of(context)
        if (namespace, request.key) not in history.job_by_key:
            await asyncio.to_thread(check_admissible, spec)
            await asyncio.to_thread(self._places.admit_job, spec)
            if len(history.queue()) >= MAX_PENDING:
                raise BusyError(
                    "job", spec.name, f"{MAX_PENDING} jobs wait already; cancel some, or come back"
                )
            quotas = self._machine.view.quotas
            quotas.check_size(namespace, len(request.spec.encode()))
            quotas.check_submit(namespace, spec)
            begins = self._beginning(request, context, spec)
        else:
            begins = None  # The job of that key has begun with something.
        asked = SubmitAsked(key=request.key, spec=spec, begins=begins, namespace=namespace)
        records = await self._driver.ask(asked)
        if (namespace, request.key) not in history.job_by_key:
            # Others that came at once had the last place in the quota.
            self._machine.view.quotas.check_submit(namespace, spec)
            raise BusyError("job", spec.name, "the quota of its namespace was full a moment ago: try again")
        job = history.job_by_key[namespace, request.key]
        if (history.jobs[job].asked or history.jobs[job].spec) != spec:
            raise UserError("key", request.key, f"{job} has it, with another specification; give another key")
        is_new = any(isinstance(record, JobSubmitted) for record in records)
        return codec.SUBMIT_REPLY.encode(SubmitReply(job=job, is_new=is_new))

    async def List(self, request: jobs_pb2.ListJobsRequest, context: Context) -> jobs_pb2.ListJobsReply:
        check_request(request)
        view = self._machine.view
        asked = AskedPage(
            limit=request.limit, before=request.before, has_ended=request.has_ended, is_going=request.is_going
        )
        page = job_page(view, self._driver.journal, jobs_of(view.history, caller_of(context)), asked)
        trouble = await self._driver.settled()
        for status in page.jobs if trouble else ():
            status.reason = f"{status.reason}; {trouble}" if status.reason else trouble
        return page

    async def Get(self, request: jobs_pb2.GetJobRequest, context: Context) -> jobs_pb2.JobStatus:
        status = self._status(self._known(request.job, context))
        return codec.JOB_STATUS.encode(_with(status, await self._driver.settled()))

    async def Watch(
        self, request: jobs_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[jobs_pb2.JobEvent]:
        check_request(request)
        job = self._known(request.job, context)
        events = self._driver.journal.watch(
            job, since=request.since, since_line=request.since_line, is_following=not request.until_now
        )
        async for event in events:
            yield codec.JOB_EVENT.encode(event)

    async def Cancel(self, request: jobs_pb2.CancelRequest, context: Context) -> jobs_pb2.JobStatus:
        job = self._asked(request.job, context)
        reason = request.reason[:MAX_REASON_CHARACTERS]
        _ = await self._driver.ask(CancelAsked(job=job, reason=reason, discards=request.discards))
        return codec.JOB_STATUS.encode(self._status(job))

    async def Pause(self, request: jobs_pb2.PauseRequest, context: Context) -> jobs_pb2.JobStatus:
        job = self._asked(request.job, context)
        end = self._machine.view.history.jobs[job].end
        if end is not None:
            raise UserError("job", job, f"has {end.state.value}: only a job that has not ended can be paused")
        _ = await self._driver.ask(PauseAsked(job=job, reason=request.reason[:MAX_REASON_CHARACTERS]))
        return codec.JOB_STATUS.encode(self._status(job))

    async def Resume(self, request: jobs_pb2.ResumeRequest, context: Context) -> jobs_pb2.JobStatus:
        job = self._asked(request.job, context)
        steps = request.steps if request.HasField("steps") else None
        view = self._machine.view
        takes_new_data = request.takes_new_data
        check_resumable(view.history.jobs[job], steps, view.quotas, takes_new_data=takes_new_data)
        _ = await self._driver.ask(ResumeAsked(job=job, steps=steps, takes_new_data=takes_new_data))
        return codec.JOB_STATUS.encode(self._status(job))

    async def Workers(self, request: jobs_pb2.WorkersRequest, context: Context) -> jobs_pb2.WorkersReply:
        history, caller = self._machine.view.history, caller_of(context)
        workers = (worker_for(x, history, caller) for x in self._roster.workers(now=self._driver.now()))
        return jobs_pb2.WorkersReply(
            workers=[codec.WORKER_STATUS.encode(worker) for worker in workers],
            num_known=self._machine.membership.num_remembered,
        )

    async def Drain(self, request: jobs_pb2.DrainRequest, context: Context) -> jobs_pb2.WorkerStatus:
        worker = self._live(request.worker)
        _ = await self._driver.ask(DrainAsked(worker=worker))
        workers = self._roster.workers(now=self._driver.now())
        status = next((status for status in workers if status.worker == worker), None)
        if status is None:
            raise NotFoundError("worker", worker, "it has just gone")
        return codec.WORKER_STATUS.encode(status)

    async def Measure(self, request: jobs_pb2.MeasureRequest, context: Context) -> jobs_pb2.WorkersReply:
        named = self._live(request.worker) if request.worker else None
        _ = await self._driver.ask(MeasureAsked(worker=named))
        live, now = self._machine.view.live, self._driver.now()
        workers = (x for x in self._roster.workers(now=now) if x.worker in live)
        asked = [codec.WORKER_STATUS.encode(x) for x in workers if named in (None, x.worker)]
        return jobs_pb2.WorkersReply(workers=asked)

    async def Version(self, request: jobs_pb2.VersionRequest, context: Context) -> jobs_pb2.VersionReply:
        if request.reply_bytes > MAX_BALLAST_BYTES:
            raise UserError("reply_bytes", request.reply_bytes, f"ask for {MAX_BALLAST_BYTES} at most")
        reply = VersionReply(
            protocol_version=skein.PROTOCOL_VERSION,
            release=skein.__version__,
            epoch=self._machine.view.history.epoch,
            wall_s=time.time(),
            ballast=bytes(request.reply_bytes),
            coordinators=self._driver.coordinators,
        )
        return codec.VERSION_REPLY.encode(reply)

    async def Links(self, request: jobs_pb2.LinksRequest, context: Context) -> jobs_pb2.LinksReply:
        view = self._machine.view
        links = [replace(view.links[pair], via=view.relays.get(pair)) for pair in sorted(view.links)]
        return jobs_pb2.LinksReply(links=[codec.LINK.encode(link) for link in links])

    async def ListIncidents(
        self, request: jobs_pb2.ListIncidentsRequest, context: Context
    ) -> jobs_pb2.ListIncidentsReply:
        check_request(request)
        found = self._machine.view.history.jobs[self._known(request.job, context)].incidents
        until = request.since + min(request.limit or MAX_INCIDENTS, MAX_INCIDENTS)
        page = _page(found[request.since : until])
        reply = jobs_pb2.ListIncidentsReply(incidents=page, num_incidents=len(found))
        await self._driver.settled()
        return reply

    async def OpenPage(self, request: jobs_pb2.OpenPageRequest, context: Context) -> jobs_pb2.PageLink:
        reader = caller_of(context)
        assert reader is not None, "nobody without a name comes so far"
        return codec.PAGE_LINK.encode(self._board.link(reader))

    def _beginning(
        self, request: jobs_pb2.SubmitRequest, context: Context, spec: JobSpec
    ) -> Beginning | None:
        """The checkpoint that a job is to begin with, if it names a job."""
        if not request.HasField("from_job"):
            return None
        if spec.sweep is not None:
            hint = "trials of a sweep begin with what their seed draws, or model.init_from: leave it away"
            raise UserError("from", request.from_job, hint)
        other = job_of(self._machine.view.history, context, request.from_job)
        version = request.from_version if request.HasField("from_version") else None
        return beginning(other, spec, None if version is None else Step(version))

    def _status(self, job: JobId) -> JobStatus:
        return job_status(self._machine.view, self._driver.journal, job, self._driver.statistic)

    def _live(self, name: str) -> WorkerId:
        worker = WorkerId(name)
        if worker not in self._machine.view.live:
            raise NotFoundError("worker", worker, "no such worker is here; see skein workers")
        return worker

    def _asked(self, name: str, context: Context) -> JobId:
        """The job of that name that somebody has a wish for."""
        job = job_of(self._machine.view.history, context, name)
        if job.sweep is not None:
            raise UserError("job", name, f"is an array of {job.sweep}, which arrays follow: name that")
        return job.job

    def _known(self, name: str, context: Context) -> JobId:
        return job_of(self._machine.view.history, context, name).job


def parse_spec(text: str) -> JobSpec:
    """The job in `text`, JSON.

    Raises:
        UserError: the first thing that is wrong with it.
    """
    if len(text) > MAX_SPEC_BYTES:
        raise UserError("job", f"{len(text)} characters", f"give at most {MAX_SPEC_BYTES}")
    try:
        return JobSpec.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if isinstance(cause := first.get("ctx", {}).get("error"), UserError):
            raise cause from error
        field = ".".join(str(part) for part in first["loc"]) or "job"
        raise UserError(field, first["input"], first["msg"].removeprefix("Value error, ")) from error


def _with(status: JobStatus, trouble: str) -> JobStatus:
    """A status that may not be durable, and says so."""
    if not trouble:
        return status
    return replace(status, reason=f"{status.reason}; {trouble}" if status.reason else trouble)


def _page(incidents: Sequence[Incident]) -> list[log_pb2.Incident]:
    """Incidents that fit into one reply, and one at least: whoever asks for the rest gets on."""
    page: list[log_pb2.Incident] = []
    num_bytes = 0
    for incident in incidents:
        message = codec.INCIDENT.encode(incident)
        num_bytes += message.ByteSize()
        if page and num_bytes > MAX_INCIDENT_BYTES:
            break
        page.append(message)
    return page


def _check_key(key: str) -> None:
    if not key or len(key) > MAX_KEY_CHARACTERS or not key.isprintable():
        raise UserError("key", key[:32], f"give 1 to {MAX_KEY_CHARACTERS} printable characters")
