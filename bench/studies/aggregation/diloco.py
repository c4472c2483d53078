"""DiLoCo beside all-reduce on a small language model: what a step costs on the wire, and what it teaches.

Four walkers in one process learn bytes of the Python standard library. All methods see the same samples, begin with the
same weights and follow the same learning rate; all-reduce takes the four walkers' batches of a step together. Bytes are
those of the tensors that would cross a network: parts to the owners of their shards, results back to all others.
"""

import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from bench.report import Row, spread
from bench.studies.aggregation.measured import Measured, banded
from bench.studies.plot import Chart
from skein.config.aggregation import DiLoCo
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec
from skein.config.optimizer import AdamWSpec
from skein.config.rule import Wire
from skein.config.schedule import learning_rate
from skein.data.cursor import positions_of
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.layers import layers_of
from skein.numeric.aggregate.diloco import GLOBAL, DiLoCoRule
from skein.numeric.aggregate.rule import Terms
from skein.numeric.optim.optimizers import optimizer_of
from skein.numeric.walker import Tensors, Walker
from skein.types import Precision, StageIndex, StageSpec
from tests.support.exchanges import InFlight, put, take, talks_by_shard
from worker.data.dataset import Batch, open_dataset
from worker.model.stage import build_stage

NUM_WALKERS = 4
LOCAL_STEPS = 50
NUM_STEPS = 1000
SEEDS = (0, 1, 2)
LOSS_GOAL = 0.01
BYTES_GOAL = 200.0
_EVALUATE_EVERY = 100
_NUM_VALIDATION = 256
_SHAPE = LlamaShape(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
_TOKENS = 64
_BATCH = BatchSpec(samples=4 * NUM_WALKERS, microbatch_samples=4)
_OPTIMIZER = AdamWSpec(learning_rate=3e-3, warmup_steps=50)

ALL_REDUCE, REFERENCE, STREAMED = "all-reduce", "DiLoCo fp32", "DiLoCo int4, streamed"

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to train four walkers; without a spec all gradients are summed in every step."""

    label: str
    spec: DiLoCo | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What became of one training: validation loss in nats per byte by step, and bytes on the wire of all walkers."""

    curve: Curve
    num_bytes: int

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


def _spec(wire: Wire, *, fragments: int = 1, overlap_steps: int = 0) -> DiLoCo:
    """Twenty rounds are too few for an outer momentum of 0.9: with 0.6 all of them learn more."""
    return DiLoCo(
        rule="diloco",
        wire=wire,
        local_steps=LOCAL_STEPS,
        outer_momentum=0.6,
        fragments=fragments,
        overlap_steps=overlap_steps,
    )


METHODS = (
    Method(label=ALL_REDUCE, spec=None),
    Method(label=REFERENCE, spec=_spec("fp32")),
    Method(label=STREAMED, spec=_spec("int4", fragments=5, overlap_steps=1)),
    Method(label="DiLoCo int2", spec=_spec("int2")),
)


class LanguageModel:
    """A small model on the CPU that lends its layers to whatever parameters are given."""

    def __init__(self, seed: int) -> None:
        model = LlamaModel(shape=_SHAPE)
        data = DataSpec(
            sources=(TextSource(path=sysconfig.get_path("stdlib"), glob="*.py"),), sequence_tokens=_TOKENS
        )
        layers = layers_of(model, sequence_tokens=_TOKENS, precision=Precision.FP32)
        self._dataset = open_dataset(data, model, seed=seed, batch=_BATCH)
        self._stage = build_stage(
            model,
            StageSpec(index=StageIndex(0), first=0, stop=len(layers)),
            sequence_tokens=_TOKENS,
            seed=seed,
            precision=Precision.FP32,
            device=torch.device("cpu"),
        )
        self._params = dict(self._stage.named_parameters())

    def params(self) -> Tensors:
        """The initial parameters, copied."""
        return {name: param.detach().clone() for name, param in self._params.items()}

    def gradients(self, params: Mapping[str, Tensor], step: int, part: int) -> tuple[Tensors, int]:
        """Summed gradients of one microbatch of a step, and the number of its bytes."""
        self._lend(params)
        self._stage.zero_grad(set_to_none=True)
        total, num_tokens = self._loss(self._dataset.train_batch(positions_of(step, part, _BATCH)))
        torch.autograd.backward(total)
        grads = {name: param.grad for name, param in self._params.items() if param.grad is not None}
        return grads, num_tokens

    @torch.no_grad()
    def validation_loss(self, params: Mapping[str, Tensor]) -> float:
        """Nats per byte on text that was held out."""
        self._lend(params)
        batches = [range(first, first + 64) for first in range(0, _NUM_VALIDATION, 64)]
        losses = [self._loss(self._dataset.validation_batch(positions)) for positions in batches]
        return sum(float(total) for total, _ in losses) / sum(count for _, count in losses)

    def _lend(self, params: Mapping[str, Tensor]) -> None:
        for name, param in self._params.items():
            param.data = params[name]

    def _loss(self, batch: Batch) -> tuple[Tensor, int]:
        return self._stage.loss(torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels))


def train(method: Method, *, seed: int, num_steps: int) -> Trained:
    """One training from its beginning."""
    model = LanguageModel(seed)
    curve, num_bytes = [], 0
    ways = _all_reduced(model, num_steps) if method.spec is None else _walked(model, method.spec, num_steps)
    for step, (params, sent) in enumerate(ways):
        num_bytes += sent
        if (step + 1) % _EVALUATE_EVERY == 0 or step + 1 == num_steps:
            curve.append((step + 1, model.validation_loss(params)))
    return Trained(curve=tuple(curve), num_bytes=num_bytes)


