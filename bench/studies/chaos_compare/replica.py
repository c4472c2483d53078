"""The whole model in one process, with its share of every step: what both rivals of ours train."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.reference import batch_of, torch_optimizer, whole_model
from bench.studies.chaos_compare.replica_file import Part
from bench.studies.chaos_compare.told import Kind, Told, tell
from skein.config.schedule import learning_rate
from worker.data.dataset import open_dataset


class Replica:
    """Model, optimizer and data. Every replica has an equal share of the microbatches of each step."""

    def __init__(self, part: Part) -> None:
        torch.set_num_threads(1)
        self.part = part
        self.job = part.job
        self.model = whole_model(self.job)
        self.optimizer = torch_optimizer(self.job.optimizer, self.model.parameters())
        self._dataset = open_dataset(self.job.data, self.job.model, seed=self.job.seed)
        self._share = self.job.batch.num_microbatches // part.num_replicas
        # AdamW makes its state at the first update; what is loaded must have a place before.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._update(0.0)
        for state in self.optimizer.state.values():
            state["step"].zero_()
        self._out = part.told.open("ab")

    @property
    def num_samples(self) -> int:
        """Of this replica's share of a step."""
        return self._share * self.job.batch.microbatch_samples

    def compute(self, step: int) -> tuple[float, int]:
        """Summed gradients of this share of `step` into `.grad`; summed loss (nats) and valid tokens."""
        self.tell(Kind.BEGUN, step)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        total, num_valid = 0.0, 0
        for microbatch in range(self.part.replica * self._share, (self.part.replica + 1) * self._share):
            inputs, labels = batch_of(self.job, self._dataset, step, microbatch, 1)
            loss, num_tokens = self.model.loss(inputs, labels)
            torch.autograd.backward(loss)
            total += float(loss.detach())
            num_valid += num_tokens
        return total, num_valid

    def gradients(self) -> Tensor:
        """All of them in one vector."""
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])

    def apply(self, step: int, mean_gradients: Tensor) -> None:
        """One update with these gradients, clipped as the job says."""
        begin = 0
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(mean_gradients[begin : begin + parameter.numel()].view_as(parameter))
            begin += parameter.numel()
        limit = self.job.optimizer.clip_norm
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf") if limit is None else limit)
        self._update(learning_rate(self.job.optimizer, step, self.job.total_steps))

    def _update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Parameters and optimizer state by name."""
        state = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            state |= {f"{name}/{key}": value for key, value in self.optimizer.state[parameter].items()}
        return state

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state` gave elsewhere."""
        for name, mine in self.state().items():
            mine.copy_(state[name])

    def tell(
        self, kind: Kind, step: int, loss_sum: float = 0.0, num_tokens: int = 0, *, is_counted: bool = True
    ) -> None:
        """Note what happens to this replica's share of `step`."""
        line = Told(
            kind=kind,
            replica=self.part.replica,
            step=step,
            at_s=time.time(),
            num_samples=self.num_samples,
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            is_counted=is_counted,
        )
        tell(line, self._out)


def run_part(train: Callable[[Part], None]) -> int:
    """The entry of a program: trains the part in the file that the command line names."""
    train(Part.model_validate_json(Path(sys.argv[1]).read_bytes()))
    return 0
