"""Devices of simulated meshes hang and end, and their workers notice."""

from collections.abc import Callable
from functools import partial

from skein.protocol.worker.mesh.losing import DeviceLoss, loss_of
from skein.protocol.worker.ops import Op
from skein.sim.clock import Clock
from skein.sim.processes.devices import SimMesh
from skein.sim.processes.worker import SimWorker

_KILLED = -9


class Meshes:
    """Looks after the devices of all simulated meshes.

    Args:
        lose: ends a process, and has it come back with what is left.
    """

    def __init__(self, clock: Clock, *, lose: Callable[[SimWorker, DeviceLoss], None]) -> None:
        self._clock = clock
        self._lose = lose

    def begins(self, worker: SimWorker, op: Op) -> None:
        """An op begins. Where devices have a part in it, they are waited for as long as a worker waits."""
        mesh = worker.mesh
        bound_s = None if mesh is None else mesh.begins(op, now=self._clock.now)
        if mesh is None or bound_s is None:
            return
        assert mesh.asked is not None
        look = partial(self._look, worker, mesh, mesh.asked)
        # What others keep from the processors is not stuck.
        self._clock.after(bound_s / worker.executor.share_of_time, partial(worker.when_running, look))

    def strike(self, worker: SimWorker, number: int, *, hangs: bool) -> None:
        """A device answers nothing from now on, or its process ends; with a single one no op ends any more."""
        mesh = worker.mesh
        if mesh is None:
            worker.is_stuck = True
        elif hangs:
            mesh.hung = number % len(mesh.devices)
        else:
            loss = loss_of(mesh.devices, {number % len(mesh.devices): _KILLED})
            worker.when_running(partial(self._lose, worker, loss))

    def loss_of_turned_away(self, worker: SimWorker) -> DeviceLoss | None:
        """Loss of the device for which a worker is turned away; None: it is not for a device."""
        mesh = worker.mesh
        if mesh is None or mesh.asked is None:
            return None
        _, since = mesh.asked
        owed_s = (self._clock.now - since) * worker.executor.share_of_time
        return mesh.loss() if mesh.patience.is_hung(owed_s) else None

    def _look(self, worker: SimWorker, mesh: SimMesh, asked: tuple[Op, float]) -> None:
        if mesh.asked is asked:
            self._lose(worker, mesh.loss())
