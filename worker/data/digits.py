"""scikit-learn's digits as samples."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skein.errors import UnfitError
from skein.own import install_hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images (N, 1, 8, 8), float32 from 0 to 1, and their classes (N,), int64."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    digest: str

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    def read(self, sample: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Image (1, 8, 8) of a sample and its class, a scalar."""
        return self.images[sample], np.asarray(self.labels[sample])


def open_digits(*, field: str) -> Digits:
    """The bundled set of 1,797 images.

    Raises:
        UnfitError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        hint = f"needs scikit-learn on every worker: {install_hint('examples')}"
        raise UnfitError(f"{field}.format", "digits", hint) from error
    pixels, classes = load_digits(return_X_y=True)
    images = (np.asarray(pixels, np.float32) / np.float32(16)).reshape(-1, 1, 8, 8)
    labels = np.asarray(classes, np.int64)
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    return Digits(images=images, labels=labels, digest=digest)
