"""Arrival times of what is sent over emulated links, in seconds of the caller's clock. No I/O.

Rules of this file
- A way from one endpoint to another is the sender's uplink, the link between them, the receiver's downlink; each is a
  queue in front of a pipe. Whatever the pipes, the last byte follows the first without a rest in between: a way is as
  fast as its slowest part, not as the sum of all parts.
- A queue holds what its pipe carries in a round trip, but at least `MIN_QUEUE_S`; what would wait longer is dropped,
  which is how TCP learns the bandwidth.
- Nothing is reordered: jitter delays what follows, too.
- Numbers are drawn only where a link has jitter or loss, from a stream of the link's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from numpy.random import Generator

from skein.rng import stream

MIN_QUEUE_S = 0.05
SEGMENT_BYTES = 1448
"""Bytes that TCP carries in one packet of 1,500 bytes."""
_ACCESS_QUEUE_S = 0.2
"""Longest wait in the queue of a home's modem."""
_BATCH_BYTES_PER_S = 5e6
"""64 KiB, the biggest batch, take 13 ms there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionSpec:
    """Properties of one direction between two endpoints.

    Args:
        latency_s: one way, of a packet that waits for nothing.
        bytes_per_s: of all that is sent in this direction.
        jitter_s: added to the latency of each packet: anything from nothing to this, all equally likely.
        loss: probability that a packet is lost.
    """

    latency_s: float
    bytes_per_s: float
    jitter_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < inf and 0 <= self.jitter_s < inf):
            raise ValueError(f"latency {self.latency_s} s, jitter {self.jitter_s} s: give 0 or more")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bandwidth {self.bytes_per_s} bytes/s: give more than 0")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss {self.loss}: give a share from 0 to below 1")


class Drop(StrEnum):
    """Reason why a packet never arrives."""

    CUT = "cut"
    LOSS = "loss"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Times at which the first and the last byte of something pass a point, in seconds."""

    first_s: float
    last_s: float

    def later(self, seconds: float) -> "TimeSpan":
        """The same at a point so many seconds further on."""
        return TimeSpan(self.first_s + seconds, self.last_s + seconds)


class Pipe:
    """Carries one thing after the other, so many bytes per second."""

    __slots__ = ("_free_s", "bytes_per_s", "queue_s")

    def __init__(self, bytes_per_s: float, *, queue_s: float = MIN_QUEUE_S) -> None:
        self.bytes_per_s = bytes_per_s
        self.queue_s = queue_s
        self._free_s = -inf

    def is_full(self, now: float) -> bool:
        """Whether a packet that came now would have to wait too long."""
        return self._free_s - now > self.queue_s

    def carry(self, span: TimeSpan, num_bytes: int) -> TimeSpan:
        """Time span in which bytes that reach the pipe as `span` leave it, after all that came before.

        >>> pipe = Pipe(1000.0)
        >>> pipe.carry(TimeSpan(0.0, 0.0), 500), pipe.carry(TimeSpan(0.0, 0.0), 500)
        (TimeSpan(first_s=0.0, last_s=0.5), TimeSpan(first_s=0.5, last_s=1.0))
        """
        first_s = max(span.first_s, self._free_s)
        self._free_s = max(span.last_s, first_s + num_bytes / self.bytes_per_s)
        return TimeSpan(first_s, self._free_s)


