"""`python -m worker`: a worker in the foreground. `skein worker up` runs this."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from skein.config.resources import parse_labels
from skein.errors import UserError
from skein.units import parse_bytes
from skein.wire.process.logs import LogFormat
from skein.wire.process.options import (
    checkpoint_root_option,
    data_root_option,
    insecure_option,
    log_format_option,
    metrics_host_option,
    offers_option,
)
from worker import daemon

_PORT = click.IntRange(0, 2**16 - 1)


def _memory(text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise UserError("memory", text, "give a size such as '8 GiB'") from error


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--join",
    required=True,
    metavar="LINE|@FILE|HOST:PORT[,...]",
    envvar="SKEIN_COORDINATOR",
    show_envvar=True,
    help="A line from skein token create, or the coordinator (and its standbys) where nobody needs one.",
)
@click.option("--name", show_default="the host's, a random ending", help="Of this worker among all.")
@click.option("--site", default="default", help="Where this is. Workers of one site are near each other.")
@click.option("--listen", default="127.0.0.1", help="Address that peers' tensors arrive at.")
@click.option("--port", type=_PORT, default=0, show_default="a free one", help="Port there.")
@click.option("--advertise", metavar="HOST[:PORT]", help="Address that peers shall use instead, behind NAT.")
@click.option(
    "--relay",
    "offers_relay",
    is_flag=True,
    help="Carry what workers send each other that cannot dial each other.",
)
@click.option(
    "--label",
    "labels",
    metavar="KEY=VALUE",
    multiple=True,
    help="For jobs to ask for, such as gpu=h100. May be given again.",
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where torch computes."
)
@click.option(
    "--devices",
    metavar="cuda:0,cuda:1|cpu:2",
    show_default="the one of --device",
    help="Devices that compute each layer together, as one worker.",
)
@click.option("--memory", metavar="SIZE", show_default="most of what is free", help="What a job may use.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    show_default="~/.local/state/skein",
    help="Holds what proves, under a --name, that a worker started again is the same one.",
)
@insecure_option
@metrics_host_option
@click.option(
    "--metrics-port", type=_PORT, show_default="none", help="Port of /metrics; beats carry the same numbers."
)
@offers_option
@data_root_option(
    shown="none if --data is given, else ~/.local/share/skein/data",
    meaning="Folder of data, tokenizers and weights that jobs may name by path.",
)
@checkpoint_root_option
@log_format_option
def up(
    *,
    join: str,
    name: str | None,
    site: str,
    listen: str,
    port: int,
    advertise: str | None,
    offers_relay: bool,
    labels: tuple[str, ...],
    device: Literal["auto", "cpu", "cuda"],
    devices: str | None,
    memory: str | None,
    state_dir: Path | None,
    insecure: bool,
    metrics_host: str,
    metrics_port: int | None,
    offers: tuple[str, ...],
    data_roots: tuple[Path, ...],
    checkpoint_roots: tuple[str, ...],
    log_format: LogFormat,
) -> int:
    """Run a worker until SIGTERM or Ctrl-C, which give its work back first."""
    options = daemon.WorkerOptions(
        join=join,
        name=name,
        site=site,
        listen=listen,
        port=port,
        advertise=advertise,
        offers_relay=offers_relay,
        labels=parse_labels(labels),
        device=device,
        devices=devices,
        memory_bytes=_memory(memory),
        state_dir=state_dir,
        insecure=insecure,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        offers=offers,
        data_roots=data_roots,
        checkpoint_roots=checkpoint_roots,
        log_format=log_format,
    )
    return daemon.main(options)


def run(arguments: Sequence[str]) -> int:
    """Carries out one command line; the exit code. Whatever is wrong with it is one line on standard error."""
    try:
        code = up.main(args=list(arguments), prog_name="skein worker up", standalone_mode=False)
    except click.ClickException as error:
        print(
            f"error: {error.format_message().rstrip('.')} (see skein worker up --help)",
            file=sys.stderr,
        )
        return daemon.USAGE
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return daemon.USAGE
    except click.Abort:
        return daemon.FAILED
    return int(code)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
