"""Connections with certificates, over loopback: who is let in, who is not, and what a renewal changes."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc import aio

from skein.wire.channel import Lane, bind, news_of, open_channel, open_server
from skein.wire.credentials import Credentials, Wallet
from skein.wire.identity.authority import Authority
from skein.wire.identity.callers import NamedCallers
from skein.wire.identity.enrolling import certificate_skew
from skein.wire.identity.names import COORDINATOR, LOCAL, Caller, CallerRole, caller_of, worker_caller
from skein.wire.v1 import jobs_pb2, jobs_pb2_grpc

DEADLINE_S = 10.0
ADMIN = Caller(name="me", role=CallerRole.ADMIN, namespace="lab")
NOW_S = time.time()
"""Of the clock that TLS looks at, which no test can set."""
AUTHORITY = Authority.new(now_s=NOW_S)


class Greeter(jobs_pb2_grpc.JobsServicer):
    """Says who calls, and waits for ever in Watch."""

    async def Version(self, request: jobs_pb2.VersionRequest, context: object) -> jobs_pb2.VersionReply:
        caller = caller_of(context)  # type: ignore[arg-type]
        return jobs_pb2.VersionReply(release="" if caller is None else caller.uri)

    async def Watch(
        self, request: jobs_pb2.WatchRequest, context: object
    ) -> AsyncIterator[jobs_pb2.JobEvent]:
        yield jobs_pb2.JobEvent(sequence=1)
        await asyncio.Event().wait()


def wallet(caller: Caller, authority: Authority = AUTHORITY, *, age_s: float = 0.0) -> Credentials:
    return Credentials(wallet=Wallet(authority.make_out(caller, now_s=NOW_S - age_s)))


@asynccontextmanager
async def serving(own: Credentials, named: NamedCallers | None = None) -> AsyncIterator[str]:
    server = open_server(credentials=own, named=named)
    jobs_pb2_grpc.add_JobsServicer_to_server(Greeter(), server)  # type: ignore[abstract]
    port = bind(server, "127.0.0.1", 0, credentials=own)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def greet(target: str, shown: Credentials, expected: Caller = COORDINATOR) -> str:
    async with open_channel(target, Lane.CONTROL, credentials=shown, expected=expected) as channel:
        stub = jobs_pb2_grpc.JobsStub(channel)
        return (await stub.Version(jobs_pb2.VersionRequest(), timeout=DEADLINE_S)).release


async def test_a_certificate_says_who_calls() -> None:
    async with serving(wallet(COORDINATOR)) as target:
        assert await greet(target, wallet(ADMIN)) == ADMIN.uri


async def test_without_certificates_whoever_calls_is_the_local_admin() -> None:
    async with serving(Credentials()) as target:
        assert await greet(target, Credentials()) == LOCAL.uri


@pytest.mark.parametrize(
    "shown",
    [
        Credentials(),
        wallet(ADMIN, Authority.new(now_s=NOW_S)),
        # Who vouches for the server is right, who vouches for the caller is not.
        Credentials(
            wallet=Wallet(
                replace(Authority.new(now_s=NOW_S).make_out(ADMIN, now_s=NOW_S), authority=AUTHORITY.pem)
            )
        ),
        wallet(ADMIN, age_s=24 * 3600.0),
    ],
    ids=["none", "other authority", "certificate of another authority", "ended"],
)
async def test_without_a_certificate_that_counts_nobody_is_connected(shown: Credentials) -> None:
    async with serving(wallet(COORDINATOR)) as target:
        with pytest.raises(aio.AioRpcError) as caught:
            await greet(target, shown)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_with_another_name_is_not_spoken_to() -> None:
    async with serving(wallet(worker_caller("a"))) as target:
        assert await greet(target, wallet(ADMIN), worker_caller("a")) == ADMIN.uri
        for expected in (worker_caller("b"), worker_caller("A"), COORDINATOR):
            with pytest.raises(aio.AioRpcError) as caught:
                await greet(target, wallet(ADMIN), expected)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    ended = Wallet(AUTHORITY.make_out(COORDINATOR, now_s=NOW_S - 24 * 3600.0), tmp_path / "identity")
    async with serving(Credentials(wallet=ended)) as target:
        with pytest.raises(aio.AioRpcError):
            await greet(target, wallet(ADMIN))
        ended.renew(AUTHORITY.certify(ended.passport.request(), COORDINATOR, now_s=NOW_S))
        assert await greet(target, wallet(ADMIN)) == ADMIN.uri


def test_a_server_is_told_of_a_certificate_once() -> None:
    own = Wallet(AUTHORITY.make_out(COORDINATOR, now_s=NOW_S))
    news = news_of(own)
    assert news() is None
    own.renew(AUTHORITY.certify(own.passport.request(), COORDINATOR, now_s=NOW_S))
    assert [news() is None for _ in range(3)] == [False, True, True]


async def test_whoever_is_revoked_is_refused_and_calls_that_go_on_end() -> None:
    revoked: set[str] = set()
    named = NamedCallers(lambda caller: caller.name in revoked)
    async with serving(wallet(COORDINATOR), named) as target:
        async with open_channel(target, Lane.CONTROL, credentials=wallet(ADMIN)) as channel:
            watch = jobs_pb2_grpc.JobsStub(channel).Watch(jobs_pb2.WatchRequest(), timeout=DEADLINE_S)
            await watch.read()
            revoked.add(ADMIN.name)
            named.end(ADMIN)
            assert await watch.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(aio.AioRpcError) as caught:
            await greet(target, wallet(ADMIN))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "admin me was revoked" in str(caught.value.details())
        assert await greet(target, wallet(replace(ADMIN, name="other")))


SERVER = """
import asyncio, sys, time
from skein.wire.channel import bind, open_server
from skein.wire.credentials import Credentials, Wallet
from skein.wire.identity.enrolling import certificate_skew
from skein.wire.identity.passport import Passport

