"""`skein incidents`: what failed while a job ran, and what that cost."""

import time
from collections.abc import Iterable

import click

from client.cli.options import connect_client, remote_command
from client.cli.show import open_incident_text, seconds_text
from client.cli.tables import print_json, print_table
from skein.protocol.log.incident import Totals, ranges, short, total
from skein.protocol.log.records import Incident
from skein.units import counted

COLUMNS = (
    "NOTICED",
    "STEP",
    "KIND",
    "WORKERS",
    "REMEDY",
    "SILENT",
    "FENCE",
    "TOOK",
    "REROUTED",
    "REPLAYED",
    "ANEW",
    "LOST",
    "REPEATED",
    "REASON",
)
_NONE = "-"


@remote_command
@click.argument("job")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    metavar="N",
    help="List the newest N; the totals are of all.",
)
def incidents(job: str, *, limit: int, is_json: bool) -> None:
    """List the failures that JOB has lived through, oldest first, and what they cost together; one that lasts, apart.

    Columns: SILENT: from the last sign of life to the notice; FENCE and TOOK: from there until all had acknowledged,
    and until work went on; REROUTED: hops with another worker than before; REPLAYED: contributions computed again, as
    stage: microbatches; ANEW: microbatches begun from the start; LOST: steps; REPEATED: samples.
    """
    with connect_client() as client:
        found = client.incidents(job)
        now_open = client.job(job).status().open_incident
    shown = found[len(found) - min(limit, len(found)) :]
    if is_json:
        return print_json({"job": job, "incidents": shown, "totals": total(found), "open": now_open})
    if shown:
        print_table(COLUMNS, map(_row, shown), nothing="")
        click.echo()
    if now_open is not None:
        click.echo(f"not over yet: {open_incident_text(now_open)}")
    elif not found:
        click.echo(f"no incidents in {job}")
    if found:
        click.echo("\n".join(_total_lines(total(found), len(shown))))


def _row(incident: Incident) -> tuple[str, ...]:
    """An incident in the list; see `COLUMNS`."""
    replayed = [f"{one.stage}: {ranges(one.microbatches)}" for one in incident.replayed]
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident.wall_s)),
        str(incident.step + 1),
        incident.kind,
        short(incident.workers) or _NONE,
        incident.remedy,
        seconds_text(incident.silent_s) if incident.silent_s > 0 else _NONE,
        seconds_text(incident.fenced_s),
        seconds_text(incident.seconds),
        str(incident.num_rerouted),
        short(replayed, separator="; ") or _NONE,
        str(incident.num_retried),
        str(incident.num_steps_lost),
        str(incident.num_samples_repeated),
        " ".join(incident.reason.split()) or _NONE,
    )


def _total_lines(totals: Totals, num_shown: int) -> list[str]:
    older = totals.num_incidents - num_shown
    fields = {
        "incidents": f"{totals.num_incidents} ({_counts(totals.num_by_kind.items())})"
        + (f", the newest {num_shown} listed" if older else ""),
        "remedies": _counts(totals.num_by_remedy.items()),
        "steps": f"{totals.num_steps_lost} lost",
        "samples": f"{totals.num_samples_repeated} repeated",
        "work": f"{counted(totals.num_rerouted, 'hop')} rerouted, "
        f"{counted(totals.num_replayed, 'contribution')} replayed, "
        f"{counted(totals.num_retried, 'microbatch', 'microbatches')} begun anew",
        "time": f"{seconds_text(totals.seconds)} in all, half within {seconds_text(totals.median_s)}, "
        f"99 % within {seconds_text(totals.p99_s)}",
    }
    return [f"{name:<11}{text}" for name, text in fields.items()]


def _counts(numbers: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{number} {name}" for name, number in numbers)
