"""Parameters and state of models that differ in numbers only, one row for each, side by side in one buffer.

R rows, P numbers of a row.

Rules of this file
- Row r is contiguous and whole: its tensors are views, and a row that leaves is a copy of the others.
- Tensors that weight decay applies to come first in a row, so that a span of columns is of one kind.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from skein.numeric.optim.groups import decayed_names
from skein.numeric.walker import Tensors, Walker


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Places of a row's tensors: names and shapes in order. The first `num_decayed` numbers are of what decays."""

    shapes: Mapping[str, tuple[int, ...]]
    num_decayed: int

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> Self:
        """The layout of models with parameters like these.

        >>> layout = RowLayout.of({"bias": torch.ones(2), "matrix": torch.ones(2, 3)})
        >>> list(layout.shapes), layout.num_decayed, layout.num_elements
        (['matrix', 'bias'], 6, 8)
        """
        decayed = decayed_names(params)
        order = [*sorted(decayed), *sorted(params.keys() - decayed)]
        return cls(
            shapes={name: tuple(params[name].shape) for name in order},
            num_decayed=sum(params[name].numel() for name in decayed),
        )

    @property
    def num_elements(self) -> int:
        """Numbers of a row."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes.values()]

    def views(self, flat: Tensor) -> Tensors:
        """Views of `flat`, whose last dim is P, by name; dims before it stay in front of each tensor's own.

        They are made by one split, whose backward is one concatenation.
        """
        parts = torch.split(flat, self._sizes, dim=-1)
        ahead = flat.shape[:-1]
        return {
            name: part.view(*ahead, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


@dataclass(slots=True, kw_only=True)
class RowBuffer:
    """Rows of parameters (R, P), their optimizer's state by slot (R, P each), and how many updates each has made."""

    layout: RowLayout
    params: Tensor
    state: Tensors
    num_updates: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, walkers: Sequence[Walker]) -> Self:
        """Copies of walkers whose tensors are alike in names and shapes, a row for each."""
        layout = RowLayout.of(walkers[0].params)
        slots = walkers[0].state
        return cls(
            layout=layout,
            params=torch.stack([_flat(layout, walker.params) for walker in walkers]),
            state={
                slot: torch.stack([_flat(layout, walker.state[slot]) for walker in walkers]) for slot in slots
            },
            num_updates=[walker.num_updates for walker in walkers],
        )

    @classmethod
    def joined(cls, parts: "Sequence[RowBuffer]") -> Self:
        """Copies of the rows of buffers of one layout, one after another."""
        first = parts[0]
        return cls(
            layout=first.layout,
            params=torch.cat([part.params for part in parts]),
            state={slot: torch.cat([part.state[slot] for part in parts]) for slot in first.state},
            num_updates=[count for part in parts for count in part.num_updates],
        )

    def __len__(self) -> int:
        return len(self.num_updates)

    def walker(self, row: int) -> Walker:
        """The walker that a row is: its tensors are views of the buffers, its count of updates is not."""
        views = self.layout.views
        return Walker(
            params=views(self.params[row]),
            state={slot: views(flat[row]) for slot, flat in self.state.items()},
            num_updates=self.num_updates[row],
        )

    def taken(self, rows: Sequence[int]) -> "RowBuffer":
        """Copies of these rows, in this order."""
        places = torch.tensor(rows, dtype=torch.int64, device=self.params.device)
        return RowBuffer(
            layout=self.layout,
            params=self.params[places],
            state={slot: flat[places] for slot, flat in self.state.items()},
            num_updates=[self.num_updates[row] for row in rows],
        )

    def to(self, device: torch.device) -> "RowBuffer":
        """The same on a device; itself if it is there."""
        if self.params.device == device:
            return self
        return RowBuffer(
            layout=self.layout,
            params=self.params.to(device),
            state={slot: flat.to(device) for slot, flat in self.state.items()},
            num_updates=list(self.num_updates),
        )

    def put(self, rows: Sequence[int], others: "RowBuffer") -> None:
        """Have these rows be what `others` are, in that order."""
        places = torch.tensor(rows, dtype=torch.int64, device=self.params.device)
        self.params[places] = others.params
        for slot, flat in self.state.items():
            flat[places] = others.state[slot]
        for row, num_updates in zip(rows, others.num_updates, strict=True):
            self.num_updates[row] = num_updates


def _flat(layout: RowLayout, tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].detach().reshape(-1) for name in layout.shapes])
