"""Groups of device processes that sum tensors: torch's, each formed for itself, never the process's default one.

Rules of this file
- Members meet in a file in a folder that only their owner can look into, not at a port: torch's store listens at all
  addresses of the machine, and nothing of all this asks who somebody is.
- What they connect by is bound to loopback, or is the GPUs' own.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, FileStore, PrefixStore
from torch.distributed import ProcessGroupGloo

from skein.errors import LocalError

_LONG = timedelta(days=1)
"""No patience of its own: the worker knows how long ops take, and ends whoever hangs."""


class SumBrokenError(LocalError):
    """Another device's process is gone, and with it a sum that is under way."""


class DeviceGroup:
    """Devices that sum tensors; all ask for the same sums in the same order."""

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
        try:
            self._backend.allreduce([tensor]).wait()  # type: ignore[attr-defined]  # told of groups alone
        except RuntimeError as error:
            raise SumBrokenError(f"a sum over {self.size} devices broke: {error}") from error


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
