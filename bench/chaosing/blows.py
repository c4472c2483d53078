"""What is struck, when and for how long: drawn from a seed before anything runs, and noted when it is done."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from skein.rng import stream

JITTER = 0.2
"""A blow comes so much of its period earlier or later, so that blows meet all moments of a step."""
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
    """Planned: `at_s` after the first, for `lasts_s`, on the first one or two of `targets` that will do."""

    at_s: float
    fault: Fault
    lasts_s: float
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Done, in Unix seconds. `healed_s`: the process was started again or goes on, or the link is whole.

    `was_spared_for`: so long was waited for a target that holds nothing alone; `is_last_holder`: there was none.
    """

    fault: Fault
    targets: tuple[str, ...]
    struck_s: float
    healed_s: float
    was_spared_for: float = 0.0
    is_last_holder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Seconds between blows of each kind; 0: none."""

    kill_s: float
    freeze_s: float
    cut_s: float
    coordinator_s: float


def draw_blows(
    names: tuple[str, ...], rhythm: Rhythm, *, lasts_s: float, seed: int, spare: float = 0.5
) -> tuple[Blow, ...]:
    """The blows of `lasts_s` seconds, by time. Each kind has luck of its own: leaving one out moves no other.

    Args:
        names: of the workers.
        rhythm: how often each kind comes.
        lasts_s: none comes later.
        seed: of everything drawn.
        spare: share of its period after which a kind but kills comes first, lest all come at once.

    >>> rhythm = Rhythm(kill_s=15, freeze_s=0, cut_s=0, coordinator_s=60)
    >>> blows = draw_blows(("w0", "w1"), rhythm, lasts_s=120, seed=1)
    >>> [blow.fault in OF_COORDINATOR for blow in blows].count(True)
    2
    """
    kinds = (
        ("kill", rhythm.kill_s, 1.0),
        ("freeze", rhythm.freeze_s, spare),
        ("cut", rhythm.cut_s, spare / 2),
        ("coordinator", rhythm.coordinator_s, spare * 1.5),
    )
    found = [
        blow
        for kind, every_s, first in kinds
        if every_s > 0
        for blow in _of_kind(kind, names, every_s, first * every_s, lasts_s=lasts_s, seed=seed)
    ]
    return tuple(sorted(found, key=lambda blow: (blow.at_s, blow.fault)))


def _of_kind(
    kind: str, names: tuple[str, ...], every_s: float, first_s: float, *, lasts_s: float, seed: int
) -> list[Blow]:
    luck, found, due_s = stream(seed, "chaos", kind), [], first_s
    while due_s < lasts_s:
        ends = (*names, COORDINATOR) if kind == "cut" else names
        targets = tuple(ends[int(i)] for i in luck.permutation(len(ends)))
        at_s = due_s + float(luck.uniform(-JITTER, JITTER)) * every_s
        fault = Fault(kind) if kind != "coordinator" else OF_COORDINATOR[int(luck.integers(2))]
        # A process is down for some seconds; what is frozen or cut may be back before anybody minds.
        least, most = {Fault.KILL: (2.0, 4.0), Fault.FREEZE: (1.0, 6.0), Fault.CUT: (1.0, 6.0)}.get(
            fault, (0.0, 0.0)
        )
        blow = Blow(at_s=at_s, fault=fault, lasts_s=float(luck.uniform(least, most)), targets=targets)
        found.append(blow if fault not in OF_COORDINATOR else _of_coordinator(blow))
        due_s += every_s
    return found


def _of_coordinator(blow: Blow) -> Blow:
    return Blow(at_s=blow.at_s, fault=blow.fault, lasts_s=0.0, targets=(COORDINATOR,))


_STRIKES = TypeAdapter(tuple[Strike, ...])


def save_strikes(strikes: tuple[Strike, ...], path: Path) -> None:
    """Beside the run log, so that the two can be judged again."""
    path.write_bytes(_STRIKES.dump_json(strikes, indent=1))


def load_strikes(path: Path) -> tuple[Strike, ...]:
    """What `save_strikes` wrote."""
    return _STRIKES.validate_json(path.read_bytes())