class Line:
    """Direction between two endpoints: its link as it is now, and what is on it."""

    def __init__(self, spec: DirectionSpec, luck: Generator) -> None:
        self.spec = spec
        self.is_cut = False
        self._luck = luck
        self._pipe = Pipe(spec.bytes_per_s)
        self._newest_s = -inf
        self.change(spec)

    def change(self, spec: DirectionSpec) -> None:
        """Change the link from now on; what is under way arrives as it would have."""
        self.spec = spec
        self._pipe.bytes_per_s = spec.bytes_per_s
        self._pipe.queue_s = max(MIN_QUEUE_S, 2 * spec.latency_s)

    @property
    def may_batch(self) -> bool:
        """Whether big batches of packets may pass for one packet: none is lost by itself, and each takes little."""
        return self.spec.loss == 0 and self.spec.bytes_per_s >= _BATCH_BYTES_PER_S

    def send(self, span: TimeSpan, num_bytes: int) -> TimeSpan | Drop:
        """Arrival at the receiver's downlink of a packet that leaves the sender's uplink as `span`; or its `Drop`."""
        if self.is_cut:
            return Drop.CUT
        if self._pipe.is_full(span.first_s):
            return Drop.QUEUE
        sent = self._pipe.carry(span, num_bytes)
        if self.spec.loss and self._luck.random() < self.spec.loss:
            return Drop.LOSS  # lost behind the pipe, so it took its time there
        return self._arrival(sent, 0.0)

    def send_reliably(self, span: TimeSpan, num_bytes: int) -> TimeSpan:
        """Arrival as of `send`, for bytes of a stream: what is lost is sent again, so it comes a round trip later."""
        sent = self._pipe.carry(span, num_bytes)
        num_segments = -(-num_bytes // SEGMENT_BYTES)
        again_s = 0.0
        if self.spec.loss and self._luck.random() >= (1 - self.spec.loss) ** num_segments:
            again_s = 2 * self.spec.latency_s
        return self._arrival(sent, again_s)

    def _arrival(self, sent: TimeSpan, again_s: float) -> TimeSpan:
        jitter_s = self._luck.random() * self.spec.jitter_s if self.spec.jitter_s else 0.0
        arrival = sent.later(self.spec.latency_s + jitter_s + again_s)
        self._newest_s = max(arrival.last_s, self._newest_s)
        return TimeSpan(min(arrival.first_s, self._newest_s), self._newest_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Bandwidth that joins an endpoint to all others, besides the links: shared by all that it sends, or receives."""

    up_bytes_per_s: float = inf
    down_bytes_per_s: float = inf


class LabNetwork:
    """Endpoints, by number, and the lines between them.

    Args:
        names: of the endpoints; they name the random streams.
        links: by (sender, receiver), one for each two different endpoints.
        accesses: of each endpoint.
        seed: of jitter and loss.
    """

    def __init__(
        self,
        names: Sequence[str],
        links: Mapping[tuple[int, int], DirectionSpec],
        *,
        accesses: Sequence[Access] | None = None,
        seed: int = 0,
    ) -> None:
        self.names = tuple(names)
        self.presets = dict(links)
        self.lines = {
            (a, b): Line(spec, stream(seed, "lab", self.names[a], self.names[b]))
            for (a, b), spec in sorted(links.items())
        }
        self.accesses = tuple(accesses or [Access()] * len(names))
        self.ups = tuple(Pipe(access.up_bytes_per_s, queue_s=_ACCESS_QUEUE_S) for access in self.accesses)
        self.downs = tuple(Pipe(access.down_bytes_per_s, queue_s=_ACCESS_QUEUE_S) for access in self.accesses)

    def cut(self, pair: tuple[int, int]) -> None:
        """Let nothing through in this direction; what is under way arrives."""
        self.lines[pair].is_cut = True

    def slow(self, pair: tuple[int, int], changes: Mapping[str, float]) -> None:
        """Give the link these properties, by their names in `DirectionSpec`, and leave it the others.

        Raises:
            ValueError: no link has such properties.
        """
        line = self.lines[pair]
        line.change(replace(line.spec, **changes))

    def heal(self, pair: tuple[int, int]) -> None:
        """Let the link be as it was at first."""
        line = self.lines[pair]
        line.is_cut = False
        line.change(self.presets[pair])

    def may_batch(self, sender: int) -> bool:
        """See `Line.may_batch`, of all that `sender` sends."""
        access = self.accesses[sender]
        return access.up_bytes_per_s >= _BATCH_BYTES_PER_S and all(
            line.may_batch for (a, _), line in self.lines.items() if a == sender
        )
