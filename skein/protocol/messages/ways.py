"""Ways between workers that cannot dial each other: by a relay, which both can dial.

A worker that can be dialled, only not by everybody, is the relay between itself and whoever dials it: the other end
keeps a stream open there, by which it is called. Names here are those of protos/skein/wire/v1/control.proto.
"""

from dataclasses import dataclass
from enum import StrEnum

from skein.types import Incarnation, WorkerId

COORDINATOR_RELAY = WorkerId("")
"""The coordinator where relays are named, wherever it is."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RelayPlace:
    """A relay: the worker at that address, or the coordinator, which whoever is told knows how to reach."""

    worker: WorkerId
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Relay by which one process is reached."""

    peer: WorkerId
    incarnation: Incarnation
    relay: RelayPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """All ways of a worker around what it cannot dial, and the relays at which it is called itself."""

    ways: tuple[Way, ...]
    listens: tuple[RelayPlace, ...]


class Obstacle(StrEnum):
    """Fault of a way between two workers.

    Of `FULL_PACKETS_VANISH` small messages arrive in both directions, while no message as large as a packet does: the
    path has a smaller MTU than its ends, and its routers do not say so.
    """

    NO_ANSWER = "no answer"
    FULL_PACKETS_VANISH = "full packets vanish"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """A peer that cannot be used by way of a relay; `via` None: by dialling it."""

    peer: WorkerId
    via: WorkerId | None = None
    obstacle: Obstacle = Obstacle.NO_ANSWER
