"""Parameters and state of one walker, as far as one worker holds them: what optimizers and rules work on."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

Tensors = dict[str, Tensor]


class StateClass(StrEnum):
    """Class of a state tensor: who has it, and so what becomes of it.

    REPLICATED: bit-equal at all holders, hash-checked, copied to newcomers from anyone.
    PRIVATE: each member's own; a newcomer begins at zero, or with a copy where the slot says so.
    SHARD: of whoever sums a shard; dropped when members change, unless the slot can be cut anew.
    TRANSIENT: between two calls of one step; never saved, never sent.
    """

    REPLICATED = "replicated"
    PRIVATE = "private"
    SHARD = "shard"
    TRANSIENT = "transient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Kind of state tensor: its class, and whether a newcomer gets a copy and a checkpoint has it."""

    kind: StateClass
    is_copied: bool = True
    is_saved: bool = True

    def __post_init__(self) -> None:
        if self.kind is StateClass.TRANSIENT and (self.is_copied or self.is_saved):
            raise ValueError("what is transient is neither copied nor saved")


@dataclass(slots=True, kw_only=True)
class Walker:
    """Tensors of one walker here. `state` is by slot, then by name: mostly those of the parameters.

    `num_updates` counts the updates made. Rules and optimizers change the tensors in place; whoever may have to go back
    gives them a `copy`.
    """

    params: Tensors
    state: dict[str, Tensors]
    num_updates: int = 0

    def share(self, keepers: "Mapping[str, Walker]") -> None:
        """Have these parameters, with their state, in the memory of the walkers that keep them, bits being equal."""
        for name, keeper in keepers.items():
            self.params[name] = keeper.params[name]
            for slot, tensors in self.state.items():
                if name in tensors:
                    tensors[name] = keeper.state[slot][name]

    def without(self, names: Collection[str]) -> "Walker":
        """The same tensors but for those of these parameters; the walker itself if it has none."""
        if self.params.keys().isdisjoint(names):
            return self
        return Walker(
            params={name: x for name, x in self.params.items() if name not in names},
            state={
                slot: {name: x for name, x in tensors.items() if name not in names}
                for slot, tensors in self.state.items()
            },
            num_updates=self.num_updates,
        )

    def copy(self) -> "Walker":
        """The same in other memory."""
        return Walker(
            params={name: tensor.detach().clone() for name, tensor in self.params.items()},
            state={
                slot: {name: tensor.clone() for name, tensor in tensors.items()}
                for slot, tensors in self.state.items()
            },
            num_updates=self.num_updates,
        )
