"""Data sets to choose from: scikit-learn's digits, and a made set with the shape of forest covers."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skein import rng
from skein.numeric.coreset.features import F64, Ids
from worker.data.digits import open_digits

_NUM_DIGITS_HELD_OUT = 500
_NUM_COVERS, _NUM_COVERS_HELD_OUT = 10_000, 5_000
_COVER_SHARES = (0.365, 0.488, 0.062, 0.005, 0.015, 0.030, 0.035)
"""Rows of each class of Covertype."""
_STANDS = 30
_SPREAD = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Rows (N, D) and their classes (N,)."""

    x_ND: F64
    y_N: Ids

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.x_ND), torch.from_numpy(self.y_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Rows that are trained on, and rows held out."""

    trained: Labelled
    held_out: Labelled


def digits(seed: int) -> Problem:
    """1,297 images of 64 pixels from 0 to 1 in ten classes, 500 held out by `seed`.

    Raises:
        UnfitError: scikit-learn is not installed.
    """
    images, labels = open_digits(field="digits")
    order = rng.stream(seed, "digits").permutation(len(labels))
    return _split(images[order].astype(np.float64), labels[order], _NUM_DIGITS_HELD_OUT)


def covers(seed: int) -> Problem:
    """10 measures and two choices as 4 and 40 columns, seven classes as uneven as Covertype's.

    Each class is made of 30 stands: a stand has its centre, and its own ground; trees of one stand are much alike.
    """
    generator = rng.stream(seed, "covers")
    num_rows = _NUM_COVERS + _NUM_COVERS_HELD_OUT
    y = generator.choice(len(_COVER_SHARES), size=num_rows, p=_COVER_SHARES)
    class_centres = generator.normal(size=(len(_COVER_SHARES), 1, 10))
    centres = class_centres + generator.normal(size=(len(_COVER_SHARES), _STANDS, 10))
    grounds = generator.integers((4, 40), size=(len(_COVER_SHARES), _STANDS, 2))
    stands = generator.integers(_STANDS, size=num_rows)
    measures = centres[y, stands] + _SPREAD * generator.normal(size=(num_rows, 10))
    area, soil = grounds[y, stands].T
    x = np.concatenate((measures, np.eye(4)[area], np.eye(40)[soil]), axis=1)
    return _split(x, y, _NUM_COVERS_HELD_OUT)


def _split(x: F64, y: Ids, num_held_out: int) -> Problem:
    return Problem(
        trained=Labelled(x_ND=x[num_held_out:], y_N=y[num_held_out:]),
        held_out=Labelled(x_ND=x[:num_held_out], y_N=y[:num_held_out]),
    )
