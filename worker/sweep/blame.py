"""Blame where rows of an array diverge: whether it lies in their samples or their device, and not in themselves."""

import torch
from torch import Tensor

from skein.errors import UnfitError

_SIZE = 64


def check_samples(inputs: Tensor) -> None:
    """Return if the samples of rows that have diverged are finite.

    Raises:
        UnfitError: the data of this worker are at fault; another may have better ones.
    """
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        hint = "rows of an array read them and diverged: see whether the files are what they were"
        raise UnfitError("data", "samples that are not finite", hint)


def check_device(device: torch.device) -> None:
    """Return if a device on which all rows of an array have diverged in one step can multiply.

    Raises:
        UnfitError: it cannot; another worker's may.
    """
    ones = torch.ones(_SIZE, _SIZE, device=device)
    if not bool((ones @ ones == _SIZE).all()):
        hint = "it multiplies wrongly, and all rows of an array diverged: look after it, or take another"
        raise UnfitError("device", str(device), hint)
