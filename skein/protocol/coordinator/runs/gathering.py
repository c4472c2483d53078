"""Before a generation is opened: how long to wait for more workers, and whether another plan is worth a try."""

from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.workers.members import Members
from skein.types import WorkerId

GATHER_S = 3.0
"""Seconds to wait for more workers after the last one came, while fewer are here than the job asks for."""
RETURN_S = 5.0
"""Seconds for which a restarted coordinator waits for its earlier members: they try again every 2 s at least."""
PARDON_S = 30.0
"""Seconds that a worker excluded on the word of peers stays so when without it no plan exists; and between looks at
checkpoints that a run waits for."""


class Gathering(RunPart):
    """Workers that came since the last generation was opened, and workers that are waited for."""

    def __init__(self, members: Members, *, now: float) -> None:
        super().__init__(members)
        self.is_hopeless = False
        """No plan exists for those who are here; only somebody else could help."""
        self.has_newcomer = False
        self.pardons_at: float | None = None
        self._awaited = {member.worker for member in self._job.members}
        self._gather_until = now + GATHER_S
        self._return_until = now + RETURN_S

    def met(self, worker: WorkerId) -> None:
        """Note that a worker is here, which may have been waited for."""
        self._awaited.discard(worker)

    def joined(self, worker: WorkerId, *, is_member: bool, now: float) -> None:
        """Note that a worker came: newcomers wait for a place, unless the generation has them already."""
        self.met(worker)
        self._gather_until = now + GATHER_S
        self.is_hopeless = False
        self.has_newcomer = self.has_newcomer or not is_member

    def fenced(self, *, now: float) -> None:
        """A generation has everybody who is here."""
        self._awaited.clear()
        self.has_newcomer = False
        self.pardons_at = None

    def failed(self, *, may_pardon: bool, now: float) -> None:
        """No plan was found for the generation's members; who came meanwhile may change that."""
        self.is_hopeless = not self.has_newcomer
        self.pardons_at = None
        if may_pardon:
            self.pardons_later(now=now)

    def pardons_later(self, *, now: float) -> None:
        """Give excluded workers another chance after `PARDON_S`, if nothing changes before."""
        self.pardons_at = now + PARDON_S

    def may_pardon(self, *, now: float) -> bool:
        """Whether those who were excluded, or checkpoints that could not be read, get another chance now."""
        return self.pardons_at is not None and now >= self.pardons_at

    def pardoned(self) -> None:
        """Some who were excluded are candidates again."""
        self.is_hopeless = False
        self.pardons_at = None

    def ends_at(self, *, num_here: int, num_wanted: int) -> float:
        """Time from which to go ahead with the workers that are here; 0: at once."""
        if self._awaited:
            return self._return_until
        return 0.0 if num_here >= num_wanted else self._gather_until