def _all_reduced(model: LanguageModel, num_steps: int) -> Iterator[tuple[Tensors, int]]:
    """Parameters after each step, and its bytes: every float32 goes to its owner and comes back summed."""
    optimizer = optimizer_of(_OPTIMIZER)
    params = model.params()
    walker = Walker(params=params, state=optimizer.init(params))
    num_bytes = 2 * (NUM_WALKERS - 1) * 4 * sum(param.numel() for param in params.values())
    for step in range(num_steps):
        parts = [model.gradients(walker.params, step, part) for part in range(NUM_WALKERS)]
        grads = {name: torch.stack([part[name] for part, _ in parts]).sum(0) for name in params}
        terms = _terms(grads, sum(count for _, count in parts), step, num_steps)
        optimizer.update(
            walker, grads, learning_rate=terms.learning_rate, gradient_scale=terms.gradient_scale
        )
        yield walker.params, num_bytes


def _walked(model: LanguageModel, spec: DiLoCo, num_steps: int) -> Iterator[tuple[Tensors, int]]:
    """Global parameters after each step, and its bytes. After the last step what is still under way is applied."""
    rule = DiLoCoRule(spec=spec, optimizer=optimizer_of(_OPTIMIZER))
    walkers = [Walker(params=model.params(), state=rule.init(model.params())) for _ in range(NUM_WALKERS)]
    waiting: list[tuple[int, InFlight]] = []
    for step in range(num_steps):
        terms = [
            _local_step(rule, model, walker, step, part, num_steps) for part, walker in enumerate(walkers)
        ]
        taken = []
        for due in rule.spec.due(step):
            talks = talks_by_shard(due, num_members=NUM_WALKERS, num_shards=NUM_WALKERS)
            taken.append((step + due.overlap_steps, take(rule, walkers, talks)))
        waiting += taken
        for _, exchange in [entry for entry in waiting if entry[0] == step or step + 1 == num_steps]:
            put(rule, walkers, exchange, terms)
        waiting = [entry for entry in waiting if entry[0] > step]
        yield walkers[0].state[GLOBAL], sum(exchange.num_bytes for _, exchange in taken)


def _local_step(
    rule: DiLoCoRule, model: LanguageModel, walker: Walker, step: int, part: int, num_steps: int
) -> Terms:
    grads, num_tokens = model.gradients(walker.params, step, part)
    terms = _terms(grads, num_tokens, step, num_steps)
    rule.local_step(walker, grads, terms, talks=False)
    return terms


def _terms(grads: Mapping[str, Tensor], num_tokens: int, step: int, num_steps: int) -> Terms:
    """The mean over the bytes, its norm clipped."""
    norm = float(torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()) / num_tokens
    clip = min(1.0, (_OPTIMIZER.clip_norm or norm) / norm)
    return Terms(
        step=step,
        learning_rate=learning_rate(_OPTIMIZER, step, num_steps),
        gradient_scale=clip / num_tokens,
    )


# --- figures ---


def measure(*, is_quick: bool) -> Measured:
    """Rows on loss and bytes, medians over the seeds, and the curves of validation loss."""
    seeds, num_steps = (SEEDS[:1], 2 * LOCAL_STEPS) if is_quick else (SEEDS, NUM_STEPS)
    runs = {
        method.label: [train(method, seed=seed, num_steps=num_steps) for seed in seeds] for method in METHODS
    }
    return Measured(rows=rows_of(runs), charts={"diloco": chart_of(runs)})


def rows_of(runs: Mapping[str, Sequence[Trained]]) -> tuple[Row, ...]:
    """Each method's last validation loss beside that of DiLoCo in fp32, and its bytes beside all-reduce's."""
    reference = runs[REFERENCE]
    rows = []
    for label, own in runs.items():
        ratios = [one.loss / other.loss for one, other in zip(own, reference, strict=True)]
        fewer = runs[ALL_REDUCE][0].num_bytes / own[0].num_bytes
        is_judged = label == STREAMED
        rows += [
            Row(
                what=f"{label}: validation loss after {own[0].curve[-1][0]} steps",
                value=median(run.loss for run in own),
                unit="nats per byte",
                against=f"{REFERENCE}: {median(run.loss for run in reference):.4f}",
                ratio=median(ratios),
                goal=f"ratio <= {1 + LOSS_GOAL}" if is_judged else "none",
                holds=not is_judged or median(ratios) <= 1 + LOSS_GOAL,
                spread=spread([run.loss for run in own]),
            ),
            Row(
                what=f"{label}: bytes sent by a walker in a step",
                value=own[0].num_bytes / NUM_WALKERS / own[0].curve[-1][0],
                unit="bytes",
                against="fp32 all-reduce over this / this",
                ratio=fewer,
                goal=f"ratio >= {BYTES_GOAL:g}" if is_judged else "none",
                holds=not is_judged or fewer >= BYTES_GOAL,
                spread=spread([float(run.num_bytes) for run in own]),
            ),
        ]
    return tuple(rows)


def chart_of(runs: Mapping[str, Sequence[Trained]]) -> Chart:
    """Validation loss by step, a line for each method, its band over the seeds."""
    lines = banded({label: [run.curve for run in own] for label, own in runs.items()})
    ends = "; ".join(f"{line.label} ends at {line.points[-1][1]:.3f}" for line in lines)
    return Chart(
        title=f"Validation loss, {NUM_WALKERS} walkers, {LOCAL_STEPS} local steps",
        description=f"Loss on text that was held out, of the global parameters. {ends}. Bands: seeds.",
        x_label="step",
        y_label="nats per byte",
        lines=lines,
        y_to=max(max(line.high[1:] or line.high) for line in lines),
    )
