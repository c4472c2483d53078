"""`skein audit show` and `verify`: the audit log in a coordinator's state directory, read where it lies."""

from collections import deque
from pathlib import Path

import click

from client.cli import DONE, FAILED
from client.cli.tables import print_json, print_listed
from skein.errors import UserError
from skein.storage.chain import FOLDER, AuditEntry, ChainPosition, chain_files, entries, verify_chain
from skein.wire.identity.passport import utc_text
from skein.wire.process.state_dir import default_state_dir

_COLUMNS = ("NUMBER", "AT", "WHO", "NAMESPACE", "HOST", "DID", "WHAT", "OUTCOME")
_NONE = "-"
_state_dir = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    default=default_state_dir,
    show_default="~/.local/state/skein",
    help="Of the coordinator.",
)
_json = click.option("--json", "is_json", is_flag=True, help="Print JSON.")


@click.command
@_state_dir
@click.option("--tail", type=click.IntRange(min=1), help="Show so many entries, the last ones. Default: all.")
@_json
def show(*, state_dir: Path, tail: int | None, is_json: bool) -> None:
    """Show who did what, when, and what came of it."""
    found = deque(entries(_folder(state_dir)), maxlen=tail)
    print_listed(found, _COLUMNS, _row, nothing="no entries", is_json=is_json)


@click.command
@_state_dir
@click.option(
    "--known", metavar="NUMBER:DIGEST", help="A position that was printed before, and kept elsewhere."
)
@_json
def verify(*, state_dir: Path, known: str | None, is_json: bool) -> int:
    """Find entries that were changed, taken out or cut off; exit 1 if there are any.

    Whoever can write to the directory can also make up all of it. Keep the position that this prints elsewhere, and
    give it as --known later.
    """
    mark = None if known is None else ChainPosition.parse("--known", known)
    found = verify_chain(_folder(state_dir), mark)
    if is_json:
        print_json({"end": found.end.text(), "faults": found.faults})
    else:
        for fault in found.faults:
            click.echo(fault)
        click.echo(f"{'not whole' if found.faults else 'whole'}, to {found.end.text()}")
    return FAILED if found.faults else DONE


def _folder(state_dir: Path) -> Path:
    folder = state_dir / FOLDER
    try:
        if chain_files(folder) or folder.is_dir():
            return folder
    except OSError as error:
        raise UserError(
            "--state-dir", str(state_dir), f"{error.strerror}; ask who runs the coordinator"
        ) from error
    hint = "no audit log is there: give the directory of a coordinator, on its machine"
    raise UserError("--state-dir", str(state_dir), hint)


def _row(found: tuple[int, AuditEntry]) -> tuple[str, ...]:
    number, entry = found
    texts = (entry.who, entry.namespace, entry.host, entry.did, entry.what, entry.outcome)
    return (str(number), utc_text(entry.wall_s), *(_printable(text) for text in texts))


def _printable(text: str) -> str:
    """A text that strangers had a part in, without what a terminal would obey."""
    return "".join(x if x.isprintable() else "?" for x in text) or _NONE
