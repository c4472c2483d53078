"""The SDK for asyncio: a coordinator, and its jobs.

    async with AsyncClient("127.0.0.1:7411") as client:
        job = await client.submit(Path("job.yaml"))
        async for event in job.events():
            ...

Statuses and events are the dataclasses of `skein.wire.views`, errors those of `client.errors`. What submitting and
exporting need is imported when they are called.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from client.connection import DEFAULT_TARGET, PATIENCE_S, Connection
from skein.errors import UserError
from skein.types import JobId, Step
from skein.wire import codec
from skein.wire.channel import join_address, split_address
from skein.wire.credentials import Credentials, Wallet
from skein.wire.v1 import checkpoint_pb2, identity_pb2, jobs_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from client.exporting.download import OnBytes
    from client.exporting.export import Dtype
    from skein.config.job import JobSpec
    from skein.protocol.log.records import Incident
    from skein.topology.fleet import Link
    from skein.wire.greeting import VersionReply
    from skein.wire.identity.passport import Passport
    from skein.wire.views import (
        CheckpointView,
        EvaluationFinished,
        JobEvent,
        JobStatus,
        Key,
        KnownIdentity,
        PageLink,
        StepFinished,
        TrialStatus,
        WorkerStatus,
    )

TIMEOUT_S = 10.0
MAX_SHARD_BYTES = 5 * 10**9
"""Size at which Hugging Face splits its own weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """A job's curves so far, oldest first."""

    steps: tuple[StepFinished, ...]
    evaluations: tuple[EvaluationFinished, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A Hugging Face directory, and of which version of which job."""

    job: JobId
    version: Step
    out: Path
    files: tuple[Path, ...]
    lacking: tuple[str, ...] = ()
    """Lines on what should lie there and could not be had here, one each."""
    trial: int | None = None
    """Trial of a sweep that it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """Some jobs, oldest first, without specifications; `before` asks for the page before, "" where there is none."""

    jobs: tuple[JobStatus, ...]
    before: str
    num_jobs: int
    """All jobs that the caller may see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRows:
    """Rows of several pages of a list, oldest first, and how many jobs the caller may see."""

    jobs: tuple[jobs_pb2.JobStatus, ...]
    num_jobs: int


class AsyncClient:
    """A coordinator. Connects at the first call; use it as a context manager, or `close` it.

    Calls about a job, a worker or a checkpoint raise `NotFound` where there is no such thing.

    Args:
        target: host:port of the coordinator, or several with commas between: its own and those of its standbys.
        passport: the caller's identity, where the coordinator wants certificates.
        timeout_s: for one try of one call; raise this if the coordinator is on the far side of a very slow link.
        patience_s: how long a coordinator that has answered before may be gone, for instance to be restarted.

    Raises:
        UserError: `target` is no address.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        passport: Passport | None = None,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        credentials = Credentials(wallet=None if passport is None else Wallet(passport))
        self._connection = Connection(
            target, credentials=credentials, timeout_s=timeout_s, patience_s=patience_s
        )

    @property
    def target(self) -> str:
        """host:port of the coordinator."""
        return self._connection.target

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all calls."""
        await self._connection.close()

    async def version(self) -> VersionReply:
        """Version of the coordinator."""
        return await self._connection.version()

    async def weigh(self, *, sent_bytes: int = 0, received_bytes: int = 0) -> VersionReply:
        """Version of the coordinator, with so much ballast there and back: to time the way."""
        request = jobs_pb2.VersionRequest(ballast=bytes(sent_bytes), reply_bytes=received_bytes)
        return codec.VERSION_REPLY.decode(await self._connection.call(lambda at: at.jobs.Version, request))

    async def submit(
        self,
        job: JobSpec | Path | str,
        *,
        key: str | None = None,
        from_job: str | None = None,
        from_version: int | None = None,
    ) -> AsyncJob:
        """Hands a job in; gives it, whether this call made it or an earlier one with the same `key`.

        Args:
            job: the job, the path of a job file, or YAML text. Relative paths count from the file's folder, otherwise
                from the current one.
            key: names this wish, so that it may be repeated; by default each call is a wish of its own.
            from_job: begin with the parameters of that job's checkpoint; all else begins anew, at step 0.
            from_version: of which version; by default the newest checkpoint whose losses are good.

        Raises:
            UserError: something is wrong with the job; `Refused` where the coordinator found it.
        """
        spec = await asyncio.to_thread(_spec_of, job)
        request = jobs_pb2.SubmitRequest(
            # Names the job's content so that logs can be read, and only this call.
            key=key or f"{spec.content_hash()[:16]}-{secrets.token_hex(8)}",
            spec=spec.canonical_json(),
            from_job=from_job,
            from_version=from_version,
        )
        reply = codec.SUBMIT_REPLY.decode(await self._connection.call(lambda at: at.jobs.Submit, request))
        return AsyncJob(self._connection, reply.job, is_new=reply.is_new)

    def job(self, job: str) -> AsyncJob:
        """The job of that id; nobody is asked whether it exists."""
        return AsyncJob(self._connection, JobId(job), is_new=False)

    async def jobs(self, *, is_going: bool = False) -> tuple[JobStatus, ...]:
        """All jobs, or those that have not ended, oldest first; their specifications are not among what is told."""
        rows = await self.job_rows(is_going=is_going)
        return tuple(codec.JOB_STATUS.decode(row) for row in rows.jobs)

    async def job_page(
        self, *, limit: int = 0, before: str = "", has_ended: bool = False, is_going: bool = False
    ) -> JobPage:
        """A page of the list of jobs: the newest, oldest first, without their specifications.

        Args:
            limit: of the page's jobs; 0: as many as the coordinator sends at once.
            before: job before which the page ends, as the page after it says.
            has_ended: only jobs that have ended.
            is_going: only jobs that have not.
        """
        request = jobs_pb2.ListJobsRequest(limit=limit, before=before, has_ended=has_ended, is_going=is_going)
        reply = await self._connection.call(lambda at: at.jobs.List, request)
        jobs = tuple(codec.JOB_STATUS.decode(job) for job in reply.jobs)
        return JobPage(jobs=jobs, before=reply.before, num_jobs=reply.num_jobs)

    async def job_rows(
        self, *, limit: int | None = None, has_ended: bool = False, is_going: bool = False
    ) -> JobRows:
        """The newest jobs, so many or all, oldest first, as the coordinator's messages have them."""
        rows: list[jobs_pb2.JobStatus] = []
        before = ""
        while True:
            left = 0 if limit is None else limit - len(rows)
            request = jobs_pb2.ListJobsRequest(
                limit=left, before=before, has_ended=has_ended, is_going=is_going
            )
            reply = await self._connection.call(lambda at: at.jobs.List, request)
            rows[:0] = reply.jobs
            before = reply.before
            if not before or (limit is not None and len(rows) >= limit):
                return JobRows(jobs=tuple(rows), num_jobs=reply.num_jobs)

    async def workers(self) -> tuple[WorkerStatus, ...]:
        """All workers by id, those lost lately included."""
        reply = await self._connection.call(lambda at: at.jobs.Workers, jobs_pb2.WorkersRequest())
        return tuple(codec.WORKER_STATUS.decode(worker) for worker in reply.workers)

    async def num_known_workers(self) -> int:
        """Number of workers that the run log knows, and that have not joined this coordinator yet."""
        reply = await self._connection.call(lambda at: at.jobs.Workers, jobs_pb2.WorkersRequest())
        return reply.num_known

    async def links(self) -> tuple[Link, ...]:
        """Links between workers, as these measured them."""
        reply = await self._connection.call(lambda at: at.jobs.Links, jobs_pb2.LinksRequest())
        return tuple(codec.LINK.decode(link) for link in reply.links)

    async def create_token(
        self, role: str, *, life_s: float, uses: int, namespace: str = ""
    ) -> tuple[str, float]:
        """A line by which somebody joins with `role`, so many times, and the Unix time at which it ends."""
        request = identity_pb2.CreateTokenRequest(role=role, namespace=namespace, life_s=life_s, uses=uses)
        reply = await self._connection.call(lambda at: at.identities.CreateToken, request)
        return reply.line, reply.ends_s

    async def identities(self) -> tuple[KnownIdentity, ...]:
        """All identities that were made out, oldest first."""
        request = identity_pb2.ListIdentitiesRequest()
        reply = await self._connection.call(lambda at: at.identities.ListIdentities, request)
        return tuple(codec.KNOWN_IDENTITY.decode(found) for found in reply.identities)

    async def revoke(self, role: str, name: str) -> KnownIdentity:
        """Ends an identity at once, with all that goes on in its name."""
        request = identity_pb2.RevokeRequest(role=role, name=name)
        return codec.KNOWN_IDENTITY.decode(
            await self._connection.call(lambda at: at.identities.Revoke, request)
        )

    async def page(self) -> str:
        """Address of the coordinator's page, for a browser; where it wants a login, one that is good once, for minutes.

        Raises:
            Refused: the coordinator serves none.
        """
        reply = await self._connection.call(lambda at: at.jobs.OpenPage, jobs_pb2.OpenPageRequest())
        return _page_url(codec.PAGE_LINK.decode(reply), reached=self._connection.at)

    async def drain(self, worker: str) -> WorkerStatus:
        """Takes work away from a worker, step by step, and lets it exit."""
        request = jobs_pb2.DrainRequest(worker=worker)
        return codec.WORKER_STATUS.decode(await self._connection.call(lambda at: at.jobs.Drain, request))

    async def measure(self, worker: str = "") -> tuple[WorkerStatus, ...]:
        """Has a worker, or with no name every worker, measure its device again; gives those that were asked."""
        request = jobs_pb2.MeasureRequest(worker=worker)
        reply = await self._connection.call(lambda at: at.jobs.Measure, request)
        return tuple(codec.WORKER_STATUS.decode(found) for found in reply.workers)

    async def incidents(self, job: str) -> tuple[Incident, ...]:
        """Incidents of a job so far and what each cost, oldest first; `log.incident` sums up."""
        found: list[Incident] = []
        while True:
            request = jobs_pb2.ListIncidentsRequest(job=job, since=len(found))
            reply = await self._connection.call(lambda at: at.jobs.ListIncidents, request)
            found += map(codec.INCIDENT.decode, reply.incidents)
            if not reply.incidents or len(found) >= reply.num_incidents:
                return tuple(found)

    async def checkpoints(self, job: str) -> tuple[CheckpointView, ...]:
        """The checkpoints of a job that are kept, oldest first, and whether one was found damaged."""
        request = checkpoint_pb2.ListCheckpointsRequest(job=job)
        reply = await self._connection.call(lambda at: at.checkpoint.List, request)
        return tuple(map(codec.CHECKPOINT_VIEW.decode, reply.checkpoints))

    async def verify(self, job: str, version: int) -> CheckpointView:
        """Checkpoint of that version, after the coordinator has read all of it; a damaged one is set aside."""
        request = checkpoint_pb2.VerifyRequest(job=job, version=version)
        found = await self._connection.call(lambda at: at.checkpoint.Verify, request, is_long=True)
        return codec.CHECKPOINT_VIEW.decode(found)

    async def delete(self, job: str, version: int) -> tuple[CheckpointView, ...]:
        """Deletes a checkpoint of a job that has ended; gives those that are left."""
        request = checkpoint_pb2.DeleteCheckpointRequest(job=job, version=version)
        reply = await self._connection.call(lambda at: at.checkpoint.Delete, request)
        return tuple(map(codec.CHECKPOINT_VIEW.decode, reply.checkpoints))

    async def export(
        self,
        job: str,
        out: Path,
        *,
        version: int | None = None,
        trial: int | Literal["best"] | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        dtype: Dtype | None = None,
        on_bytes: OnBytes | None = None,
    ) -> Exported:
        """Writes a checkpoint's weights as a Hugging Face directory; see `client.exporting.export.write_huggingface`.

        Beside them lie the tokenizer's files, as far as this machine has them, and a model card.

        Args:
            job: whose.
            out: a directory that does not exist, or is empty.
            version: after how many steps; by default the newest checkpoint.
            trial: of a sweep, by number, or the best one.
            max_shard_bytes: size of the weight files.
            dtype: of the weights; by default float32.
            on_bytes: told how many bytes of how many were downloaded, whenever there are more.

        Raises:
            NotFound: the job, or a checkpoint of it, does not exist.
            UserError: `out` is in use or cannot be written.
            RemoteError: a file is not what was saved.
        """
        from client.exporting.card import model_card, trained
        from client.exporting.download import fetch_weights, weight_prefixes
        from client.exporting.export import Dtype, require_unused, write_huggingface
        from client.exporting.vocabulary import vocabulary_of
        from skein.config.job import read_spec
        from skein.config.sweep.trials import trials_of

        dtype = dtype or Dtype.FP32
        require_unused("out", out)  # not only after the download
        status = await self.job(job).status()
        chosen = _trial_of(status, trial)
        saved = None if chosen is None else chosen.saved
        array, row = (job, 0) if saved is None else (saved.array, saved.row)
        request = checkpoint_pb2.ManifestRequest(job=array, version=version)
        manifest = codec.MANIFEST_REPLY.decode(
            await self._connection.call(lambda at: at.checkpoint.Manifest, request)
        )
        spec = read_spec(manifest.spec)
        vocabulary = await asyncio.to_thread(vocabulary_of, spec)
        has_tokenizer = "tokenizer_config.json" in vocabulary.files
        own = spec if chosen is None else trials_of(read_spec(status.spec))[chosen.trial].job
        course = trained(manifest, status, chosen)
        card = model_card(manifest, own, course, dtype=dtype.in_torch, has_tokenizer=has_tokenizer)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=out.parent, prefix=".download-") as folder:
                paths = await fetch_weights(
                    self._connection, manifest, spec, Path(folder), row=row, on_bytes=on_bytes
                )
                files = await asyncio.to_thread(
                    write_huggingface,
                    paths,
                    spec.model,
                    out,
                    max_shard_bytes=max_shard_bytes,
                    prefixes=weight_prefixes(manifest, spec, row),
                    dtype=dtype,
                    beside={"README.md": card.encode(), **vocabulary.files},
                )
        except OSError as error:
            raise UserError("out", str(out), f"cannot be written: {error.strerror or error}") from error
        return Exported(
            job=manifest.job,
            version=manifest.version,
            out=out,
            files=tuple(files),
            lacking=tuple(vocabulary.lacking),
            trial=None if chosen is None else chosen.trial,
        )


