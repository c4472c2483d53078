"""Loss of a device of a mesh: which one it was, and the devices with which its worker comes back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FAILED, NO_MEMORY, SUM_BROKEN = 1, 3, 4
"""Exit codes of a device process; SIGKILL is the kernel's, or somebody's."""
HUNG = "hung"
_REASONS = {FAILED: "failed", NO_MEMORY: "is out of memory", SUM_BROKEN: "lost the other devices"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoss:
    """Loss of a device, and with it of all that the mesh held; `left` are the devices that are still good."""

    reason: str
    left: tuple[str, ...]


def loss_of(
    devices: Sequence[str], codes: Mapping[int, int], *, blamed: tuple[int, str] | None = None
) -> DeviceLoss:
    """The device that is to blame, and the others.

    Args:
        devices: of the mesh.
        codes: exit codes of the processes that have ended, by the number of the device; negative: a signal.
        blamed: the device for which all were ended, and what it did; None: processes ended by themselves.

    >>> loss_of(("cuda:0", "cuda:1"), {0: SUM_BROKEN, 1: -9})
    DeviceLoss(reason='the process of device 1 (cuda:1) was killed by signal 9', left=('cuda:0',))
    """
    if blamed is not None:
        at, why = blamed
    else:
        # Whoever ends because a sum broke is not who broke it.
        at = min(codes, key=lambda index: (codes[index] == SUM_BROKEN, index))
        code = codes[at]
        why = f"was killed by signal {-code}" if code < 0 else _REASONS.get(code, f"ended with {code}")
    left = tuple(device for index, device in enumerate(devices) if index != at)
    return DeviceLoss(reason=f"the process of device {at} ({devices[at]}) {why}", left=left)
