"""`python -m coordinator`: a coordinator in the foreground. `skein coordinator up` runs this."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from coordinator.launcher import (
    DEFAULT_ENROL_PORT,
    DEFAULT_METRICS_PORT,
    DEFAULT_PORT,
    CoordinatorOptions,
    run_coordinator,
)
from coordinator.records.store import state_path
from skein.errors import UserError
from skein.protocol.membership.membership import LEASE_S
from skein.wire.process.logs import LogFormat
from skein.wire.process.options import (
    checkpoint_root_option,
    data_root_option,
    insecure_option,
    log_format_option,
    metrics_host_option,
)
from skein.wire.process.state_dir import default_state_dir


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=DEFAULT_PORT, help="Port of the gRPC services.")
@click.option(
    "--state-dir",
    metavar="DIRECTORY",
    default=lambda: str(default_state_dir()),
    show_default="~/.local/state/skein",
    help="Run log and checkpoints; a path or a file:// URL. Whoever has it is the coordinator.",
)
@click.option("--standby", "is_standby", is_flag=True, help="Lead only once the coordinator there is silent.")
@click.option(
    "--takeover-after", "takeover_s", default=3.0, help="Seconds of silence that make a standby lead."
)
@click.option(
    "--accept-lost-log",
    "accepts_lost_log",
    is_flag=True,
    help="Go on with a run log that has lost its end; what it does not know any more is forgotten.",
)
@click.option(
    "--advertise", metavar="HOST[:PORT]", help="Address that workers and clients shall use instead."
)
@insecure_option
@click.option(
    "--certificates",
    "has_certificates",
    is_flag=True,
    help="Let nobody in without a certificate; by itself beyond this machine, but with --insecure.",
)
@click.option(
    "--enrol-port", default=DEFAULT_ENROL_PORT, help="Port where a line of skein token create gives one."
)
@click.option("--ray", "ray_address", help="Head of an existing Ray cluster, host:port; else one is started.")
@click.option("--num-cpus", default=2, help="CPUs of the cluster that is started; planning uses them.")
@metrics_host_option
@click.option("--metrics-port", default=DEFAULT_METRICS_PORT, help="Port of /metrics and /sd; 0 for none.")
@data_root_option(shown="left to the workers", meaning="Refuse jobs that name data elsewhere.")
@checkpoint_root_option
@click.option(
    "--quotas",
    "quotas_file",
    type=click.Path(path_type=Path),
    show_default="no bounds",
    help="YAML file that says what jobs of each namespace may take together.",
)
@click.option("--lease", "lease_s", default=LEASE_S, help="Seconds of silence after which a worker is lost.")
@log_format_option
def main(
    *,
    host: str,
    port: int,
    state_dir: str,
    is_standby: bool,
    takeover_s: float,
    accepts_lost_log: bool,
    advertise: str | None,
    insecure: bool,
    has_certificates: bool,
    enrol_port: int,
    ray_address: str | None,
    num_cpus: int,
    metrics_host: str,
    metrics_port: int,
    lease_s: float,
    data_roots: tuple[Path, ...],
    checkpoint_roots: tuple[str, ...],
    quotas_file: Path | None,
    log_format: LogFormat,
) -> None:
    """Run a coordinator until SIGTERM or Ctrl-C. It hosts itself on Ray and owns its state directory."""
    try:
        directory = state_path(state_dir)
    except UserError as error:
        raise click.UsageError(str(error)) from error
    options = CoordinatorOptions(
        state_dir=directory,
        is_standby=is_standby,
        takeover_s=takeover_s,
        accepts_lost_log=accepts_lost_log,
        advertise=advertise,
        host=host,
        port=port,
        metrics_host=metrics_host,
        metrics_port=metrics_port or None,
        allow_insecure=insecure,
        has_certificates=has_certificates,
        enrol_port=enrol_port,
        lease_s=lease_s,
        ray_address=ray_address,
        num_cpus=num_cpus,
        data_roots=data_roots,
        checkpoint_roots=checkpoint_roots,
        quotas_file=quotas_file,
        log_format=log_format,
    )
    code = run_coordinator(options)
    sys.stdout.flush()
    sys.stderr.flush()
    # Ray's threads crash at the end of an interpreter whose cluster has gone before; everything is taken down by now.
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """Carries out one command line; whatever is wrong with it is one line on standard error."""
    try:
        main.main(args=list(arguments), prog_name="skein coordinator up", standalone_mode=False)
    except click.ClickException as error:
        message = error.format_message().rstrip(".")
        print(f"error: {message} (see skein coordinator up --help)", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
