"""Processes that are not here: where they were, who has reached them since, which of them are dead.

Rules of this file
- Silence is no death, nor is a broken stream. A process is dead if it was turned away, if another process has taken
  its name, or if its machine says that nobody listens there.
- A peer's word counts until the process speaks for itself, or another peer reaches it.
- All of this is soft: a restarted coordinator learns it again.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from skein.protocol.messages.directives import Member
from skein.protocol.messages.reports import PeersSeen
from skein.types import Incarnation, WorkerId

NUM_KNOWN = 4096
"""Processes that are remembered; the longest untouched are forgotten first."""
NUM_SILENCES = 16
"""Silences that are remembered, of the workers that came back last."""


@dataclass(slots=True, kw_only=True)
class _Known:
    address: str = ""
    is_dead: bool = False
    silent_since: float | None = None
    """Its last sign of life, while it is lost."""
    lost_at: float | None = None
    reached_at: float | None = None
    """Time when a peer reached the process last."""


class Absence:
    """Follows who comes and goes, for the whole life of a coordinator."""

    def __init__(self) -> None:
        self._known: OrderedDict[Incarnation, _Known] = OrderedDict()
        self._newest: OrderedDict[WorkerId, Incarnation] = OrderedDict()
        self._silences_s: deque[float] = deque(maxlen=NUM_SILENCES)

    # --- what happens ---

    def joined(self, member: Member, *, now: float) -> None:
        """A process is here, for the first time or again."""
        known = self._of(member.incarnation)
        if known.silent_since is not None:
            self.came_back_after(now - known.silent_since)
        self._known[member.incarnation] = _Known(address=member.address)
        self._newest[member.worker] = member.incarnation
        self._newest.move_to_end(member.worker)
        if len(self._newest) > NUM_KNOWN:
            self._newest.popitem(last=False)

    def came_back_after(self, silent_s: float) -> None:
        """A process was silent for so long and lived."""
        self._silences_s.append(silent_s)

    def lost(self, incarnation: Incarnation, *, silent_s: float, is_dead: bool, now: float) -> None:
        """A process is not here any more; `is_dead`: and will not be again."""
        known = self._of(incarnation)
        known.silent_since, known.lost_at = now - silent_s, now
        known.is_dead, known.reached_at = is_dead, None

    def looked(self, seen: PeersSeen, *, now: float) -> None:
        """A worker has looked at some of them."""
        for incarnation in seen.gone:
            known = self._of(incarnation)
            known.is_dead = known.reached_at is None
        for incarnation in seen.reached:
            known = self._of(incarnation)
            known.is_dead, known.reached_at = False, now

    def _of(self, incarnation: Incarnation) -> _Known:
        known = self._known.setdefault(incarnation, _Known())
        self._known.move_to_end(incarnation)
        if len(self._known) > NUM_KNOWN:
            self._known.popitem(last=False)
        return known

    # --- what is known ---

    def is_dead(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether somebody has seen the death of this process."""
        known = self._known.get(incarnation)
        return self.is_replaced(worker, incarnation) or (known is not None and known.is_dead)

    def is_replaced(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether another process has come under the name of this one since, which so is taken for dead."""
        return self._newest.get(worker, incarnation) != incarnation

    def seen_at(self, incarnation: Incarnation) -> float | None:
        """Time when a peer reached this process last, or else when it was lost; None: it was not here yet."""
        known = self._known.get(incarnation)
        return None if known is None else known.reached_at or known.lost_at

    def address_of(self, incarnation: Incarnation) -> str:
        """Address at which peers reach a process; empty if it was not here yet."""
        known = self._known.get(incarnation)
        return "" if known is None else known.address

    @property
    def silences_s(self) -> tuple[float, ...]:
        """Seconds of silence of the workers that came back last."""
        return tuple(self._silences_s)
