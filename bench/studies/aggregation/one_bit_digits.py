"""1-bit LAMB beside LAMB on handwritten digits: 4 and 16 peers, with and without error feedback.

All see the same samples and begin alike. LAMB takes the mean of the peers' gradients in full precision; 1-bit LAMB does
that for its warm-up, 15 % of the steps, then sends signs. Bytes are those of the tensors that would cross a network:
parts to the owners of their shards, results back to all others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from bench.report import Row, spread
from bench.studies.aggregation.counted import exchanged
from bench.studies.aggregation.digits_mlp import Split, accuracy, batch, gradient, initial, split
from bench.studies.aggregation.measured import Measured, banded
from bench.studies.plot import Chart
from skein.config import aggregation
from skein.config.optimizer import LambSpec
from skein.numeric.aggregate.one_bit.lamb import OneBitLambRule
from skein.numeric.aggregate.rule import Terms
from skein.numeric.walker import Tensors, Walker
from tests.support.exchanges import bytes_of

PEERS = (4, 16)
SEEDS = (0, 1, 2)
NUM_STEPS = 400
POINTS_GOAL = 0.5
WORSE_GOAL = 2.0
_WARM_SHARE = 0.15
_BATCH = 64
_RATE = 0.01
_EVALUATE_EVERY = 20
_OPTIMIZER = LambSpec(name="lamb", betas=(0.9, 0.99), max_ratio=1.0, weight_decay=0.0)

LAMB, ONE_BIT, WITHOUT = "LAMB", "1-bit LAMB", "1-bit LAMB without error feedback"
METHODS = (LAMB, ONE_BIT, WITHOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One run: (steps, accuracy on what is held out) as it went, and the bytes that one peer sent in all."""

    curve: tuple[tuple[int, float], ...]
    num_bytes: float

    @property
    def accuracy(self) -> float:
        """In the end."""
        return self.curve[-1][1]


def measure(*, is_quick: bool) -> Measured:
    """Accuracies beside LAMB's, bytes beside LAMB's over an fp32 all-reduce."""
    seeds, num_steps = (SEEDS[:1], 80) if is_quick else (SEEDS, NUM_STEPS)
    rows: list[Row] = []
    charts = {}
    for num_peers in PEERS:
        runs = {
            method: [train(method, num_peers=num_peers, seed=seed, num_steps=num_steps) for seed in seeds]
            for method in METHODS
        }
        rows += rows_of(runs, num_peers=num_peers, num_steps=num_steps)
        charts[f"one-bit-digits-{num_peers}"] = chart_of(runs, num_peers=num_peers)
    return Measured(rows=tuple(rows), charts=charts)


# --- one run ---


def train(method: str, *, num_peers: int, seed: int, num_steps: int) -> Trained:
    """From the first step to the last."""
    # LAMB is the warm-up that never ends: the two are the same to the last bits, as the tests of the rule say.
    warmup_steps = num_steps if method == LAMB else round(_WARM_SHARE * num_steps)
    spec = aggregation.OneBitLamb(
        rule="one_bit_lamb", warmup_steps=warmup_steps, error_feedback=method != WITHOUT
    )
    rule, data, params = OneBitLambRule(spec=spec, optimizer=_OPTIMIZER), split(seed), initial(seed)
    walkers = [Walker(params=params, state=rule.init(params)).copy() for _ in range(num_peers)]
    curve, num_bytes = [], 0.0
    for step in range(num_steps):
        grads = [_gradient(walker, data, seed, peer, step) for peer, walker in enumerate(walkers)]
        terms = Terms(step=step, learning_rate=_RATE, gradient_scale=1.0)
        due = rule.spec.due(step)
        if due:
            num_bytes += exchanged(rule, walkers, grads, terms, due[0])
        else:
            num_bytes += _reduce(rule, walkers, grads, terms)
        if (step + 1) % _EVALUATE_EVERY == 0:
            curve.append((step + 1, accuracy(walkers[0].params, data.held_out)))
    return Trained(curve=tuple(curve), num_bytes=num_bytes)


def _gradient(walker: Walker, data: Split, seed: int, peer: int, step: int) -> Tensors:
    _, grads = gradient(walker.params, batch(data.trained, size=_BATCH, seed=seed, walker=peer, step=step))
    return grads


def _reduce(rule: OneBitLambRule, walkers: Sequence[Walker], grads: Sequence[Tensors], terms: Terms) -> float:
    """A step of the warm-up; bytes that a peer sends in a ring."""
    mean = {name: torch.stack([grad[name] for grad in grads]).mean(dim=0) for name in grads[0]}
    for walker in walkers:
        rule.local_step(walker, mean, terms, talks=False)
    return 2 * (len(walkers) - 1) / len(walkers) * bytes_of(mean)


# --- what comes of them ---

Runs = Mapping[str, Sequence[Trained]]
"""By method, a run for each seed."""


def rows_of(runs: Runs, *, num_peers: int, num_steps: int) -> list[Row]:
    """Each method's accuracy in percent beside LAMB's, and what 1-bit LAMB sends beside what LAMB does."""
    mean = {method: 100 * fmean(run.accuracy for run in own) for method, own in runs.items()}
    behind = {method: mean[LAMB] - mean[method] for method in METHODS}
    goals = {
        ONE_BIT: f"at most {POINTS_GOAL:g} points behind",
        WITHOUT: f"at least {WORSE_GOAL:g} points behind",
    }
    holds = {LAMB: True, ONE_BIT: behind[ONE_BIT] <= POINTS_GOAL, WITHOUT: behind[WITHOUT] >= WORSE_GOAL}
    rows = [
        Row(
            what=f"digits, {num_peers} peers, {method}: accuracy after {num_steps} steps",
            value=mean[method],
            unit="%",
            against=f"{LAMB}: {mean[LAMB]:.2f} %",
            ratio=mean[method] / mean[LAMB],
            goal=goals.get(method, "none"),
            holds=holds[method],
            spread=spread([run.accuracy for run in own]),
        )
        for method, own in runs.items()
    ]
    fewer = runs[LAMB][0].num_bytes / runs[ONE_BIT][0].num_bytes
    return [
        *rows,
        Row(
            what=f"digits, {num_peers} peers, {ONE_BIT}: bytes sent by a peer in a step, warm-up included",
            value=runs[ONE_BIT][0].num_bytes / num_steps,
            unit="bytes",
            against="fp32 all-reduce over this / this",
            ratio=fewer,
            goal="none",
            holds=True,
            spread=0.0,
        ),
    ]


def chart_of(runs: Runs, *, num_peers: int) -> Chart:
    """Accuracy by step, a line for each method, its band over the seeds."""
    lines = banded(
        {label: [[(k, 100 * share) for k, share in run.curve] for run in own] for label, own in runs.items()}
    )
    ends = "; ".join(f"{line.label} ends at {line.points[-1][1]:.1f} %" for line in lines)
    return Chart(
        title=f"Handwritten digits, {num_peers} peers: accuracy on what was held out",
        description=f"Signs begin after 15 % of the steps. {ends}. Bands: seeds.",
        x_label="step",
        y_label="%",
        lines=lines,
        y_to=100.0,
    )
