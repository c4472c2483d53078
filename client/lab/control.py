"""Control of a lab while it runs: lines of JSON over a Unix socket that only its owner can open.

One request, one answer, then the connection ends. An answer is `{"is_ok": true, ...}`, or the mistake that was made.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from client.lab.preset import Rate, Seconds
from skein.errors import SkeinError, UserError

_NAME = "control.sock"
_MAX_BYTES = 1 << 20
_ANSWER_S = 60.0
"""Stopping takes longest: services may finish what they have begun."""


class NoLab(SkeinError):
    """No lab answers in that folder."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cut(_Message):
    """Let nothing through from `a` to `b`, and back unless `is_one_way`; each is a site, an endpoint or `all`."""

    do: Literal["cut"] = "cut"
    a: str
    b: str
    is_one_way: bool = False


class Slow(_Message):
    """Give links these properties and leave them the others. Seconds, bytes per second, a share."""

    do: Literal["slow"] = "slow"
    a: str
    b: str
    is_one_way: bool = False
    latency_s: Seconds | None = None
    bytes_per_s: Rate | None = None
    jitter_s: Seconds | None = None
    loss: float | None = None

    @property
    def changes(self) -> dict[str, float]:
        """The properties that are given, by name."""
        return self.model_dump(exclude_none=True, exclude={"do", "a", "b", "is_one_way"})


class Heal(_Message):
    """Let links be as the preset says, both ways."""

    do: Literal["heal"] = "heal"
    a: str = "all"
    b: str = "all"


class Ask(_Message):
    """Tell the status of everything."""

    do: Literal["status"] = "status"


class StopLab(_Message):
    """End everything and clear up; answered before that begins."""

    do: Literal["stop"] = "stop"


Request = Cut | Slow | Heal | Ask | StopLab
_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="do")])


class LinkStatus(_Message):
    """Status of one direction between two endpoints, and what went there so far."""

    sender: str
    receiver: str
    is_cut: bool
    is_changed: bool
    latency_s: float
    bytes_per_s: float
    jitter_s: float
    loss: float
    traffic: dict[str, int]


class EndpointStatus(_Message):
    """The coordinator or a worker; `process` is None while nothing runs there.

    Args:
        up_bytes_per_s: of all that it sends, besides its links; None: only they count.
        down_bytes_per_s: likewise of all that it receives.
    """

    name: str
    site: str
    address: str
    port: int
    is_behind_nat: bool
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    namespace: str | None
    process: int | None
    log: str | None


class LabStatus(_Message):
    """All about a lab that runs."""

    mode: str
    reason: str
    preset: str
    seed: int
    folder: str
    coordinator: str | None
    metrics: str | None
    identity_file: str | None
    endpoints: tuple[EndpointStatus, ...]
    links: tuple[LinkStatus, ...]


class Mistake(_Message):
    """A `UserError`, on its way to the user."""

    field: str
    value: str
    hint: str


class Answer(_Message):
    """Answer of a lab: how many links it changed, its status, or what was wrong."""

    num_links: int = 0
    status: LabStatus | None = None
    mistake: Mistake | None = None


def ask(folder: Path, request: Request) -> Answer:
    """Answer of the lab of that folder.

    Raises:
        NoLab: none runs there.
        UserError: the request makes no sense to it.
    """
    with socket.socket(socket.AF_UNIX) as connection, _short(folder) as place:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(place)
            connection.sendall(request.model_dump_json().encode() + b"\n")
            with connection.makefile("rb") as file:
                line = file.readline()
        except OSError as error:
            raise NoLab(f"no lab runs in {folder}: start one with skein lab up") from error
    if not line:
        raise NoLab(f"the lab in {folder} ended before it answered")
    answer = Answer.model_validate_json(line)
    if answer.mistake is not None:
        raise UserError(answer.mistake.field, answer.mistake.value, answer.mistake.hint)
    return answer


async def serve(folder: Path, answer: Callable[[Request], Awaitable[Answer]]) -> asyncio.Server:
    """Answer requests in that folder until the server is closed."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            if line:
                writer.write((await _answered(line, answer)).model_dump_json().encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):
            pass  # who asked has gone, or sent an endless line
        finally:
            writer.close()

    listener = socket.socket(socket.AF_UNIX)
    (folder / _NAME).unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        with _short(folder) as place:
            listener.bind(place)
    finally:
        os.umask(before)
    return await asyncio.start_unix_server(on_connection, sock=listener, limit=_MAX_BYTES)


async def _answered(line: bytes, answer: Callable[[Request], Awaitable[Answer]]) -> Answer:
    try:
        return await answer(_REQUEST.validate_json(line))
    except UserError as error:
        return Answer(mistake=Mistake(field=error.field, value=str(error.value), hint=error.hint))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "request"
        return Answer(
            mistake=Mistake(field=where, value=line.decode(errors="replace").strip(), hint=first["msg"])
        )


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A path of the folder's socket that fits into the 108 bytes that Linux has for one."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise NoLab(f"no lab runs in {folder}: there is no such folder") from error
    try:
        yield f"/proc/self/fd/{descriptor}/{_NAME}"
    finally:
        os.close(descriptor)
