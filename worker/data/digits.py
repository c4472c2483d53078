"""scikit-learn's digits."""

import numpy as np
from numpy.typing import NDArray

from skein.errors import UnfitError
from skein.own import install_hint


def open_digits(*, field: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The bundled set of 1,797 images (N, 64), from 0 to 1, and their classes (N,).

    Raises:
        UnfitError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        hint = f"needs scikit-learn on every worker: {install_hint('examples')}"
        raise UnfitError(f"{field}.format", "digits", hint) from error
    pixels, classes = load_digits(return_X_y=True)
    return np.asarray(pixels, np.float32) / np.float32(16), np.asarray(classes, np.int64)
