"""Errors by which torch says that a device's memory is full."""

import torch

_WORDS = "can't allocate memory", "out of memory", "ALLOC_FAILED"
"""Parts of messages: of torch where the host's is, of NCCL where a GPU's is, and of libraries that compute on it."""


def says_full(error: BaseException) -> bool:
    """Whether an error means that there is no memory left for what was to be computed.

    >>> says_full(MemoryError()), says_full(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublas"))
    (True, True)
    >>> says_full(RuntimeError("Connection closed by peer"))
    False
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
