"""Every method of every service, asked by everybody who may not: refused with a reason, whoever serves it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
from grpc import aio

from coordinator.identity.office import FOLDER
from skein.errors import RemoteError
from skein.wire.channel import Lane, bind, open_channel, open_server
from skein.wire.credentials import NO_CREDENTIALS, Credentials, Wallet
from skein.wire.failures import error_of
from skein.wire.identity.authority import LIFE_S, Authority
from skein.wire.identity.names import COORDINATOR, worker_caller
from skein.wire.identity.passport import Passport
from skein.wire.identity.revocations import Revocations
from skein.wire.identity.roles import ROLES
from tests.coordinator.builders import WAIT_S
from tests.coordinator.test_identities import Cluster, cluster
from tests.wire.identity.test_roles import described, methods
from worker.service import PeerService
from worker.transport.statistics import Statistics

ENROLLED = ("worker", "submitter", "viewer", "admin")
HUNG_UP = grpc.StatusCode.UNAVAILABLE, "it hung up: no certificate here is in force there"
"""All that TLS lets one say to whom it does not know."""


async def never(_asked: object) -> None:
    raise AssertionError("nobody is let in")


@asynccontextmanager
async def serving_peers(own: Passport, coordinator: str) -> AsyncIterator[str]:
    """A worker's own server, which has asked the coordinator whom to refuse."""
    credentials, revocations = Credentials(wallet=Wallet(own)), Revocations()
    await revocations.look(partial(open_channel, credentials=credentials), coordinator)
    server = open_server(credentials=credentials, named=revocations.named)
    service = PeerService(
        accepts=lambda _: None, on_tensor=lambda *_: None, state_of=never, statistics=Statistics()
    )
    service.attach(server)
    port = bind(server, "127.0.0.1", 0, credentials=credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def nothing() -> AsyncIterator[bytes]:
    """Requests that do not come: gRPC has a write that meets a refusal end the call as INTERNAL."""
    await asyncio.Event().wait()
    yield b""


async def refusal(channel: aio.Channel, method: str) -> tuple[grpc.StatusCode, str]:
    """How a call ends that says nothing of use, and in which words."""
    said = nothing() if described()[method].client_streaming else iter([b""])
    call = channel.stream_stream(f"/skein.wire.v1.{method}", lambda data: data, None)(said, timeout=WAIT_S)
    try:
        await anext(aiter(call), None)
    except aio.AioRpcError as error:
        found = error_of(error, "there")
        assert isinstance(found, RemoteError)
        return error.code(), str(found)
    call.cancel()
    return grpc.StatusCode.OK, "let in"


Shown = tuple[Credentials, grpc.StatusCode, str]
"""What a caller shows, how its calls end, and words of what is said to it."""


async def strangers(known: Cluster, state_dir: Path) -> dict[str, Shown]:
    """Who may call nothing at all."""
    authority, now_s = Authority.kept_in(state_dir / FOLDER, now_s=time.time()), time.time()
    other = Authority.new(now_s=now_s).make_out(known.admin.caller, now_s=now_s)
    ended = authority.make_out(known.admin.caller, now_s=now_s - 2 * LIFE_S)
    rows: dict[str, Shown] = {
        "no certificate": (NO_CREDENTIALS, *HUNG_UP),
        "one of another authority": (shown(replace(other, authority=authority.pem)), *HUNG_UP),
        "one that has ended": (shown(ended), *HUNG_UP),
    }
    for role in ENROLLED:
        passport = await known.passport(f"gone-{role}", role)
        await known.revoke(f"gone-{role}", role)
        words = f"{role} gone-{role} was revoked"
        rows[f"one of a revoked {role}"] = (shown(passport), grpc.StatusCode.UNAUTHENTICATED, words)
    return rows


def shown(passport: Passport) -> Credentials:
    return Credentials(wallet=Wallet(passport))


async def refusals(
    servers: dict[str, str], credentials: Credentials, names: list[str]
) -> dict[str, tuple[grpc.StatusCode, str]]:
    """What each of these methods says, asked where it is served."""
    found: dict[str, tuple[grpc.StatusCode, str]] = {}
    for who, expected in (("coordinator", COORDINATOR), ("worker", worker_caller("w-1"))):
        its_own = [name for name in names if name.startswith("Peer/") == (who == "worker")]
        async with open_channel(
            servers[who], Lane.CONTROL, credentials=credentials, expected=expected
        ) as channel:
            found |= {name: await refusal(channel, name) for name in its_own}
    return found


async def test_each_method_refuses_with_a_reason_whoever_may_not_call_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        rows = await strangers(known, tmp_path)
        mine = await known.passport("w-1")
        async with serving_peers(mine, known.target) as peers:
            servers = {"coordinator": known.target, "worker": peers}
            for row, (credentials, code, words) in rows.items():
                for name, (found, text) in (await refusals(servers, credentials, methods())).items():
                    assert (found, words in text) == (code, True), f"{name}, {row}: {found} {text}"
            roles = {role: await known.passport(f"a-{role}", role) for role in ENROLLED}
            authority = Authority.kept_in(tmp_path / FOLDER, now_s=time.time())
            roles["coordinator"] = authority.make_out(COORDINATOR, now_s=time.time())
            for role, passport in roles.items():
                barred = [name for name in methods() if role not in ROLES[name]]
                for name, (found, text) in (await refusals(servers, shown(passport), barred)).items():
                    method, name_ = name.partition("/")[2], passport.caller.name
                    words = f"{role} {name_} may not call {method}, which is for: {', '.join(sorted(ROLES[name]))}"
                    assert (found, words in text) == (grpc.StatusCode.PERMISSION_DENIED, True), (
                        f"{name}: {text}"
                    )
