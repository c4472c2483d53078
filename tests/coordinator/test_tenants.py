"""Jobs of a namespace, asked for by those of another: as if they were not there."""

import json
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from coordinator.service.tenants import worker_for
from skein.protocol.log.history import History
from skein.types import DEFAULT_NAMESPACE, JobId, SiteId, StageIndex, WorkerId
from skein.wire.identity.names import Caller, CallerRole
from skein.wire.identity.passport import Passport
from skein.wire.identity.roles import ROLES
from skein.wire.v1 import checkpoint_pb2, jobs_pb2, jobs_pb2_grpc
from skein.wire.views import WorkerState, WorkerStatus
from tests.coordinator.builders import WAIT_S, hello, job_spec, submitted
from tests.coordinator.test_identities import Cluster, cluster
from tests.coordinator.test_page import asked

NAMING = ("job", "from_job")
"""Fields by which a request names a job."""


def naming_methods() -> dict[str, MethodDescriptor]:
    """Methods that clients may call, whose request names a job."""
    return {
        f"{service.name}/{method.name}": method
        for file in (jobs_pb2.DESCRIPTOR, checkpoint_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
        if ROLES[f"{service.name}/{method.name}"] & {CallerRole.SUBMITTER, CallerRole.VIEWER}
        and any(field in method.input_type.fields_by_name for field in NAMING)
    }


def asking(method: MethodDescriptor, job: str) -> Message:
    """A request that is right but for the job that it names."""
    request = GetMessageClass(method.input_type)()
    if isinstance(request, jobs_pb2.SubmitRequest):
        request.key, request.spec, request.from_job = "another", job_spec().canonical_json(), job
        return request
    setattr(request, "job", job)  # noqa: B010 - all of them have one
    return request


async def answer(channel: aio.Channel, name: str, request: Message) -> tuple[grpc.StatusCode, str]:
    """How a call ends, and in which words."""
    call = channel.unary_stream(f"/skein.wire.v1.{name}", lambda sent: sent.SerializeToString(), None)(
        request, timeout=WAIT_S
    )
    try:
        await anext(aiter(call), None)
    except aio.AioRpcError as error:
        return error.code(), str(error.details())
    call.cancel()
    return grpc.StatusCode.OK, "let in"


async def submit(known: Cluster, who: Passport, key: str = "key") -> str:
    async with known.channel(who) as channel:
        request = jobs_pb2.SubmitRequest(key=key, spec=job_spec().canonical_json())
        return (await jobs_pb2_grpc.JobsStub(channel).Submit(request)).job


async def listed(known: Cluster, who: Passport) -> dict[str, str]:
    async with known.channel(who) as channel:
        reply = await jobs_pb2_grpc.JobsStub(channel).List(jobs_pb2.ListJobsRequest())
    return {job.job: job.namespace for job in reply.jobs}


def test_a_method_that_names_a_job_is_found() -> None:
    assert {"Jobs/Get", "Jobs/Submit", "Jobs/Watch", "Checkpoint/Get", "Checkpoint/Verify"} <= set(
        naming_methods()
    )


async def test_a_job_of_another_namespace_is_unknown_to_every_method_that_names_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        ada = await known.passport("ada", "submitter", namespace="lab")
        eve = await known.passport("eve", "submitter", namespace="mill")
        job = await submit(known, ada)
        async with known.channel(eve) as hers, known.channel(ada) as own:
            for name, method in naming_methods().items():
                code, text = await answer(hers, name, asking(method, job))
                unknown = await answer(hers, name, asking(method, "nothing-9"))
                assert (code, text) == (unknown[0], unknown[1].replace("nothing-9", job)), name
                assert (code, "no such job" in text) == (grpc.StatusCode.NOT_FOUND, True), name
                assert "no such job" not in (await answer(own, name, asking(method, job)))[1], name


async def test_each_namespace_has_its_own_jobs_and_an_admin_sees_all(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        ada = await known.passport("ada", "submitter", namespace="lab")
        eve = await known.passport("eve", "viewer", namespace="mill")
        job, its = await submit(known, ada), await submit(known, known.admin)
        # A key is its namespace's: nobody comes by another's job with it.
        assert job != its
        assert await submit(known, ada) == job
        assert await listed(known, ada) == {job: "lab"}
        assert await listed(known, eve) == {}
        everything = {job: "lab", its: DEFAULT_NAMESPACE}
        assert await listed(known, known.admin) == everything
    async with cluster(tmp_path) as known:
        assert await listed(known, known.admin) == everything


@pytest.mark.parametrize(
    ("role", "namespace", "is_told"),
    [("viewer", "lab", True), ("submitter", "mill", False), ("admin", "mill", True)],
)
def test_workers_are_shared_and_what_another_s_do_is_not_told(
    role: str, namespace: str, is_told: bool
) -> None:
    history = History()
    history.apply(replace(submitted("digits-1"), namespace="lab"))
    profile = hello("w1").profile
    status = WorkerStatus(
        worker=WorkerId("w1"),
        site=SiteId("here"),
        address="w1:1",
        state=WorkerState.WORKING,
        job=JobId("digits-1"),
        profile=profile,
        stages=(StageIndex(0),),
        beat_age_s=0.0,
    )
    caller = Caller(name="who", role=CallerRole(role), namespace=namespace)
    assert worker_for(status, history, caller) == (
        status if is_told else replace(status, job=None, stages=())
    )


async def session(known: Cluster, who: Passport) -> str:
    """The cookie of somebody who opens the page by a link that was made for them."""
    async with known.channel(who) as channel:
        link = (await jobs_pb2_grpc.JobsStub(channel).OpenPage(jobs_pb2.OpenPageRequest())).link
    return (await asked(known.running, f"/login?link={link}"))[1]["Set-Cookie"].partition(";")[0]


async def test_the_page_shows_a_reader_the_jobs_of_its_namespace(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        ada = await known.passport("ada", "submitter", namespace="lab")
        eve = await known.passport("eve", "viewer", namespace="mill")
        job = await submit(known, ada)
        for who, seen in ((ada, [job]), (eve, []), (known.admin, [job])):
            cookie = await session(known, who)
            body = json.loads((await asked(known.running, "/api/overview", Cookie=cookie))[2])
            assert [x["job"] for x in body["jobs"]] == seen
            assert body["num_jobs"] == len(seen)
            for part in ("", "/curve", "/incidents", "/step"):
                status, _, _ = await asked(known.running, f"/api/jobs/{job}{part}", Cookie=cookie)
                assert status == (200 if seen else 404)
        assert (await asked(known.running, "/api/overview"))[0] == 401


async def test_a_session_ends_with_the_identity_that_it_was_made_for(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        eve = await known.passport("eve", "viewer")
        cookie = await session(known, eve)
        assert (await asked(known.running, "/", Cookie=cookie))[0] == 200
        await known.revoke("eve", "viewer")
        assert (await asked(known.running, "/", Cookie=cookie))[0] == 401
