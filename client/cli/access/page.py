"""`skein page`: a link to the coordinator's page, and what a browser needs before it can show that."""

from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import click

from client.cli.options import connect_client, remote_command, target
from client.cli.tables import print_json
from skein.errors import UserError
from skein.wire.channel import is_loopback, split_address
from skein.wire.identity.passport import Passport


@remote_command
@click.option(
    "--authority",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the certificate of the cluster's authority there, for a browser to trust.",
)
def page(*, authority: Path | None, is_json: bool) -> None:
    """Print a link to the coordinator's page. Whoever opens it first, within minutes, may look for some hours."""
    if authority is not None:
        _write_authority(authority)
    with connect_client() as client:
        url, called = client.page(), client.target
    if is_json:
        return print_json({"url": url})
    click.echo(url)
    _tell_way(urlsplit(url), called, knows_authority=authority is not None)


def _write_authority(file: Path) -> None:
    identity = target().identity_file
    if identity is None:
        raise UserError(
            "--authority", str(file), "there is none to write: this coordinator asks for no certificates"
        )
    try:
        file.write_text(Passport.load(identity).authority)
    except OSError as error:
        raise UserError(
            "--authority", str(file), f"{error.strerror}; give a file that you can write"
        ) from error


def _tell_way(url: SplitResult, called_at: str, *, knows_authority: bool) -> None:
    """Tell what a browser needs before it can show the page."""
    if url.scheme == "https" and not knows_authority:
        way = "skein page --authority FILE writes the one to import there"
        click.echo(f"a browser warns until it trusts this cluster's authority: {way}", err=True)
    served = split_address("page", url.netloc)
    called, _ = split_address("coordinator", called_at.partition(",")[0])
    if is_loopback(served[0]) and not is_loopback(called):
        way = f"ssh -L {served[1]}:{served[0]}:{served[1]} {called}"
        click.echo(f"it is served on the coordinator's machine only; from here, first: {way}", err=True)
