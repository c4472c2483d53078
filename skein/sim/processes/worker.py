"""A simulated worker process: the real machine, a cost model in torch's place, and what can befall a process."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from skein.protocol.worker.ops import Op
from skein.protocol.worker.worker import Worker
from skein.sim.clock import Action
from skein.sim.compute.executor import SimExecutor
from skein.sim.lines.lies import Says
from skein.sim.processes.devices import SimMesh


@dataclass(slots=True)
class SimWorker:
    """Process of a worker and the state of its stream."""

    machine: Worker
    executor: SimExecutor
    mesh: SimMesh | None = None
    is_alive: bool = True
    is_frozen: bool = False
    is_stuck: bool = False
    """Whether no op ends any more."""
    is_connected: bool = False
    is_unheard: bool = False
    """Whether a directive was lost on its stream, and with it whatever follows until the stream breaks."""
    is_busy: bool = False
    is_to_forget: bool = False
    to_fail: Callable[[Op], bool] | None = None
    """Test of ops; the next op that passes it fails halfway."""
    says: Says | None = None
    """Reports that it sends in the place of each that its machine made; None: that one."""
    has_lied: bool = False
    wakes_at: float | None = None
    dials_at: float = 0.0
    """Time before which it opens no stream: a coordinator has turned it away for now."""
    room_bytes: float = inf
    """Bytes on its desk above which it lets in no tensor of a step to come."""
    build: int = 0
    frozen: deque[Action] = field(default_factory=deque)
    up: deque[Action] = field(default_factory=deque)
    """Reports that a cut holds back; `down`: directives to it, likewise."""
    down: deque[Action] = field(default_factory=deque)

    def when_running(self, action: Action) -> None:
        """Do this, or once the process goes on if it is frozen, in the order of asking; never if it is dead."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self.frozen.append(action)
        else:
            action()

    def thaw(self) -> None:
        """The process goes on: it takes all that reached it, as long as it lives."""
        self.is_frozen = False
        while self.frozen and self.is_alive and not self.is_frozen:
            self.frozen.popleft()()

    def disconnect(self) -> None:
        """The control stream is no more, nor what was under way on it."""
        self.is_connected = self.is_unheard = False
        self.up.clear()
        self.down.clear()
