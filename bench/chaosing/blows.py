"""What is struck, when and for how long: drawn from a seed before anything runs, and noted when it is done."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from skein.rng import stream

JITTER = 0.2
"""A blow comes so much of its period earlier or later, so that blows meet all moments of a step."""
_DOWN_S = 2.0, 4.0
"""Between which a killed process is started again."""
_AWAY_S = 1.0, 6.0
"""What is frozen or cut off for so short or long may be back before anybody minds, or be taken for dead."""
COORDINATOR = "coordinator"
"""Beside the workers' names, an end of links that may be cut."""


class Fault(StrEnum):
    """SIGKILL to a worker; SIGSTOP, then SIGCONT; a black hole between two; SIGKILL to the coordinator.

    `ACTOR` kills the process that decides, which Ray brings back; `HOST` that one and its launcher, which take Ray with
    them and are started again from outside.
    """

    KILL = "kill"
    FREEZE = "freeze"
    CUT = "cut"
    ACTOR = "actor"
    HOST = "host"


OF_COORDINATOR = (Fault.ACTOR, Fault.HOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """Planned: `at_s` after the beginning, for `lasts_s`, on the first one or two of `targets` that will do."""

    at_s: float
    fault: Fault
    lasts_s: float
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Done, in Unix seconds. `healed_s`: the process was started again or goes on, or the link is whole.

    `waited_s`: for a target that holds nothing alone; `is_last_holder`: there was none.
    """

    fault: Fault
    targets: tuple[str, ...]
    struck_s: float
    healed_s: float
    waited_s: float = 0.0
    is_last_holder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Seconds between blows of each kind; 0: none."""

    kill_s: float
    freeze_s: float
    cut_s: float
    coordinator_s: float


def draw_blows(names: tuple[str, ...], rhythm: Rhythm, *, lasts_s: float, seed: int) -> tuple[Blow, ...]:
    """The blows of `lasts_s` seconds, by time. Each kind has luck of its own: leaving one out moves no other.

    Args:
        names: of the workers.
        rhythm: how often each kind comes.
        lasts_s: none is due later.
        seed: of everything drawn.

    >>> rhythm = Rhythm(kill_s=15, freeze_s=0, cut_s=0, coordinator_s=60)
    >>> blows = draw_blows(("w0", "w1"), rhythm, lasts_s=120, seed=1)
    >>> [blow.fault in OF_COORDINATOR for blow in blows].count(True)
    2
    """
    # The rarer kinds begin at different shares of their periods, lest all come at once.
    kinds = (
        (Fault.KILL, rhythm.kill_s, 1.0),
        (Fault.CUT, rhythm.cut_s, 0.25),
        (Fault.FREEZE, rhythm.freeze_s, 0.5),
        (Fault.HOST, rhythm.coordinator_s, 0.75),
    )
    found = [
        _drawn(fault, names, due_s, every_s, stream(seed, "chaos", fault.value, number))
        for fault, every_s, first in kinds
        if every_s > 0
        for number, due_s in enumerate(_dues(every_s, first * every_s, lasts_s))
    ]
    return tuple(sorted(found, key=lambda blow: (blow.at_s, blow.fault)))


def _dues(every_s: float, first_s: float, lasts_s: float) -> Iterator[float]:
    due_s = first_s
    while due_s < lasts_s:
        yield due_s
        due_s += every_s


def _drawn(
    fault: Fault, names: tuple[str, ...], due_s: float, every_s: float, luck: np.random.Generator
) -> Blow:
    at_s = due_s + float(luck.uniform(-JITTER, JITTER)) * every_s
    if fault in OF_COORDINATOR:
        which = OF_COORDINATOR[int(luck.integers(len(OF_COORDINATOR)))]
        return Blow(at_s=at_s, fault=which, lasts_s=0.0, targets=(COORDINATOR,))
    ends = (*names, COORDINATOR) if fault is Fault.CUT else names
    targets = tuple(ends[int(i)] for i in luck.permutation(len(ends)))
    least_s, most_s = _DOWN_S if fault is Fault.KILL else _AWAY_S
    return Blow(at_s=at_s, fault=fault, lasts_s=float(luck.uniform(least_s, most_s)), targets=targets)


_STRIKES = TypeAdapter(tuple[Strike, ...])


def save_strikes(strikes: tuple[Strike, ...], path: Path) -> None:
    """Beside the run log, so that the two can be judged again."""
    path.write_bytes(_STRIKES.dump_json(strikes, indent=1))


def load_strikes(path: Path) -> tuple[Strike, ...]:
    """What `save_strikes` wrote."""
    return _STRIKES.validate_json(path.read_bytes())
