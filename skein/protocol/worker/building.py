"""The chunks that a worker is to build, one assignment at a time.

Rules of this file
- A build that is overtaken is cancelled, and nothing else begins before its end.
- A build whose job was forgotten meanwhile ends without a trace.
"""

from skein.protocol.messages.directives import Assign
from skein.protocol.worker.standing import Standing
from skein.protocol.worker.worker_io import Build, BuildFailed, CancelBuild


class Building:
    """Assignments of one worker: the one that is wanted, the one that is being built, and what becomes of it."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._wanted: Assign | None = None
        self._assign: Assign | None = None
        self._is_cancelled = False
        self._is_void = False

    @property
    def is_wanted(self) -> bool:
        """Whether an assignment waits for its build."""
        return self._wanted is not None

    @property
    def is_going_on(self) -> bool:
        """Whether something is being built."""
        return self._assign is not None

    def want(self, assign: Assign) -> None:
        """Have these chunks built once nothing else goes on."""
        self._wanted = assign

    def begin(self) -> None:
        """Build what is wanted."""
        assert self._wanted is not None
        self._assign, self._wanted = self._wanted, None
        self._standing.commands.append(Build(assign=self._assign, donors=self._standing.donors))

    def cancel(self) -> None:
        """A newer generation is here: what was asked for is wanted no more."""
        self._wanted = None
        if self._assign is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._standing.commands.append(CancelBuild())

    def forget(self) -> None:
        """The job is over here: whatever is being built is nobody's."""
        self._is_void = self._assign is not None
        self.cancel()

    def end(self) -> Assign | None:
        """A build is over; gives what was built, unless it was forgotten meanwhile."""
        assign = None if self._is_void else self._assign
        self._assign = None
        self._is_cancelled = self._is_void = False
        return assign

    def failed(self, event: BuildFailed) -> None:
        """Say whose fault it was, if anybody still waits for it."""
        report = event.report
        is_awaited = self.end() is not None
        if is_awaited and report is not None and report.generation == self._standing.generation:
            self._standing.tell(report)
