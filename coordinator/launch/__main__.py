"""`python -m coordinator.launch --workers N --join HOST:PORT ...`: N workers of this machine, in the foreground."""

import signal
import sys
import time

import click

from coordinator.launch.subprocesses import WorkerProcesses
from skein.errors import UserError
from skein.wire.channel import split_address

_TICK_S = 0.2


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--workers", default=2, show_default=True, help="How many.")
@click.option("--join", default="127.0.0.1:7411", show_default=True, help="host:port of the coordinator.")
@click.option("--prefix", default="worker", show_default=True, help="Of their names.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(workers: int, join: str, prefix: str, options: tuple[str, ...]) -> None:
    """Run workers on this machine until they end, or SIGTERM or Ctrl-C; OPTIONS are those of `skein worker up`."""
    try:
        split_address("join", join)
        sys.exit(_run(WorkerProcesses(join, workers, prefix=prefix, options=options)))
    except UserError as error:
        sys.exit(f"error: {error}")


def _run(workers: WorkerProcesses) -> int:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    with workers:
        while workers.num_running() and workers.failed() is None and not asked:
            time.sleep(_TICK_S)
        failed = workers.failed()
    if failed is None or asked:
        return 0
    print(f"error: {failed} has ended, so all end", file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
