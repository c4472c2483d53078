"""Blame where all rows of an array diverge in one step: whether it lies in what they have in common."""

import torch
from torch import Tensor

from skein.errors import UnfitError

_SIZE = 64


def check_sane(inputs: Tensor) -> None:
    """Return if rows alone can have diverged: their samples are finite, and their device can multiply.

    Raises:
        UnfitError: the data or the device of this worker are at fault; another may have better ones.
    """
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        hint = "all rows of an array read them and diverged: see whether the files are what they were"
        raise UnfitError("data", "samples that are not finite", hint)
    ones = torch.ones(_SIZE, _SIZE, device=inputs.device)
    if not bool((ones @ ones == _SIZE).all()):
        hint = "it multiplies wrongly, and all rows of an array diverged: look after it, or take another"
        raise UnfitError("device", str(inputs.device), hint)
