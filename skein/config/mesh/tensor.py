"""Devices of one worker that share each block: how many a job asks for, and in what form."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from skein.errors import UserError
from skein.model.layers import AnyModel
from skein.model.rows import VocabularySplit
from skein.spec import Spec

Model = TypeVar("Model", bound=AnyModel)

MOST_DEVICES = 64


class MeshForm(Spec):
    """Form in which devices of a mesh share a stage.

    `in_sequence`: norms and residuals are in parts of a sequence; `is_grid`: all is in blocks over a square of devices.
    """

    size: int
    in_sequence: bool = False
    is_grid: bool = False

    def __str__(self) -> str:
        """
        >>> [str(MeshForm(size=4, **x)) for x in ({}, {"in_sequence": True}, {"is_grid": True})]
        ['4 devices, sequence whole', '4 devices, sequence in parts', '2 x 2 devices']
        """
        if self.size == 1:
            return "one device"
        if self.is_grid:
            return f"{self.side} x {self.side} devices"
        return f"{self.size} devices, sequence {'in parts' if self.in_sequence else 'whole'}"

    @property
    def name(self) -> str:
        """Name of the form, in a word or two.

        >>> [MeshForm(size=4, **x).name for x in ({}, {"in_sequence": True}, {"is_grid": True})]
        ['1d', '1d in parts', '2d']
        """
        if self.size == 1:
            return "whole"
        return "2d" if self.is_grid else f"1d{' in parts' * self.in_sequence}"

    @property
    def side(self) -> int:
        """Devices of a row of the square, and samples are in so many parts; 1 without one."""
        return math.isqrt(self.size) if self.is_grid else 1

    def share_of(self, model: Model) -> Model:
        """Model whose blocks are what one device has of each."""
        return model.gridded(self.side) if self.is_grid else model.shared(self.size)

    def padded_tokens(self, num_tokens: int) -> int:
        """Length of a sequence as the devices see it.

        >>> MeshForm(size=4, in_sequence=True).padded_tokens(13), MeshForm(size=4).padded_tokens(13)
        (16, 13)
        """
        return -(-num_tokens // self.size) * self.size if self.in_sequence else num_tokens


class TensorSpec(Spec):
    """Devices of one worker that share each block, where workers have several."""

    size: Annotated[int, Field(ge=1, le=MOST_DEVICES)] | Literal["auto"] = "auto"
    """At most so many devices of each worker; `auto`: as many as it has, as far as blocks divide into them. Lower it
    where small layers take longer on several devices than on one."""
    form: Literal["auto", "1d", "2d"] = "auto"
    """`1d`: heads, inner width and rows of the vocabulary are in parts; `2d`: samples, heads and features are in blocks
    over 4, 9, 16 devices, which spares memory where nothing else does; `auto`: 2d only where 1d does not fit."""
    sequence_parallel: bool | Literal["auto"] = "auto"
    """Whether each device has norms and residuals of a part of the sequence only, which spares memory where samples are
    long; `auto`: if that carries no more between devices, or else does not fit."""

    def check(self, model: AnyModel, num_samples: int) -> None:
        """
        Args:
            num_samples: of a microbatch.

        Raises:
            UserError: the model's blocks do not divide into so many shares, or its experts shall and cannot.
        """
        if self.form == "2d":
            self._check_grid(model, num_samples)
            return
        divisor, or_spread = model.tensor_divisor, ", or model.placement: mesh" * model.has_experts
        if model.is_spread and 1 in (divisor, self.size):
            hint = f"{_divided(model)}: give stage"
            if divisor != 1:
                hint = "parallel.tensor.size: 1 leaves all on one device: give stage, or a larger size"
            raise UserError("model.placement", "mesh", hint)
        if self.sequence_parallel is True and divisor == 1:
            hint = f"{_divided(model)}: give auto, or false{or_spread}"
            raise UserError("parallel.tensor.sequence_parallel", True, hint)
        if self.size == "auto" or divisor % self.size == 0:
            return
        what = "one of these, or auto" if divisor > 1 else f"1, or auto{or_spread}"
        raise UserError("parallel.tensor.size", self.size, f"{_divided(model)}: give {what}")

    def _check_grid(self, model: AnyModel, num_samples: int) -> None:
        side = 2 if self.size == "auto" else math.isqrt(self.size)
        if self.size != "auto" and (side == 1 or side * side != self.size):
            raise UserError(
                "parallel.tensor.size", self.size, "form 2d takes a square: give 4, 9, 16, or auto"
            )
        if self.sequence_parallel is True:
            blocks = "in form 2d samples and features are in blocks: give auto, or false"
            raise UserError("parallel.tensor.sequence_parallel", True, blocks)
        hint = None
        if model.tensor_divisor == 0:
            return  # Sizes come with the weights that it begins from.
        if model.has_experts:
            hint = (
                "experts take tokens with all features, and in blocks no device has these: give auto, or 1d"
            )
        elif not model.grid_sizes:
            hint = f"family {model.family} is not computed over a square of devices: give auto, or 1d"
        elif model.vocabulary_split is not VocabularySplit.OFF:
            hint = "shards of the vocabulary are whole on each device: give 1d, or parallel.vocabulary.split: off"
        elif undivided := _undivided(side, model, num_samples):
            hint = (
                f"{side} x {side} devices do not divide {', '.join(undivided)}: "
                "change these, or give another size, or 1d"
            )
        if hint is not None:
            raise UserError("parallel.tensor.form", self.form, hint)

    def size_on(self, num_devices: int, model: AnyModel) -> int:
        """Devices that share each block at a worker with so many.

        >>> from skein.model.families.mlp import MlpModel
        >>> TensorSpec().size_on(2, MlpModel(family="mlp", widths=(4,)))
        1
        """
        most = num_devices if self.size == "auto" else min(num_devices, self.size)
        return max(size for size in range(1, most + 1) if model.tensor_divisor % size == 0)

    def why_fewer(self, model: AnyModel, form: MeshForm) -> str:
        """Reason for which blocks are shared in `form`, by fewer devices than a worker has.

        >>> from skein.model.families.mlp import MlpModel
        >>> TensorSpec().why_fewer(MlpModel(family="mlp", widths=(4,)), MeshForm(size=1))
        'blocks of family mlp are computed on one device'
        """
        if self.size == form.size:
            return f"parallel.tensor.size is {self.size}"
        if form.is_grid or self.form == "2d":
            sizes = ", ".join(f"{name} ({size})" for name, size in model.grid_sizes.items())
            return f"form 2d takes q x q devices where q divides {sizes} and batch.microbatch_samples"
        return _divided(model) + "; model.placement: mesh would share them" * (
            model.has_experts and not model.is_spread
        )

    def side_on(self, num_devices: int, model: AnyModel, num_samples: int) -> int:
        """Side of the largest square of so many devices that can share each block; 1: none can."""
        most = num_devices if self.size == "auto" else min(num_devices, self.size)
        if not model.grid_sizes or model.vocabulary_split is not VocabularySplit.OFF:
            return 1
        sides = range(1, math.isqrt(most) + 1)
        return max(side for side in sides if not _undivided(side, model, num_samples))

    def forms_on(self, num_devices: int, model: AnyModel, num_samples: int) -> Iterator[MeshForm]:
        """Forms that a worker with so many devices may choose among: the first is taken where all are as good."""
        size, side = self.size_on(num_devices, model), self.side_on(num_devices, model, num_samples)
        if self.form != "2d":
            if size > 1 and self.sequence_parallel:
                yield MeshForm(size=size, in_sequence=True)
            if size == 1 or self.sequence_parallel is not True:
                yield MeshForm(size=size)
        if self.form == "2d" or (self.form == "auto" and side > 1 and self.sequence_parallel is not True):
            yield MeshForm(size=side**2, is_grid=side > 1)


def _divided(model: AnyModel) -> str:
    """Into how many devices' parts blocks of a model divide, and because of what."""
    divisor = model.tensor_divisor
    if not model.divided_words:
        return f"blocks of family {model.family} are computed on one device"
    if divisor == 1:
        return f"{model.divided_words} divide into 1 alone, so blocks are computed on one device"
    sizes = [n for n in range(1, min(divisor, MOST_DEVICES) + 1) if divisor % n == 0]
    return f"{model.divided_words} divide into {', '.join(map(str, sizes))}"


def _undivided(side: int, model: AnyModel, num_samples: int) -> list[str]:
    sizes = {**model.grid_sizes} | {"batch.microbatch_samples": num_samples}
    return [f"{name} ({size})" for name, size in sizes.items() if size % side]
