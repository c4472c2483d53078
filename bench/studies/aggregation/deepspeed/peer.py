"""`python peer.py FOLDER ME`: a peer of DeepSpeed's 1-bit optimizers, in an environment that has them.

FOLDER/asked.npz says what is wanted and how many peers there are; FOLDER/toldME.npz, what came of it. Who writes
the one and reads the other: `bench.studies.aggregation.one_bit_deepspeed`.

DeepSpeed packs bits with kernels that a CPU does not have. `Packer` does in numpy what the one in its
`ops/csrc/xpu/packbits/packing.cpp` does: 1 is non-negative, the first element is the most significant bit.
"""

import importlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.nn import Parameter
from torch.optim import Optimizer

Array = NDArray[np.floating]

_PATIENCE = timedelta(seconds=60)


class Packer:
    """Both directions, called as DeepSpeed calls its own."""

    def load(self) -> "Packer":
        return self

    def packbits(self, values: Tensor, num_elements: int, _peer: int) -> Tensor:
        return torch.from_numpy(np.packbits(values.numpy().reshape(num_elements) >= 0))

    def unpackbits(self, packed: Tensor, num_bytes: int, _peer: int) -> Tensor:
        bits = np.unpackbits(packed.numpy().reshape(num_bytes))
        return torch.from_numpy(np.where(bits, 1.0, -1.0)).to(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`start` is (elements,), `noise` (steps, peers, elements); `optimizer` what its constructor is given."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    warmup_steps: int
    optimizer: Mapping[str, float | Sequence[float]]
    start: Array
    noise: Array


def read(folder: Path) -> Asked:
    """What is asked of the peers."""
    with np.load(folder / "asked.npz") as asked:
        settings = json.loads(str(asked["settings"]))
        return Asked(
            kind=settings["kind"],
            shapes=tuple(tuple(shape) for shape in settings["shapes"]),
            warmup_steps=settings["warmup_steps"],
            optimizer=settings["optimizer"],
            start=asked["start"],
            noise=asked["noise"],
        )


def train(me: int, folder: str) -> None:
    """One peer's process, from meeting the others to writing what came of it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    asked = read(Path(folder))
    meeting = f"file://{Path(folder, 'meeting').resolve()}"
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=me, world_size=asked.noise.shape[1], timeout=_PATIENCE
    )
    _prepare()
    with Path(folder, f"told{me}.npz").open("wb") as file:
        np.savez(file, allow_pickle=False, **_train(me, asked))
    distributed.destroy_process_group()


def _prepare() -> None:
    """DeepSpeed's collectives over gloo, without a kernel that would have to be compiled."""
    comm, over_torch, compressed = (
        importlib.import_module(f"deepspeed.{name}")
        for name in ("comm", "comm.torch", "runtime.comm.compressed")
    )
    setattr(over_torch, "build_shm_op", lambda: None)  # noqa: B010  # a module's name, for mypy
    setattr(compressed, "PackbitsBuilder", Packer)  # noqa: B010
    comm.init_distributed(dist_backend="gloo", verbose=False)
    gather = comm.all_gather

    def all_gather(into: list[Tensor], tensor: Tensor, group: object) -> None:
        # gloo asks for equal shapes, where NCCL puts a number into a vector of one.
        gather(into, tensor.reshape(into[0].shape), group=group)

    setattr(comm, "all_gather", all_gather)  # noqa: B010


def _widen() -> None:
    """float64 throughout: inside its collective DeepSpeed names float32 wherever it makes a tensor."""
    torch.set_default_dtype(torch.float64)
    setattr(torch.Tensor, "float", torch.Tensor.double)  # noqa: B010  # a method, for mypy
    setattr(torch, "float32", torch.float64)  # noqa: B010


def _train(me: int, asked: Asked) -> dict[str, Array]:
    """Parameters after each step, and what the optimizer keeps in the end."""
    module = importlib.import_module(f"deepspeed.runtime.fp16.onebit.{asked.kind}")
    if asked.start.dtype == np.float64:
        _widen()
    parts = torch.split(torch.from_numpy(asked.start), [math.prod(shape) for shape in asked.shapes])
    params = [Parameter(part.clone().view(shape)) for part, shape in zip(parts, asked.shapes, strict=True)]
    optimizer: Optimizer = getattr(module, f"Onebit{asked.kind.title()}")(
        [
            {"params": [p for p in params if p.ndim >= 2]},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ],
        deepspeed=SimpleNamespace(mpu=None, local_rank=me, enable_backward_allreduce=True),
        freeze_step=asked.warmup_steps + 1,  # its first step makes buffers and trains nothing
        comm_backend_name="compressed",
        **asked.optimizer,
    )
    seen = []
    for step in range(-1, len(asked.noise)):
        drawn = asked.noise[max(step, 0)]
        _set_gradients(
            params, torch.from_numpy(drawn.mean(axis=0) if step < asked.warmup_steps else drawn[me])
        )
        optimizer.step()
        seen.append(torch.cat([p.detach().reshape(-1) for p in params]).numpy().copy())
    return {"params": np.stack(seen[1:])} | _kept(optimizer, params)


def _set_gradients(params: list[Parameter], drawn: Tensor) -> None:
    """A bowl around zero, and noise: one product and one sum per element, so no library can do it otherwise."""
    for param, part in zip(params, torch.split(drawn, [p.numel() for p in params]), strict=True):
        param.grad = (param.detach() * 0.5).add_(part.view_as(param))


def _kept(optimizer: Optimizer, params: list[Parameter]) -> dict[str, Array]:
    states = [optimizer.state[p] for p in params]
    kept = {
        "mean": np.concatenate([s["exp_avg"].reshape(-1).numpy() for s in states]),
        "mean_of_squares": np.concatenate([s["exp_avg_sq"].reshape(-1).numpy() for s in states]),
    }
    if "lamb_coeff_freeze" not in states[0]:
        return kept | {"error": np.concatenate([s["worker_error"].numpy() for s in states])}
    return kept | {
        "ratio": np.array([s["lamb_coeff_freeze"] for s in states]),
        "factor": np.array([s["last_factor"] for s in states]),
        "error": getattr(optimizer, "worker_errors")[0].numpy(),  # noqa: B009  # not torch's own
    }


if __name__ == "__main__":
    train(int(sys.argv[2]), sys.argv[1])
