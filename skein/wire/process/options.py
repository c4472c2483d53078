"""Options that the commands of both services have, and some of the client's."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., object])

insecure_option = click.option(
    "--insecure", is_flag=True, help="Beyond this machine, too, let anybody in, in the clear."
)
metrics_host_option = click.option("--metrics-host", default="127.0.0.1", help="Address of the metrics port.")
log_format_option = click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", help="Of log lines."
)
checkpoint_root_option = click.option(
    "--checkpoint-root",
    "checkpoint_roots",
    multiple=True,
    metavar="FOLDER|URL",
    show_default="~/.local/share/skein/checkpoints",
    help="Where a checkpoint.url may lead. May be given again.",
)


offers_option = click.option(
    "--data",
    "offers",
    multiple=True,
    metavar="NAME=PATH",
    help="A folder or file that jobs may name, as data://NAME. May be given again.",
)


def data_root_option(*, shown: str, meaning: str) -> Callable[[Command], Command]:
    """`--data-root`, any number of folders.

    Args:
        shown: what counts where none is given, in words.
        meaning: what the folders are for.
    """
    return click.option(
        "--data-root",
        "data_roots",
        multiple=True,
        type=click.Path(path_type=Path),
        show_default=shown,
        help=f"{meaning} May be given again.",
    )