async def serve():
    own = Credentials(wallet=Wallet(Passport.load(__import__("pathlib").Path(sys.argv[1]))))
    server = open_server(credentials=own)
    print(bind(server, "127.0.0.1", 0, credentials=own), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)

asyncio.run(serve())
"""
"""A process of its own, for what gRPC speaks is settled when it is first imported."""


async def test_nothing_older_than_tls_1_3_is_spoken(tmp_path: Path) -> None:
    AUTHORITY.make_out(COORDINATOR, now_s=NOW_S).save(tmp_path / "own")
    mine = AUTHORITY.make_out(ADMIN, now_s=NOW_S)
    (tmp_path / "pem").write_text(mine.key + mine.certificate)
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    serving = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, str(tmp_path / "own")), stdin=pipe, stdout=pipe
    )
    assert serving.stdin is not None
    assert serving.stdout is not None
    port, said = int(await serving.stdout.readline()), {}
    for version in ("-tls1_3", "-tls1_2"):
        options = (version, "-alpn", "h2", "-connect", f"127.0.0.1:{port}", "-cert", str(tmp_path / "pem"))
        asking = await asyncio.create_subprocess_exec(
            "openssl", "s_client", *options, stdin=null, stdout=pipe, stderr=null
        )
        said[version] = (await asking.communicate())[0]
    serving.stdin.close()
    assert await serving.wait() == 0
    assert b"Cipher is TLS_AES" in said["-tls1_3"]
    assert b"Cipher is (NONE)" in said["-tls1_2"]


@pytest.mark.parametrize(
    ("days", "said"),
    [
        (0, None),
        (400, "ahead of the coordinator's; set it right"),
        (-2, "behind the coordinator's; set it right"),
    ],
)
async def test_a_clock_by_which_the_coordinators_certificate_is_not_in_force_is_named(
    days: int, said: str | None
) -> None:
    async with serving(wallet(COORDINATOR)) as target:
        found = await asyncio.to_thread(certificate_skew, target, now_s=NOW_S + 86_400 * days)
    assert found == said if said is None else said in str(found)
