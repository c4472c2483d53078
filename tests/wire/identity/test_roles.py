"""The table of roles and methods, asked over real connections: what it leaves out is refused."""

from contextlib import suppress
from importlib import import_module
from pathlib import Path

import grpc
import pytest
from grpc import aio

import skein.wire.v1
from skein.wire.channel import Lane, open_channel
from skein.wire.identity.names import COORDINATOR, Caller, CallerRole
from skein.wire.identity.roles import ROLES
from tests.wire.identity.test_handshake import DEADLINE_S, serving, wallet


def methods() -> list[str]:
    """All methods of all services, as Service/Method."""
    stubs = sorted(Path(skein.wire.v1.__path__[0]).glob("*_pb2.py"))
    files = [import_module(f"skein.wire.v1.{path.stem}").DESCRIPTOR for path in stubs]
    services = [service for file in files for service in file.services_by_name.values()]
    return [f"{service.name}/{method.name}" for service in services for method in service.methods]


def test_each_method_of_each_service_says_who_may_call_it() -> None:
    assert sorted(methods()) == sorted(ROLES)


@pytest.mark.parametrize("role", list(CallerRole))
async def test_whom_a_row_leaves_out_is_refused_with_a_reason(role: CallerRole) -> None:
    shown = wallet(Caller(name="ada", role=role))
    async with (
        serving(wallet(COORDINATOR)) as target,
        open_channel(target, Lane.CONTROL, credentials=shown) as channel,
    ):
        for name in [name for name in methods() if name.startswith("Jobs/")]:
            call = channel.stream_stream(f"/skein.wire.v1.{name}", lambda data: data, None)(
                iter([b""]), timeout=DEADLINE_S
            )
            with suppress(aio.AioRpcError):  # the code says it
                await anext(aiter(call), None)
            if role in ROLES[name]:
                call.cancel()
                continue
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED, name
            assert await call.details() == (
                f"{role} ada may not call {name.partition('/')[2]}, which is for: {', '.join(sorted(ROLES[name]))}"
            )
