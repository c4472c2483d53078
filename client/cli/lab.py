"""`skein lab`: an emulated WAN on this machine, changed while it runs."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click

from client.cli.options import COORDINATOR_VARIABLE, json_option
from client.cli.tables import print_json, print_table
from client.lab.control import Ask, Cut, Heal, LabStatus, LinkStatus, NoLab, Request, Slow, ask
from client.lab.measure import measure_direction
from client.lab.preset import PRESETS, parse_rate
from client.lab.start import LabOptions, start_lab, stop_lab, wait_for_workers
from client.lab.state import LabFolder, Mode, default_folder
from skein.errors import UserError
from skein.units import format_bytes, parse_seconds
from skein.wire.process.config_dir import IDENTITY_VARIABLE
from skein.wire.process.options import data_root_option

_folder_option = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=LabFolder),
    default=default_folder,
    show_default="~/.local/state/skein-lab",
    envvar="SKEIN_LAB_DIR",
    show_envvar=True,
    help="The lab's folder: logs, state, how to reach it.",
)
_one_way_option = click.option("--one-way", "is_one_way", is_flag=True, help="Only from A to B.")


@click.command()
@click.option(
    "--preset",
    default="ten-cities",
    show_default=True,
    metavar="NAME|FILE",
    help=f"What to emulate: {', '.join(PRESETS)}, or a file like them.",
)
@click.option("--workers", "num_workers", type=int, help="How many. Default: one at each site.")
@click.option(
    "--mode",
    type=click.Choice(["namespaces", "proxy"]),
    help="How. Default: namespaces where they are permitted.",
)
@click.option("--seed", default=0, show_default=True, help="Of jitter and loss.")
@click.option("--no-services", is_flag=True, help="The network alone, without a coordinator and workers.")
@data_root_option(shown="the working directory", meaning="Folder that workers read data from.")
@click.option("--closed-homes", is_flag=True, help="Behind NAT no port is forwarded: nobody can dial in.")
@_folder_option
@json_option
def up(
    *,
    preset: str,
    num_workers: int | None,
    mode: Mode | None,
    seed: int,
    no_services: bool,
    closed_homes: bool,
    data_roots: tuple[Path, ...],
    folder: LabFolder,
    is_json: bool,
) -> None:
    """Bring a lab up, in the background: sites, links between them, a coordinator and workers."""
    options = LabOptions(
        preset=preset,
        num_workers=num_workers,
        mode=mode,
        seed=seed,
        has_services=not no_services,
        has_closed_homes=closed_homes,
        data_roots=data_roots,
    )
    lab = start_lab(folder, options)
    click.echo(f"mode: {lab.status.mode} ({lab.status.reason})", err=is_json)
    with ExitStack() as undo:
        undo.callback(stop_lab, folder)
        if options.has_services:
            wait_for_workers(
                lab, lambda joined, of: click.echo(f"{joined} of {of} workers have joined", err=True)
            )
        undo.pop_all()
    status = ask(folder.path, Ask()).status
    assert status is not None
    if is_json:
        return print_json(status.model_dump())
    _tell_endpoints(status)
    click.echo(_how_to_go_on(status))


@click.command()
@_folder_option
@json_option
def status(*, folder: LabFolder, is_json: bool) -> None:
    """Show a lab: what runs where, and links that are not as the preset says."""
    found = ask(folder.path, Ask()).status
    assert found is not None
    if is_json:
        return print_json(found.model_dump())
    click.echo(f"{found.preset} in mode {found.mode} ({found.reason}), seed {found.seed}")
    _tell_endpoints(found)
    changed = [link for link in found.links if link.is_cut or link.is_changed]
    columns = ("FROM", "TO", "LINK", "LATENCY", "JITTER", "BANDWIDTH", "LOSS")
    print_table(columns, map(_link_row, changed), nothing="all links are as the preset says")
    click.echo(_how_to_go_on(found))


@click.command()
@click.argument("a")
@click.argument("b")
@_one_way_option
@_folder_option
def cut(a: str, b: str, *, is_one_way: bool, folder: LabFolder) -> None:
    """Let nothing through between A and B: sites, workers, `coordinator` or `all`."""
    _change(folder, Cut(a=a, b=b, is_one_way=is_one_way), "cut")


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--latency", metavar="TIME", help="One way, such as '80 ms'.")
@click.option("--bandwidth", metavar="RATE", help="Such as '20 Mbit/s' or '2 MB/s'.")
@click.option("--jitter", metavar="TIME", help="Up to so much is added to the latency.")
@click.option("--loss", type=click.FloatRange(0, 1, max_open=True), help="Share of packets, such as 0.01.")
@_one_way_option
@_folder_option
def slow(
    a: str,
    b: str,
    *,
    latency: str | None,
    bandwidth: str | None,
    jitter: str | None,
    loss: float | None,
    is_one_way: bool,
    folder: LabFolder,
) -> None:
    """Give links between A and B other properties; those not given stay."""
    request = Slow(
        a=a,
        b=b,
        is_one_way=is_one_way,
        latency_s=_parsed("--latency", latency, parse_seconds, "'80 ms'"),
        bytes_per_s=_parsed("--bandwidth", bandwidth, parse_rate, "'20 Mbit/s'"),
        jitter_s=_parsed("--jitter", jitter, parse_seconds, "'5 ms'"),
        loss=loss,
    )
    if not request.changes:
        raise UserError("slow", f"{a} {b}", "give --latency, --bandwidth, --jitter or --loss")
    _change(folder, request, "changed")


@click.command()
@click.argument("a", required=False, default="all")
@click.argument("b", required=False, default="all")
@_folder_option
def heal(a: str, b: str, *, folder: LabFolder) -> None:
    """Let links between A and B be as the preset says; without them, all links."""
    _change(folder, Heal(a=a, b=b), "healed")


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--seconds", type=click.FloatRange(1, 600), default=10.0, show_default=True, help="How long.")
@_folder_option
@json_option
def measure(a: str, b: str, *, seconds: float, folder: LabFolder, is_json: bool) -> None:
    """Measure what TCP gets from endpoint A to endpoint B, beside what the link is set to."""
    status = ask(folder.path, Ask()).status
    assert status is not None
    found = measure_direction(status, a, b, seconds=seconds)
    if is_json:
        return print_json(found)
    rows = (
        ("round trip", f"{1e3 * found.round_trip_s:.1f} ms", f"{1e3 * found.measured_round_trip_s:.1f} ms"),
        ("bandwidth", _megabits(found.bytes_per_s), _megabits(found.measured_bytes_per_s)),
    )
    print_table((f"{a} TO {b}", "SET", "MEASURED"), rows, nothing="nothing measured")


@click.command()
@_folder_option
def down(*, folder: LabFolder) -> None:
    """End a lab and remove all of it but logs and state, also after it was killed."""
    if not folder.has_remains():
        raise NoLab(f"no lab runs in {folder.path}, and none left anything behind")
    num_left = stop_lab(folder)
    click.echo(
        f"down; logs are in {folder.logs}" + (f"; ended {num_left} left processes" if num_left else "")
    )


def _change(folder: LabFolder, request: Request, done: str) -> None:
    num_links = ask(folder.path, request).num_links
    click.echo(f"{done}: {num_links} directed links")


def _parsed(field: str, text: str | None, parse: Callable[[str], float], example: str) -> float | None:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise UserError(field, text, f"give something like {example}") from error


def _tell_endpoints(status: LabStatus) -> None:
    columns = ("ENDPOINT", "SITE", "ADDRESS", "PROCESS", "NAMESPACE")
    rows = (
        (x.name, x.site, f"{x.address}:{x.port}", str(x.process or "-"), x.namespace or "-")
        for x in status.endpoints
    )
    print_table(columns, rows, nothing="no endpoints")


def _link_row(link: LinkStatus) -> tuple[str, ...]:
    return (
        link.sender,
        link.receiver,
        "cut" if link.is_cut else "changed",
        f"{1e3 * link.latency_s:.1f} ms",
        f"{1e3 * link.jitter_s:.1f} ms",
        f"{format_bytes(link.bytes_per_s)}/s",
        f"{link.loss:.2%}",
    )


def _megabits(bytes_per_s: float) -> str:
    return f"{8e-6 * bytes_per_s:.1f} Mbit/s"


def _how_to_go_on(status: LabStatus) -> str:
    if status.coordinator is None:
        inside = (
            "ip netns exec NAMESPACE COMMAND" if status.mode == "namespaces" else "dial the addresses above"
        )
        return f"to use it: {inside}"
    return (
        f"metrics at {status.metrics}, logs in {Path(status.folder) / 'logs'}\n"
        f"to use it:\n"
        f"  export {COORDINATOR_VARIABLE}={status.coordinator} {IDENTITY_VARIABLE}={status.identity_file}\n"
        f"  skein submit job.yaml"
    )