def _trial_of(status: JobStatus, trial: int | Literal["best"] | None) -> TrialStatus | None:
    """Trial that an export is of; None: of a job that is no sweep."""
    from skein.config.explain import Words
    from skein.config.job import ArrayJob, read_spec

    if isinstance(read_spec(status.spec), ArrayJob):
        raise UserError("job", status.job, "is an array of trials: give its sweep, and --trial N or best")
    if trial is None and not status.trials:
        return None
    if trial is None or not status.trials:
        hint = "is a sweep: give a trial, or best" if status.trials else "is no sweep: give none"
        raise UserError("trial", Words("none") if trial is None else trial, f"{status.job} {hint}")
    found = next((x for x in status.trials if (x.is_best if trial == "best" else x.trial == trial)), None)
    if found is None:
        hint = "no trial has a loss yet" if trial == "best" else f"give 0 to {len(status.trials) - 1}"
        raise UserError("trial", trial, hint)
    if found.array is None:
        raise UserError("trial", trial, f"has not begun: {found.reason}")
    if found.saved is None:
        raise UserError(
            "trial", trial, f"has no checkpoint yet: the first round of {found.array} ends with one"
        )
    return found


class AsyncJob:
    """A job at its coordinator. Calls raise `NotFound` where there is no such job or checkpoint.

    Args:
        connection: to the coordinator.
        job: its id.
        is_new: whether the call that gave this made the job.
    """

    def __init__(self, connection: Connection, job: JobId, *, is_new: bool) -> None:
        self._connection = connection
        self.id = job
        self.is_new = is_new

    async def status(self) -> JobStatus:
        """The job now."""
        request = jobs_pb2.GetJobRequest(job=self.id)
        return codec.JOB_STATUS.decode(await self._connection.call(lambda at: at.jobs.Get, request))

    def events(self, *, since: int | Key = 0) -> AsyncGenerator[JobEvent, None]:
        """Events after the one of that key or number, past ones and then new ones, through restarts, until the end."""
        return self._connection.watch(self.id, since=(since, 0) if isinstance(since, int) else since)

    async def history(self, *, since: Key = (0, 0)) -> tuple[JobEvent, ...]:
        """All that has happened so far, after the event of that key: each event once and in order."""
        async with aclosing(self._connection.watch(self.id, since=since, is_following=False)) as events:
            return tuple([event async for event in events])

    async def wait(self) -> JobStatus:
        """The job when it has ended, well or not."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return await self.status()

    async def cancel(self, reason: str = "", *, discard: bool = False) -> JobStatus:
        """Ends the job, if it has not ended, once its newest step is saved; `wait` waits for that.

        Args:
            reason: told to whoever watches.
            discard: end it now; its newest checkpoint stays.
        """
        request = jobs_pb2.CancelRequest(job=self.id, reason=reason, discards=discard)
        return codec.JOB_STATUS.decode(await self._connection.call(lambda at: at.jobs.Cancel, request))

    async def pause(self, reason: str = "") -> JobStatus:
        """Holds the job once its newest step is saved; its workers are free for others.

        Raises:
            Refused: it has ended.
        """
        request = jobs_pb2.PauseRequest(job=self.id, reason=reason)
        return codec.JOB_STATUS.decode(await self._connection.call(lambda at: at.jobs.Pause, request))

    async def resume(self, *, steps: int | None = None, new_data: bool = False) -> JobStatus:
        """Has the job go on, if it was paused or has ended, well or not, or is about to.

        Args:
            steps: its budget from here on, counted from its beginning; by default as before.
            new_data: go on with the data that its workers have now, though it was trained on others; also a job that
                waits for workers with the former data.

        Raises:
            Refused: all steps are done, or the job is at work and its budget cannot be changed now.
        """
        request = jobs_pb2.ResumeRequest(job=self.id, steps=steps, takes_new_data=new_data)
        return codec.JOB_STATUS.decode(await self._connection.call(lambda at: at.jobs.Resume, request))

    async def metrics(self) -> Metrics:
        """Loss, gradient norm, rates and the like of every step and evaluation that counts so far."""
        from skein.wire.shown.points import Course

        course = Course(await self.history())
        return Metrics(steps=course.steps, evaluations=course.evaluations)


def _page_url(page: PageLink, *, reached: str) -> str:
    """Address of a page for a browser: at the coordinator's own address, where it is served at all of a machine's."""
    host, port = split_address("page", page.address)
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared with
        host, _ = split_address("coordinator", reached)
    scheme = "https" if page.is_encrypted else "http"
    return f"{scheme}://{join_address(host, port)}/" + (f"login?link={page.link}" if page.link else "")


def _spec_of(job: JobSpec | Path | str) -> JobSpec:
    from client.jobfile import prepare_job, read_job, read_job_text
    from skein.config.job import JobSpec

    match job:
        case JobSpec():
            return prepare_job(job, base=Path())
        case Path():
            return read_job(job)
        case str():
            return read_job_text(job, origin="job", base=Path())
