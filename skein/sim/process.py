"""A simulated worker process: the real machine, a cost model in torch's place, and what can befall a process."""

from collections import deque
from dataclasses import dataclass, field

from skein.protocol.worker import Worker
from skein.sim.clock import Action
from skein.sim.executor import SimExecutor


@dataclass(slots=True)
class SimWorker:
    """One process and the state of its stream."""

    machine: Worker
    executor: SimExecutor
    is_alive: bool = True
    is_frozen: bool = False
    is_muted: bool = False
    is_stuck: bool = False
    is_connected: bool = False
    is_busy: bool = False
    is_to_forget: bool = False
    wakes_at: float | None = None
    build: int = 0
    frozen: deque[Action] = field(default_factory=deque)
    muted: deque[Action] = field(default_factory=deque)

    def when_running(self, action: Action) -> None:
        """Do this, or once the process goes on if it is frozen, in the order of asking; never if it is dead."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self.frozen.append(action)
        else:
            action()

    def when_heard(self, action: Action) -> None:
        """Do this with a message of the control stream, or once the stream passes messages on again, in order."""
        if not self.is_connected:
            return
        if self.is_muted:
            self.muted.append(action)
        else:
            action()

    def thaw(self) -> None:
        """The process goes on: it takes all that reached it."""
        self.is_frozen = False
        while self.frozen and not self.is_frozen:
            self.frozen.popleft()()

    def unmute(self) -> None:
        """The control stream passes on all that was said."""
        self.is_muted = False
        while self.muted and not self.is_muted:
            self.muted.popleft()()
