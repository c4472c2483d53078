"""Small models with their batches, trials of them that differ in numbers, and one such trial on its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skein import rng
from skein.config.optimizer import AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.config.schedule import learning_rate
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.families.mlp import MlpModel
from skein.model.layers import AnyModel
from skein.numeric.optim.optimizers import optimizer_of
from skein.numeric.walker import Walker
from skein.protocol.rounds.weighing import clip_of
from skein.types import Precision, StageIndex, StageSpec
from worker.model.stage import Stage, build_stage
from worker.sweep.array import RowSettings
from worker.sweep.passes import RowBatch

CPU = torch.device("cpu")
NUM_STEPS = 40
_TOKENS = 16
_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the samples of its batch."""

    what: str
    model: AnyModel
    num_samples: int
    device: torch.device = CPU

    def stage(self, seed: int, precision: Precision) -> Stage:
        """The whole model, as the seed draws it."""
        num_layers = len(self.model.layer_parameters())
        return build_stage(
            self.model,
            StageSpec(index=StageIndex(0), first=0, stop=num_layers),
            sequence_tokens=_TOKENS,
            seed=seed,
            precision=precision,
            device=self.device,
        )

    def batch(self, seed: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Inputs and labels that one row's seed draws for a step."""
        drawn = rng.stream(seed, "samples", step)
        if self.model.vocab_size is not None:
            size = (2, self.num_samples, _TOKENS)
            tokens, labels = torch.from_numpy(drawn.integers(self.model.vocab_size, size=size))
            return tokens.to(self.device), labels.to(self.device)
        shape = self.model.labelled.sample if isinstance(self.model, MlpModel) else (1, 8, 8)
        samples = torch.from_numpy(drawn.standard_normal((self.num_samples, *shape))).to(self.device, dtype)
        return samples, torch.from_numpy(drawn.integers(10, size=self.num_samples)).to(self.device)


MLP = Case(
    what="MLP 64-128-128-10, batch 32", model=MlpModel(family="mlp", widths=(128, 128)), num_samples=32
)
CNN = Case(
    what="digits_cnn, 8 channels, batch 16",
    model=DigitsCnnModel(family="digits_cnn", channels=8),
    num_samples=16,
)
DECODER = Case(
    what="decoder of width 32, 16 tokens, batch 16",
    model=LlamaModel(shape=LlamaShape.model_validate(_SHAPE)),
    num_samples=16,
)
LARGE = Case(
    what="MLP 784-512-512-10, batch 128",
    model=MlpModel(family="mlp", widths=(512, 512), num_features=784),
    num_samples=128,
)
WIDE = Case(
    what="digits_cnn, 16 channels, batch 64", model=DigitsCnnModel(family="digits_cnn"), num_samples=64
)
OPTIMIZERS: tuple[OptimizerSpec, ...] = (AdamWSpec(), SgdSpec(name="sgd"), LambSpec(name="lamb"))


def settings_of(spec: OptimizerSpec, row: int) -> RowSettings:
    """Rate, decay, schedule, warm-up and clip of one row: no two alike."""
    changes: dict[str, object] = {
        "learning_rate": 1e-2 / (row + 1),
        "weight_decay": 0.05 * row,
        "schedule": ("cosine", "linear", "constant")[row % 3],
        "warmup_steps": 3 * row,
        "final_learning_rate_ratio": 0.1 * row,
        "clip_norm": (None, 1.0, 0.3)[row % 3],
    }
    return RowSettings(optimizer=spec.model_copy(update=changes), num_steps=NUM_STEPS + 10 * row)


class Separate:
    """A trial on its own: one model, its optimizer, its clip."""

    def __init__(self, stage: Stage, settings: RowSettings) -> None:
        self._stage = stage
        self._settings = settings
        self._optimizer = optimizer_of(settings.optimizer)
        params = {name: x.detach() for name, x in stage.named_parameters()}
        self._walker = Walker(params=params, state=self._optimizer.init(params))

    def step(self, inputs: Tensor, labels: Tensor) -> float:
        """Make one step; gives its mean loss."""
        self._stage.zero_grad(set_to_none=True)
        loss, num_valid = self._stage.loss(inputs, labels)
        torch.autograd.backward(loss)
        grads = {name: x.grad for name, x in self._stage.named_parameters() if x.grad is not None}
        norm = float(torch.stack([x.norm() for x in grads.values()]).norm()) / num_valid
        spec, at = self._settings.optimizer, self._walker.num_updates
        self._optimizer.update(
            self._walker,
            grads,
            learning_rate=learning_rate(spec, at, self._settings.num_steps),
            gradient_scale=clip_of(norm, spec.clip_norm) / num_valid,
        )
        return float(loss.detach()) / num_valid

    def distance(self, row: Walker) -> float:
        """Most by which a parameter differs from a row's."""
        mine = self._walker.params
        return max(float((row.params[name] - param).abs().max()) for name, param in mine.items())


def together(case: Case, seeds: Sequence[int], step: int, dtype: torch.dtype) -> RowBatch:
    """A batch for each row, by its own seed."""
    drawn = [case.batch(seed, step, dtype) for seed in seeds]
    return RowBatch(torch.stack([x for x, _ in drawn]), torch.stack([y for _, y in drawn]))
