"""Options that many commands share, and the connection they describe."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from client.api import Client
from client.connection import DEFAULT_TARGET
from skein.errors import UserError
from skein.units import parse_bytes, parse_seconds
from skein.wire.process.config_dir import IDENTITY_VARIABLE, default_identity_file

if TYPE_CHECKING:
    from skein.wire.identity.passport import Passport

COORDINATOR_VARIABLE = "SKEIN_COORDINATOR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Coordinator to call, and how to be let in."""

    coordinator: str
    timeout: str
    identity_file: Path | None = None
    """Identity to be known by; None: connections are not encrypted."""


class _RemoteCommand(click.Command):
    """A command that may call a coordinator. The options that say which one become its context's `Target`."""

    def invoke(self, ctx: click.Context) -> object:
        params = ctx.params
        ctx.obj = Target(
            coordinator=params.pop("coordinator"),
            timeout=params.pop("timeout"),
            identity_file=params.pop("identity_file"),
        )
        ctx.obj = _joined(
            ctx.obj, is_named=ctx.get_parameter_source("coordinator") is not ParameterSource.DEFAULT
        )
        return super().invoke(ctx)


def _joined(given: Target, *, is_named: bool) -> Target:
    """The coordinator that this user has joined, and the identity there, where nothing or that one `is_named`."""
    file = given.identity_file or (default_identity_file() if default_identity_file().exists() else None)
    if file is None:
        return given
    from skein.wire.identity.passport import Passport

    addresses = Passport.load(file).addresses
    if not is_named:
        return replace(given, coordinator=addresses or given.coordinator, identity_file=file)
    is_there = not set(given.coordinator.split(",")).isdisjoint(addresses.split(","))
    return replace(given, identity_file=file) if is_there else given


def remote_command(function: Callable[..., object]) -> click.Command:
    """`function` as a command with `--json`, and with the options that `connect_client` uses."""
    command = json_option(click.command(cls=_RemoteCommand)(function))
    command.params += _CONNECTION
    return command


def target() -> Target:
    """The coordinator that the running command's options describe."""
    found = click.get_current_context().find_object(Target)
    assert found is not None
    return found


def connect_client() -> Client:
    """A client of that coordinator; nothing is sent yet.

    Raises:
        UserError: the options make no sense.
    """
    given = target()
    try:
        timeout_s = parse_seconds(given.timeout)
    except ValueError as error:
        raise UserError("--timeout", given.timeout, "give a duration such as '10 s'") from error
    return Client(given.coordinator, passport=_passport(given.identity_file), timeout_s=timeout_s)


def _passport(file: Path | None) -> "Passport | None":
    """The identity in a file, renewed where that is due.

    Raises:
        UserError: it is none, or does not count any more.
        RemoteError: it is due, and no coordinator can be reached.
    """
    if file is None:
        return None
    from skein.wire.identity.enrolling import renewed_if_due
    from skein.wire.identity.passport import Passport

    kept = Passport.load(file)
    passport = asyncio.run(renewed_if_due(kept, clock=time.time)) if kept.enrol_addresses else kept
    if passport != kept:
        passport.save(file)
    if (fault := passport.fault(now_s=time.time())) is not None:
        raise UserError("identity", str(file), fault)
    return passport


_CONNECTION = (
    click.Option(
        ["--coordinator"],
        metavar="HOST:PORT[,...]",
        default=DEFAULT_TARGET,
        show_default=True,
        envvar=COORDINATOR_VARIABLE,
        show_envvar=True,
        help="Which coordinator to ask, or it and its standbys.",
    ),
    click.Option(
        ["--identity", "identity_file"],
        type=click.Path(path_type=Path),
        envvar=IDENTITY_VARIABLE,
        show_envvar=True,
        help="Key and certificate by which the coordinator knows you; by default what skein join has kept.",
    ),
    click.Option(["--timeout"], default="10 s", show_default=True, help="For one try of one call."),
)
json_option = click.option("--json", "is_json", is_flag=True, help="Print JSON, one object per line.")
overrides_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Replace a field of the file; repeatable.",
)


def size(field: str, text: str) -> int:
    """Bytes in `text`.

    Raises:
        UserError: it is no size of at least one byte.
    """
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise UserError(field, text, "give a size such as '5 GB' or '512 MiB'") from error
    if num_bytes < 1:
        raise UserError(field, text, "give at least 1 byte")
    return num_bytes
