"""Groups of device processes that sum tensors: torch's, each formed for itself, never the process's default one.

Rules of this file
- Members meet in a file in a folder that only their owner can look into, not at a port: torch's store listens at all
  addresses of the machine, and nothing of all this asks who somebody is.
- What they connect by is bound to loopback, or is the GPUs' own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, FileStore, PrefixStore
from torch.distributed import ProcessGroupGloo

from skein.errors import LocalError

_LONG = timedelta(days=1)
"""No patience of its own: the worker knows how long ops take, and ends whoever hangs."""


class SumBrokenError(LocalError):
    """Another device's process is gone, and with it a sum that is under way."""


class _Work(Protocol):
    """A collective that torch has begun."""

    def wait(self) -> bool: ...


class ArrivingRows:
    """Rows on their way to this device, and those that it sends, which must not change meanwhile."""

    def __init__(self, work: _Work, arriving: Tensor, sent: Tensor) -> None:
        self._work = work
        self._arriving = arriving
        self._sent = sent

    def wait(self) -> Tensor:
        """The rows, once all are here.

        Raises:
            SumBrokenError: a device is gone.
        """
        with _broken("an exchange"):
            self._work.wait()
        return self._arriving


class DeviceGroup:
    """Devices that sum, gather and exchange tensors; all ask for the same in the same order."""

    def __init__(self, backend: Backend, index: int, size: int) -> None:
        self._backend = backend
        self.index = index
        self.size = size

    @classmethod
    def met(cls, device: torch.device, folder: Path, *, epoch: int, index: int, size: int) -> Self:
        """The group of the first `size` devices, once all have met in `folder`; nothing there is needed then."""
        store = PrefixStore(f"e{epoch}", FileStore(str(folder / "store"), size))
        group = cls(_BACKENDS[device.type](store, index, size), index, size)
        # Connections are made by the first sum.
        group.sum_in_place(torch.zeros(1, device=device))
        return group

    def sum_in_place(self, tensor: Tensor) -> None:
        """Make of a contiguous tensor the sum of all devices' tensors, equal bit for bit at all.

        Raises:
            SumBrokenError: a device is gone.
        """
        with _broken("a sum"):
            self._backend.allreduce([tensor]).wait()  # type: ignore[attr-defined]  # told of groups alone

    def gather(self, tensor: Tensor) -> Tensor:
        """Contiguous tensors of one shape of all devices, in their order, along the first dim.

        Raises:
            SumBrokenError: a device is gone.
        """
        every = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        with _broken("gathering"):
            self._backend._allgather_base(every, tensor).wait()  # type: ignore[attr-defined]
        return every

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> ArrivingRows:
        """Begin to send so many of the contiguous rows to each device, in order, and to receive so many from each.

        Raises:
            SumBrokenError: a device is gone.
        """
        arriving = rows.new_empty((sum(received), *rows.shape[1:]))
        with _broken("an exchange"):
            work = self._backend.alltoall_base(  # type: ignore[attr-defined]  # as above
                arriving, rows, list(received), list(sent)
            )
        return ArrivingRows(work, arriving, rows)


@contextmanager
def _broken(what: str) -> Iterator[None]:
    """
    Raises:
        SumBrokenError: torch has found in the block that a device is gone.
    """
    try:
        yield
    except RuntimeError as error:
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
