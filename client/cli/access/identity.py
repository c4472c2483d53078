"""`skein join`, `skein token create`, `skein identity list` and `revoke`."""

import asyncio
import getpass
import re
import socket
import time
from dataclasses import replace

import click

from client.cli.options import connect_client, remote_command
from client.cli.tables import print_json, print_listed
from skein.errors import UserError
from skein.units import parse_seconds
from skein.wire.identity.enrolling import enrol
from skein.wire.identity.joining import JoinLine
from skein.wire.identity.names import CallerRole
from skein.wire.identity.passport import utc_text
from skein.wire.leader import split_addresses
from skein.wire.process.config_dir import default_identity_file
from skein.wire.views import KnownIdentity

_ROLES = [role.value for role in CallerRole if role is not CallerRole.COORDINATOR]


@click.command
@click.argument("line")
@click.option("--name", show_default="USER-HOST", help="By which you are known there.")
@click.option(
    "--at", metavar="HOST:PORT", help="The coordinator, where the addresses of the line do not lead there."
)
@click.option("--enrol-at", metavar="HOST:PORT", help="The same for its port for newcomers.")
def join(line: str, name: str | None, at: str | None, enrol_at: str | None) -> None:
    """Get an identity by a LINE (or @FILE) from skein token create; other commands go where it leads from then on."""
    read = JoinLine.parse("line", line)
    read = replace(read, addresses=at or read.addresses, enrol_addresses=enrol_at or read.enrol_addresses)
    for option, addresses in (("--at", read.addresses), ("--enrol-at", read.enrol_addresses)):
        _ = split_addresses(option, addresses)
    if read.role == CallerRole.WORKER:
        raise UserError("line", read.role, "it is for a worker: skein worker up --join LINE")
    passport = asyncio.run(enrol(read, name or _default_name(), clock=time.time))
    path = default_identity_file()
    passport.save(path)
    who = passport.caller
    click.echo(f"joined {passport.addresses} as {who.role} {who.name} of {who.namespace}; identity: {path}")


def _default_name() -> str:
    text = f"{getpass.getuser()}-{socket.gethostname().partition('.')[0]}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:64].strip("-.") or "somebody"


@remote_command
@click.option("--role", type=click.Choice(_ROLES), required=True, help="What whoever joins may do.")
@click.option("--ttl", default="1 h", show_default=True, help="How long the line can be used.")
@click.option("--uses", default=1, show_default=True, help="How many may join with it.")
@click.option("--namespace", default="", show_default="default", help="Where their jobs are.")
def create(*, role: str, ttl: str, uses: int, namespace: str, is_json: bool) -> None:
    """Print one line to paste where somebody joins: it names the coordinator, pins its authority and lets them in."""
    try:
        life_s = parse_seconds(ttl)
    except ValueError as error:
        raise UserError("--ttl", ttl, "give a duration such as '1 h'") from error
    with connect_client() as client:
        line, ends_s = client.create_token(role, life_s=life_s, uses=uses, namespace=namespace)
    if is_json:
        print_json({"line": line, "ends_s": ends_s})
        return
    way = "skein worker up --join" if role == CallerRole.WORKER else "skein join"
    click.echo(line)
    often = "once" if uses == 1 else f"{uses} times"
    click.echo(f"until {utc_text(ends_s)}, {often}: {way} LINE", err=True)


@remote_command
def listed(*, is_json: bool) -> None:
    """List identities: who joined, until when the newest certificate counts, who is revoked."""
    with connect_client() as client:
        found = client.identities()
    columns = ("ROLE", "NAME", "NAMESPACE", "SINCE", "UNTIL", "STATE")
    print_listed(found, columns, _row, nothing="no identities yet: skein token create", is_json=is_json)


@remote_command
@click.argument("role", type=click.Choice(_ROLES))
@click.argument("name")
def revoke(*, role: str, name: str, is_json: bool) -> None:
    """End the identity NAME of a ROLE at once, with all that goes on in its name."""
    with connect_client() as client:
        found = client.revoke(role, name)
    print_listed(
        [found], ("ROLE", "NAME", "NAMESPACE", "SINCE", "UNTIL", "STATE"), _row, nothing="", is_json=is_json
    )


def _row(found: KnownIdentity) -> tuple[str, ...]:
    state = f"revoked at {utc_text(found.revoked_s)}" if found.revoked_s else "counts"
    if not found.revoked_s and found.ends_s <= time.time():
        state = "ended"
    return (found.role, found.name, found.namespace, utc_text(found.since_s), utc_text(found.ends_s), state)
