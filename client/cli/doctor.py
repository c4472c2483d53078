"""`skein doctor`: looks for what usually goes wrong, before it does."""

import socket
from collections.abc import Iterator
from pathlib import Path

import click

from client.cli import DONE, FAILED
from client.cli.options import connect_client, remote_command, target
from client.cli.tables import print_json
from client.connection import DEFAULT_TARGET
from client.doctor.answers import look_at_link, look_at_peers, look_at_version
from client.doctor.certificates import look_at_identity
from client.doctor.finding import DoctorFinding, doubtful, fine, wrong
from client.doctor.installation import look_at_installation
from client.doctor.room import look_at_data, look_for_room
from client.doctor.way import look_along, look_for_black_hole
from client.errors import VersionMismatch
from client.jobfile import read_job
from skein.config.location import parse_offers
from skein.errors import SkeinError, UserError
from skein.storage.roots import Roots
from skein.wire.channel import split_address
from skein.wire.identity.passport import Passport
from skein.wire.leader import split_addresses
from skein.wire.process.options import data_root_option, offers_option
from skein.wire.process.state_dir import default_state_dir

ROLES = ("client", "worker", "coordinator")


@remote_command
@click.option("--role", type=click.Choice(ROLES), help="What this machine is to be. Default: any of them.")
@click.option(
    "--job",
    "job_file",
    type=click.Path(path_type=Path),
    help="A job file: whether its data can be read here.",
)
@offers_option
@data_root_option(shown="~/.local/share/skein/data", meaning="Folder that a worker here reads data from.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    default=default_state_dir,
    show_default="~/.local/state/skein",
    help="Where a service here keeps its state.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    show_default="the one after its port",
    help="Of a coordinator that is to be started here.",
)
def doctor(
    *,
    role: str | None,
    job_file: Path | None,
    offers: tuple[str, ...],
    data_roots: tuple[Path, ...],
    state_dir: Path,
    metrics_port: int | None,
    is_json: bool,
) -> int:
    """Look for what could go wrong here, and with the coordinator if there is one. Exit 1 if something will."""
    failures = 0
    roots = Roots.of("--data-root", data_roots, usual="data", offers=parse_offers(offers))
    for finding in _look(role, state_dir, metrics_port, job_file, roots):
        failures += finding.is_failed
        print_json(finding) if is_json else click.echo(_line(finding))
    return FAILED if failures else DONE


def _line(finding: DoctorFinding) -> str:
    cure = f": {finding.cure}" if finding.cure else ""
    return f"{finding.verdict:<8} {finding.check:<12} {finding.found}{cure}"


def _look(
    role: str | None,
    state_dir: Path,
    metrics_port: int | None,
    job_file: Path | None,
    roots: Roots,
) -> Iterator[DoctorFinding]:
    yield from look_at_installation(role)
    yield from look_for_room(state_dir, role)
    if job_file is not None:
        yield from _data(job_file, roots)
    proof, passport = look_at_identity(target().identity_file)
    yield proof
    if not proof.is_failed:
        yield from _coordinator(metrics_port, passport)


def _data(job_file: Path, roots: Roots) -> Iterator[DoctorFinding]:
    try:
        job = read_job(job_file)
    except UserError as error:
        yield wrong("job", str(error), f"mend it: skein job check {job_file}")
        return
    yield fine("job", str(job_file))
    yield from look_at_data(job, roots)


def _coordinator(metrics_port: int | None, passport: Passport | None) -> Iterator[DoctorFinding]:
    """Findings on the way to the coordinator, on it and its workers; where none is, whether one could be started."""
    name = target().coordinator
    try:
        host, port = split_address("coordinator", split_addresses("coordinator", name)[0])
    except UserError as error:
        yield wrong("coordinator", str(error.value), error.hint)
        return
    way = list(look_along(host, port, passport))
    if way[-1].is_failed and name == DEFAULT_TARGET:
        yield doubtful(
            "coordinator", f"none here ({way[-1].found})", "fine if it is elsewhere: give --coordinator"
        )
        yield from (_free_port(host, number) for number in (port, metrics_port or port + 1))
        return
    yield from way
    if way[-1].is_failed:
        return
    hole = look_for_black_hole(host, port)
    if hole is not None:
        yield hole
        if hole.is_failed:
            return
    yield from _answers()


def _answers() -> Iterator[DoctorFinding]:
    try:
        with connect_client() as client:
            yield look_at_version(client)
            yield from look_at_link(client)
            yield from look_at_peers(client)
    except VersionMismatch as error:
        yield wrong("version", "does not fit the coordinator's", str(error))
    except SkeinError as error:
        yield wrong("coordinator", "does not answer us", str(error))


def _free_port(host: str, port: int) -> DoctorFinding:
    check = f"port {port}"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        cure = "end what listens there, or start the coordinator with another --port and --metrics-port"
        return wrong(check, str(error.strerror), cure)
    return fine(check, "free")
