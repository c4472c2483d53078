"""`python -m worker`: a worker in the foreground. `skein worker up` runs this."""

import sys
from pathlib import Path
from typing import Literal

import click

from skein.units import parse_bytes
from worker.daemon import USAGE, WorkerOptions, main
from worker.logs import LogFormat


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--join",
    metavar="HOST:PORT",
    envvar="SKEIN_COORDINATOR",
    show_envvar=True,
    required=True,
    help="The coordinator.",
)
@click.option("--name", help="Of this worker among all. Default: the host's, with a random ending.")
@click.option("--site", default="default", help="Where this is; workers of one site are near each other.")
@click.option("--listen", default="127.0.0.1", help="Address that peers' tensors arrive at.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, show_default="a free one", help="Port there."
)
@click.option(
    "--advertise", metavar="HOST[:PORT]", help="What peers shall use instead, behind NAT for instance."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="What computes.")
@click.option(
    "--memory", metavar="SIZE", show_default="most of what is free", help="That jobs may use, such as 8GiB."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    envvar="SKEIN_TOKEN_FILE",
    show_envvar=True,
    help="Holds the coordinator's token.",
)
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without a token.")
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), show_default="none", help="Serve /metrics there."
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", help="Of log lines.")
def up(
    join: str,
    name: str | None,
    site: str,
    listen: str,
    port: int,
    advertise: str | None,
    device: Literal["auto", "cpu", "cuda"],
    memory: str | None,
    token_file: Path | None,
    insecure: bool,
    metrics_port: int | None,
    log_format: LogFormat,
) -> int:
    """Run a worker until SIGTERM or Ctrl-C, which has its work taken away first; a second one ends it at once."""
    options = WorkerOptions(
        join=join,
        name=name,
        site=site,
        listen=listen,
        port=port,
        advertise=advertise,
        device=device,
        memory_bytes=None if memory is None else _size(memory),
        token_file=token_file,
        insecure=insecure,
        metrics_port=metrics_port,
        log_format=log_format,
    )
    return main(options)


def _size(text: str) -> int:
    """Bytes, written with a unit."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--memory") from error


def run() -> int:
    """Carries out the command line; a wrong one is one line on standard error."""
    try:
        code: object = up.main(prog_name="skein worker up", standalone_mode=False)
    except click.ClickException as error:
        print(f"error: {error.format_message().rstrip('.')} (see skein worker up --help)", file=sys.stderr)
        return USAGE
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(run())
