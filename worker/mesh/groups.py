"""Groups of device processes that sum tensors: torch's, each formed for itself, never the process's default one.

Rules of this file
- Members meet in a file in a folder that only their owner can look into, not at a port: torch's store listens at all
  addresses of the machine, and nothing of all this asks who somebody is.
- What they connect by is bound to loopback, or is the GPUs' own.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol, Self, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, BroadcastOptions, FileStore, PrefixStore, ReduceOptions, Work
from torch.distributed import ProcessGroupGloo

from skein.errors import LocalError
from worker.mesh.memory import says_full
from worker.mesh.traffic import Collective, CollectiveCount

_LONG = timedelta(days=1)
"""No patience of its own: the worker knows how long ops take, and ends whoever hangs."""


_WORDS = {
    Collective.SUM: "a sum",
    Collective.GATHER: "gathering",
    Collective.SCATTER: "a scattered sum",
    Collective.SPREAD: "spreading",
    Collective.REDUCE: "a reduced sum",
    Collective.EXCHANGE: "an exchange",
    Collective.GRADIENT: "a sum of gradients",
}


class SumBrokenError(LocalError):
    """Another device's process is gone, and with it a sum that is under way."""


class ArrivingRows:
    """Rows on their way to this device, and those that it sends, which must not change meanwhile."""

    def __init__(self, work: Work, arriving: Tensor, sent: Tensor) -> None:
        self._work = work
        self._arriving = arriving
        self._sent = sent

    def wait(self) -> Tensor:
        """The rows, once all are here.

        Raises:
            SumBrokenError: a device is gone.
        """
        with _broken(_WORDS[Collective.EXCHANGE]):
            self._work.wait()
        return self._arriving


class ArrivingGradients:
    """A sum of gradients under way, in the place of this device's own. `traffic` counts how long it is waited for."""

    def __init__(self, work: Work, tensor: Tensor, traffic: CollectiveCount) -> None:
        self._work = work
        self._tensor = tensor
        self._traffic = traffic

    def wait(self) -> Tensor:
        """The sum, once it is made.

        Raises:
            SumBrokenError: a device is gone.
        """
        began_s = time.perf_counter()
        with _broken(_WORDS[Collective.GRADIENT]):
            self._work.wait()
        self._traffic.waited_s += time.perf_counter() - began_s
        return self._tensor


