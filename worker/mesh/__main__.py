"""`python -m worker.mesh FD PARENT INDEX DEVICE`: a device process, which its worker starts and alone talks to."""

import ctypes
import logging
import os
import signal
import socket
import sys

import torch

from skein.protocol.worker.mesh.losing import FAILED, NO_MEMORY, SUM_BROKEN
from worker.mesh.device import DeviceShare
from worker.mesh.frames import DeviceLink, LinkClosedError
from worker.mesh.groups import SumBrokenError
from worker.mesh.memory import says_full

_log = logging.getLogger("worker.mesh")
_SET_PARENT_DEATH_SIGNAL = 1
"""Linux, prctl(2)."""
_CPU = torch.device("cpu")


def _die_with(parent: int) -> None:
    """End by SIGKILL with the thread that has started this process, even in the midst of a sum."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(FAILED)


def _serve(link: DeviceLink, share: DeviceShare) -> int:
    """Do what is asked until nobody asks any more; the exit code, which says whose fault the end is."""
    try:
        while True:
            asked, tensors = link.receive(_CPU)
            answer, given = share.carry_out(asked, tensors)
            link.send(answer, given)
            del asked, tensors, answer, given  # or they live until the next ones come
    except LinkClosedError:
        return 0
    except SumBrokenError:
        return SUM_BROKEN
    except Exception as error:  # noqa: BLE001 - the outermost loop: it records, and ends the process
        is_full = says_full(error)
        _log.error("out of memory: %s" if is_full else "an op failed: %s", error, exc_info=not is_full)
        return NO_MEMORY if is_full else FAILED


def main(arguments: list[str]) -> int:
    """Be the process of one device until its worker ends; the exit code."""
    end, parent, index, device = int(arguments[0]), int(arguments[1]), int(arguments[2]), arguments[3]
    _die_with(parent)
    # Who stops a worker lets it give its work back; it ends its devices itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format=f"device {index} ({device}): %(message)s", stream=sys.stderr)
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(threads):
        torch.set_num_threads(int(threads))
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    code = _serve(DeviceLink(socket.socket(fileno=end)), DeviceShare(index, where))
    sys.stderr.flush()
    # Groups whose other devices are gone may wait for them on the way out.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
