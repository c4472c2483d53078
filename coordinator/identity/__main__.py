"""`python -m coordinator.identity`: makes a cluster's authority. `skein init` runs this."""

import sys
import time
from collections.abc import Sequence

import click

from coordinator.identity.office import ADMIN_FILE, FOLDER, IdentityOffice
from coordinator.launcher import (
    DEFAULT_ENROL_PORT,
    DEFAULT_PORT,
    EVERYWHERE,
    CoordinatorOptions,
    advertised,
)
from coordinator.lead.addresses import FOLDER as ADDRESSES
from coordinator.lead.addresses import CoordinatorAddress, SharedAddresses
from coordinator.records.store import state_path
from skein.errors import UserError
from skein.wire.channel import join_address, split_address
from skein.wire.identity.authority import CERTIFICATE_FILE
from skein.wire.process.state_dir import default_state_dir


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--state-dir",
    metavar="DIRECTORY",
    default=lambda: str(default_state_dir()),
    show_default="~/.local/state/skein",
    help="The coordinator's: the authority is kept in it.",
)
@click.option(
    "--advertise",
    metavar="HOST[:PORT]",
    show_default="this machine's name",
    help="Address by which workers and clients will reach the coordinator.",
)
@click.option("--port", default=DEFAULT_PORT, help="Port of its gRPC services.")
@click.option("--enrol-port", default=DEFAULT_ENROL_PORT, help="Port where a line gives an identity.")
def main(*, state_dir: str, advertise: str | None, port: int, enrol_port: int) -> None:
    """Make a cluster's authority and the identity of its admin; keep what is there. The coordinator does so itself
    where it starts beyond this machine: this is for who wants to have both before.
    """
    folder = state_path(state_dir).expanduser().resolve()
    options = CoordinatorOptions(
        state_dir=folder, host=EVERYWHERE[0], port=port, enrol_port=enrol_port, advertise=advertise
    )
    address = advertised(options)
    is_there = (folder / FOLDER / CERTIFICATE_FILE).exists()
    shared = SharedAddresses(folder / ADDRESSES)
    enrol_address = join_address(split_address("advertise", address)[0], enrol_port)
    shared.announce(CoordinatorAddress(address=address, enrol_address=enrol_address))
    office = IdentityOffice(folder / FOLDER, shared, clock=time.time)
    office.lead()
    office.close()
    click.echo(f"authority: {folder / FOLDER} ({'as it was' if is_there else 'made'}; keep it to yourself)")
    click.echo(f"identity of its admin: {folder / FOLDER / ADMIN_FILE}")
    click.echo(
        f"next: skein coordinator up --host {EVERYWHERE[0]} --advertise {address} --state-dir {folder}"
    )


def run(arguments: Sequence[str]) -> int:
    """Carries out one command line; whatever is wrong with it is one line on standard error."""
    try:
        main.main(args=list(arguments), prog_name="skein init", standalone_mode=False)
    except (click.ClickException, UserError) as error:
        text = error.format_message().rstrip(".") if isinstance(error, click.ClickException) else str(error)
        print(f"error: {text} (see skein init --help)", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
