"""Options that many commands share, and the connection they describe."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click

from client.api import Client
from client.connection import DEFAULT_TARGET
from skein.errors import UserError
from skein.units import parse_bytes, parse_seconds
from skein.wire.credentials import read_token

Command = TypeVar("Command", bound=Callable[..., int])

COORDINATOR_VARIABLE = "SKEIN_COORDINATOR"
TOKEN_VARIABLE = "SKEIN_TOKEN_FILE"  # noqa: S105 - the name of a variable
_KEY = "client.cli.options"


@dataclass(slots=True)
class Target:
    """Coordinator to call, and how to be let in."""

    coordinator: str = DEFAULT_TARGET
    token_file: Path | None = None
    timeout: str = "10 s"

    def token(self) -> str | None:
        """Token in the token file; None where no file is given.

        Raises:
            UserError: the file cannot be used.
        """
        return None if self.token_file is None else read_token(self.token_file)


def target() -> Target:
    """The coordinator that the running command's options describe."""
    found = click.get_current_context().meta.setdefault(_KEY, Target())
    assert isinstance(found, Target)
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
    return Client(given.coordinator, token=given.token(), timeout_s=timeout_s)


def connection_options(command: Command) -> Command:
    """Adds `--coordinator`, `--token-file` and `--timeout`, which `connect_client` uses."""
    for option in (
        click.option(
            "--timeout",
            default="10 s",
            show_default=True,
            expose_value=False,
            callback=_keep,
            help="For one try of one call.",
        ),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path),
            envvar=TOKEN_VARIABLE,
            show_envvar=True,
            expose_value=False,
            callback=_keep,
            help="Holds the coordinator's token.",
        ),
        click.option(
            "--coordinator",
            metavar="HOST:PORT[,...]",
            default=DEFAULT_TARGET,
            show_default=True,
            envvar=COORDINATOR_VARIABLE,
            show_envvar=True,
            expose_value=False,
            callback=_keep,
            help="Which coordinator to ask, or it and its standbys.",
        ),
    ):
        command = option(command)
    return command


def _keep(_context: click.Context, parameter: click.Parameter, value: object) -> None:
    assert parameter.name is not None
    setattr(target(), parameter.name, value)


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
