"""Devices of one worker that share each block: how many a job asks for."""

from typing import Annotated, Literal

from pydantic import Field

from skein.errors import UserError
from skein.model.layers import AnyModel
from skein.spec import Spec

_MOST_DEVICES = 64


class TensorSpec(Spec):
    """Devices of one worker that share each block, where workers have several."""

    size: Annotated[int, Field(ge=1, le=_MOST_DEVICES)] | Literal["auto"] = "auto"
    """At most so many devices of each worker; `auto`: as many as it has, as far as blocks divide into them. Lower it
    where small layers take longer on several devices than on one."""

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
        if self.size == "auto" or divisor % self.size == 0:
            return
        hint = f"blocks of family {model.family} as given are computed on one device: give 1, or auto"
        if model.has_experts:
            hint += ", or model.placement: mesh"
        if divisor > 1:
            sizes = ", ".join(
                map(str, (n for n in range(1, min(divisor, _MOST_DEVICES) + 1) if divisor % n == 0))
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
