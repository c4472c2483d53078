"""Values of the first call between any two: the coordinator's release and clock, and the addresses of all coordinators.

Each client imports this module, so it imports only light ones.
"""

from dataclasses import dataclass

from skein.types import Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinators:
    """host:port of each coordinator that leads or stands by, the leader's first; and where newcomers enrol."""

    addresses: tuple[str, ...] = ()
    enrol_addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReply:
    """Protocol version, release, epoch and clock of the coordinator, and the ballast that was asked for.

    Args:
        wall_s: seconds since 1970; 0 from an older release, which does not say.
    """

    protocol_version: int
    release: str
    epoch: Epoch
    wall_s: float = 0.0
    ballast: bytes = b""
    coordinators: Coordinators | None = None