class GroupBackend(Protocol):
    """A backend of torch's, with functions that its stubs do not tell."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions) -> Work: ...

    def reduce(self, tensors: list[Tensor], options: ReduceOptions) -> Work: ...

    def _allgather_base(self, whole: Tensor, part: Tensor) -> Work: ...

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor) -> Work: ...

    def alltoall_base(
        self, received: Tensor, sent: Tensor, num_received: list[int], num_sent: list[int]
    ) -> Work: ...


class DeviceGroup:
    """Devices that sum tensors and gather them; all ask for the same in the same order. `traffic` counts that."""

    def __init__(self, backend: GroupBackend, index: int, size: int, traffic: CollectiveCount) -> None:
        self._backend = backend
        self._traffic = traffic
        self.index = index
        self.size = size

    @classmethod
    def met(
        cls,
        device: torch.device,
        folder: Path,
        *,
        epoch: int,
        index: int,
        size: int,
        traffic: CollectiveCount,
        name: str = "all",
    ) -> Self:
        """The group of so many devices, once all have met in `folder` under this name; nothing there is needed then."""
        store = PrefixStore(f"e{epoch}", FileStore(str(folder / name), size))
        backend = cast(GroupBackend, _BACKENDS[device.type](store, index, size))
        group = cls(backend, index, size, traffic)
        # Connections are made by the first sum.
        group.sum_in_place(torch.zeros(1, device=device))
        traffic.taken()
        return group

    def sum_in_place(self, tensor: Tensor) -> None:
        """Make of a contiguous tensor the sum of all devices' tensors, equal bit for bit at all.

        Raises:
            SumBrokenError: a device is gone.
        """
        with self._counted(Collective.SUM, 2 * tensor.numel() * (self.size - 1) // self.size):
            self._backend.allreduce([tensor]).wait()

    def begin_sum(self, tensor: Tensor) -> ArrivingGradients:
        """Begin to make of a contiguous tensor the sum of all devices' tensors.

        Raises:
            SumBrokenError: a device is gone.
        """
        with self._counted(Collective.GRADIENT, 2 * tensor.numel() * (self.size - 1) // self.size):
            work = self._backend.allreduce([tensor])
        return ArrivingGradients(work, tensor, self._traffic)

    def gather(self, tensor: Tensor) -> Tensor:
        """Contiguous tensors of one shape of all devices, in their order, along the first dim.

        Raises:
            SumBrokenError: a device is gone.
        """
        every = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        with self._counted(Collective.GATHER, tensor.numel() * (self.size - 1)):
            self._backend._allgather_base(every, tensor).wait()
        return every

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """This device's part, along the first dim, of the sum of all devices' contiguous tensors.

        Raises:
            SumBrokenError: a device is gone.
        """
        part = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        with self._counted(Collective.SCATTER, part.numel() * (self.size - 1)):
            self._backend._reduce_scatter_base(part, whole).wait()
        return part

    def spread(self, tensor: Tensor, origin: int) -> None:
        """Make of a contiguous tensor that of the device with this index.

        Raises:
            SumBrokenError: a device is gone.
        """
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = origin, 0
        with self._counted(Collective.SPREAD, tensor.numel() * (self.index != origin)):
            self._backend.broadcast([tensor], options).wait()

    def reduce(self, tensor: Tensor, target: int) -> None:
        """Make of a contiguous tensor the sum of all at the device with this index; of others' nothing is left.

        Raises:
            SumBrokenError: a device is gone.
        """
        options = ReduceOptions()
        options.rootRank = target
        with self._counted(Collective.REDUCE, tensor.numel() * (self.index != target)):
            self._backend.reduce([tensor], options).wait()

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> ArrivingRows:
        """Begin to send so many of the contiguous rows to each device, in order, and to receive so many from each.

        Raises:
            SumBrokenError: a device is gone.
        """
        arriving = rows.new_empty((sum(received), *rows.shape[1:]))
        num_elements = arriving[0].numel() * (sum(received) - received[self.index]) if len(arriving) else 0
        with self._counted(Collective.EXCHANGE, num_elements):
            work = self._backend.alltoall_base(arriving, rows, list(received), list(sent))
        return ArrivingRows(work, arriving, rows)

    @contextmanager
    def _counted(self, kind: Collective, num_elements: int) -> Iterator[None]:
        self._traffic.count(kind, num_elements)
        began_s = time.perf_counter()
        with _broken(_WORDS[kind]):
            yield
        if kind.is_waited_for:
            self._traffic.waited_s += time.perf_counter() - began_s


@contextmanager
def _broken(what: str) -> Iterator[None]:
    """
    Raises:
        SumBrokenError: torch has found in the block that a device is gone.
    """
    try:
        yield
    except RuntimeError as error:
        if says_full(error):
            raise  # It is this device's own.
        raise SumBrokenError(f"{what} over the devices broke: {error}") from error


def _gloo(store: PrefixStore, index: int, size: int) -> Backend:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch tells of `Options` alone
    # Its own choice is the address that the host's name leads to, which others may reach.
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _LONG
    return ProcessGroupGloo(store, index, size, options)


def _nccl(store: PrefixStore, index: int, size: int) -> Backend:
    # Builds of torch for processors alone have none.
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _LONG
    return ProcessGroupNCCL(store, index, size, options)


_BACKENDS: Mapping[str, Callable[[PrefixStore, int, int], Backend]] = {"cpu": _gloo, "cuda": _nccl}
