"""Protocol of every inner optimizer: slots, an initial state, and an update in place."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from skein.numeric.optim.elementwise import zeros_like
from skein.numeric.walker import Slot, Tensors, Walker


class Optimizer(Protocol):
    """A pair of functions over the state of a `Walker`; settings are the optimizer's own frozen fields."""

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Slots of the optimizer's state, by name."""
        ...

    def init(self, params: Mapping[str, Tensor]) -> dict[str, Tensors]:
        """The state before the first update, by slot: zeros in shape, dtype and device of each parameter."""
        return zeros_like(params, self.slots)

    def update(
        self,
        walker: Walker,
        grads: Mapping[str, Tensor],
        *,
        learning_rate: float,
        gradient_scale: float,
    ) -> None:
        """Moves `walker` by one update with the gradients gradient_scale * grads, in place; all or nothing.

        Raises:
            ValueError: names, shapes or dtypes disagree, or a tensor is not contiguous; nothing has changed then.
        """
        ...
