"""Epochs that a run log was opened under: how far it has come, and whether it has all that somebody knows of it."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from skein.protocol.log.records import EpochOpened
from skein.protocol.messages.positions import LogPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """An epoch of the log, and the entry that begins it."""

    record: EpochOpened
    entry: int


def position_reached(openings: Sequence[Opening], num_records: int) -> LogPosition | None:
    """Position of a log of so many records; None before its first epoch."""
    if not openings:
        return None
    origin = next((x for x in reversed(openings) if x.record.accepts_loss), openings[0])
    newest = openings[-1].record
    return LogPosition(
        origin_s=origin.record.wall_s,
        epoch=newest.epoch,
        opened_s=newest.wall_s,
        entry=num_records,
    )


def is_given_up(known: LogPosition, openings: Sequence[Opening]) -> bool:
    """Whether the operator of this log accepted, after the log's origin that `known` names, that entries were lost."""
    origins = [x.record.wall_s for x in openings[:1]]
    origins += [x.record.wall_s for x in openings if x.record.accepts_loss]
    return known.origin_s in origins[:-1]


def is_covered(known: LogPosition, openings: Sequence[Opening], num_records: int) -> bool:
    """Whether a log of so many records has what is known of it."""
    place = bisect_left(openings, known.epoch, key=lambda opening: opening.record.epoch)
    following = openings[place : place + 2]
    if not following or following[0].record.epoch != known.epoch:
        return False
    end = following[1].entry - 1 if len(following) == 2 else num_records
    return following[0].record.wall_s == known.opened_s and known.entry <= end
