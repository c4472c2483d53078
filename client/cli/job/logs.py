"""`skein logs`: the story of a job, each event once and in order."""

import datetime
import re
import sys
import time
from collections.abc import Iterable, Iterator

import click

from client.api import Job
from client.cli import DONE, INTERRUPTED
from client.cli.job.follow import LINE_S
from client.cli.options import connect_client, remote_command
from client.cli.show import timed
from client.cli.tables import print_json
from skein.errors import UserError
from skein.units import parse_seconds
from skein.wire.views import JobEvent, StepFinished

_HOURS = re.compile(r"(\d+(?:\.\d+)?)\s*(h|d)")
_S_BY_UNIT = {"h": 3600.0, "d": 86_400.0}


@remote_command
@click.argument("job")
@click.option("-f", "--follow", "is_following", is_flag=True, help="Go on until the job ends.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="The newest N events only.")
@click.option(
    "--since", metavar="WHEN", help="Events since then only: 10min, 2h ago, 13:30, or a date and time."
)
def logs(job: str, *, is_following: bool, tail: int | None, since: str | None, is_json: bool) -> int:
    """Tell what happened to JOB: states, plans, incidents, evaluations, checkpoints, lines of workers, and steps now
    and then. Jobs that have ended keep theirs, the newest lines first of all.
    """
    begin_s = -1.0 if since is None else instant("--since", since, now=time.time())
    with connect_client() as client:
        try:
            for event in _told(
                client.job(job), begin_s=begin_s, tail=tail, is_following=is_following, is_whole=is_json
            ):
                print_json(event) if is_json else click.echo(timed(event))
                sys.stdout.flush()
        except KeyboardInterrupt:
            return INTERRUPTED
    return DONE


def _told(
    job: Job, *, begin_s: float, tail: int | None, is_following: bool, is_whole: bool
) -> Iterator[JobEvent]:
    """The events that are asked for; the newest ones are counted when those that are too many have been left out."""
    known = job.history()
    wanted = [event for event in known if event.wall_s >= begin_s]
    shown = wanted if is_whole else list(thinned(wanted))
    yield from shown if tail is None else shown[len(shown) - min(tail, len(shown)) :]
    if is_following:
        coming = job.events(since=known[-1].key if known else 0)
        yield from coming if is_whole else thinned(coming)


def thinned(events: Iterable[JobEvent]) -> Iterator[JobEvent]:
    """All but steps that another one follows too closely to be read; in order, so the last before any news is told."""
    told_s, held = 0.0, None
    for event in events:
        is_step = isinstance(event.body, StepFinished)
        if is_step and event.wall_s - told_s < LINE_S:
            held = event
            continue
        if not is_step and held is not None:
            told_s = held.wall_s
            yield held
        if is_step:
            told_s = event.wall_s
        held = None
        yield event
    if held is not None:
        yield held


def instant(field: str, text: str, *, now: float) -> float:
    """Unix seconds of `text`: so long ago, a time of day, or a date and time in ISO 8601; here, if it names no zone.

    Raises:
        UserError: it is none of these.

    >>> instant("--since", "90 s", now=1000.0), instant("--since", "2h ago", now=10_000.0)
    (910.0, 2800.0)
    >>> instant("--since", "1970-01-01T00:01:00+00:00", now=0.0)
    60.0
    """
    words = text.strip().removesuffix("ago").strip()
    try:
        if found := _HOURS.fullmatch(words):
            return now - float(found[1]) * _S_BY_UNIT[found[2]]
        return now - parse_seconds(words)
    except ValueError:
        pass  # no duration
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", words):
            words = f"{datetime.datetime.fromtimestamp(now):%Y-%m-%d} {words.zfill(5)}"
        return datetime.datetime.fromisoformat(words).timestamp()
    except ValueError as error:
        raise UserError(
            field, text, "give how long ago (10min, 2h), a time (13:30) or 2026-11-22 13:30"
        ) from error
