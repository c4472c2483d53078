"""Parameters that an optimizer treats alike: those that weight decay applies to, and the others."""

from collections.abc import Mapping

from torch import Tensor


def decayed_names(named_params: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the parameters that weight decay applies to: matrices, embeddings and kernels, not vectors.

    >>> import torch
    >>> sorted(decayed_names({"embed": torch.ones(4, 2), "norm": torch.ones(2)}))
    ['embed']
    """
    return frozenset(name for name, param in named_params.items() if param.ndim >= 2)
