"""Devices of one worker that share each block: how many a job asks for, and in what form."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from skein.errors import UserError
from skein.model.layers import AnyModel
from skein.spec import Spec

MOST_DEVICES = 64


class MeshForm(Spec):
    """Form in which devices of a mesh share a stage; `in_sequence`: norms and residuals are in parts of a sequence."""

    size: int
    in_sequence: bool = False

    def __str__(self) -> str:
        return f"{self.size} devices{', sequence in parts' * self.in_sequence}"

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
    sequence_parallel: bool | Literal["auto"] = "auto"
    """Whether each device has norms and residuals of a part of the sequence only, which spares memory where samples are
    long; `auto`: if that carries no more between devices, or else does not fit."""

    def check(self, model: AnyModel) -> None:
        """
        Raises:
            UserError: the model's blocks do not divide into so many shares, or its experts shall and cannot.
        """
        divisor = model.tensor_divisor
        if model.is_spread and 1 in (divisor, self.size):
            hint = f"{model.divided_words} do not divide: give stage"
            if divisor != 1:
                hint = "parallel.tensor.size: 1 leaves all on one device: give stage, or a larger size"
            raise UserError("model.placement", "mesh", hint)
        if self.sequence_parallel is True and (divisor == 1 or model.has_experts):
            hint = f"blocks of family {model.family} as given are computed on one device: give auto, or false"
            if model.is_spread:
                hint = (
                    "tokens are in parts where experts are, with model.placement: mesh: give auto, or false"
                )
            raise UserError("parallel.tensor.sequence_parallel", True, hint)
        if self.size == "auto" or divisor % self.size == 0:
            return
        hint = f"blocks of family {model.family} as given are computed on one device: give 1, or auto"
        if model.has_experts:
            hint += ", or model.placement: mesh"
        if divisor > 1:
            sizes = ", ".join(
                map(str, (n for n in range(1, min(divisor, MOST_DEVICES) + 1) if divisor % n == 0))
            )
            hint = f"{model.divided_words} divide into {sizes}: give one of these, or auto"
        raise UserError("parallel.tensor.size", self.size, hint)

    def size_on(self, num_devices: int, model: AnyModel) -> int:
        """Devices that share each block at a worker with so many.

        >>> from skein.model.families.mlp import MlpModel
        >>> TensorSpec().size_on(2, MlpModel(family="mlp", widths=(4,)))
        1
        """
        most = num_devices if self.size == "auto" else min(num_devices, self.size)
        return max(size for size in range(1, most + 1) if model.tensor_divisor % size == 0)

    def forms_on(self, num_devices: int, model: AnyModel) -> Iterator[MeshForm]:
        """Forms that a worker with so many devices may choose among: the first is taken where all are as good."""
        size = self.size_on(num_devices, model)
        if size > 1 and self.sequence_parallel and not model.has_experts:
            yield MeshForm(size=size, in_sequence=True)
        if size == 1 or self.sequence_parallel is not True:
            yield MeshForm(size=size)
