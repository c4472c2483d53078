"""Seconds of a step by rule, over links as they are between four cities, among real processes.

Four workers in Australia, Belgium, Canada and Germany train one model of 3.3 million parameters, with a microbatch of
32 tokens each: little work beside what travels, as with a real model on real devices over such links. Rules take turns,
so that what else the machine does falls on all of them; what links that are given up cost is in the seconds. The
workers share the machine's cores: where little travels it is they that a step waits for, so gains are smaller than
they would be with a machine for each.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from bench.report import Row, spread
from bench.studies.aggregation.shaped import job_of, shaped, trained
from client.lab.start import RunningLab
from skein.config.aggregation import AggregationSpec, AllReduce, DiLoCo, Gossip, OneBitLamb
from skein.config.optimizer import AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.model.families.llama import LlamaShape

_PRESET, _NUM_WORKERS = "ten-cities", 4
_TOKENS = 32
_SHAPE = LlamaShape(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
_NUM_RUNS, _QUICK_RUNS = 3, 1
_PLAIN = "all-reduce fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A rule, and how many steps are run before those that are timed, and in all."""

    rule: AggregationSpec
    optimizer: OptimizerSpec
    before: int = 4
    num_steps: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One job: seconds of a step, and how often a link was given up on the way."""

    step_s: float
    num_failures: int


def rows(*, is_quick: bool) -> Iterator[Row]:
    """Tokens per second of each rule beside those of all-reduce."""
    methods = _methods()
    timed: dict[str, list[Timed]] = {name: [] for name in methods}
    with shaped(_PRESET, _NUM_WORKERS) as lab:
        for _ in range(_QUICK_RUNS if is_quick else _NUM_RUNS):
            for name, method in methods.items():
                timed[name].append(_timed(lab, name, method))
    tokens = {name: [_NUM_WORKERS * _TOKENS / run.step_s for run in runs] for name, runs in timed.items()}
    plain = median(tokens[_PLAIN])
    for name, runs in tokens.items():
        step_s, num_failures = median(x.step_s for x in timed[name]), sum(x.num_failures for x in timed[name])
        yield Row(
            what=f"{name}, {_NUM_WORKERS} cities, 3.3 M parameters: tokens in a second",
            value=round(median(runs), 1),
            unit="tokens/s",
            against=f"{_PLAIN}, {plain:.1f}; a step takes {step_s:.2f} s; links given up: {num_failures}",
            ratio=round(median(runs) / plain, 3),
            goal="told only",
            holds=True,
            spread=round(spread(runs), 3),
        )


def _methods() -> Mapping[str, Method]:
    adam = AdamWSpec(warmup_steps=2)
    sgd = SgdSpec(name="sgd", momentum=0.8, learning_rate=1e-3, warmup_steps=2)
    lamb = LambSpec(name="lamb", warmup_steps=2)
    return {
        _PLAIN: Method(rule=AllReduce(), optimizer=adam),
        "1-bit LAMB behind its warm-up": Method(
            rule=OneBitLamb(rule="one_bit_lamb", warmup_steps=10), optimizer=lamb, before=12, num_steps=24
        ),
        "DecentLaM on a ring": Method(rule=Gossip(rule="gossip", graph="ring"), optimizer=sgd),
        # A whole cycle of fifty steps, in which each of the five fragments is exchanged once.
        "DiLoCo int4, H = 50, 5 fragments": Method(
            rule=DiLoCo(rule="diloco", wire="int4", local_steps=50, fragments=5, overlap_steps=5),
            optimizer=adam,
            before=10,
            num_steps=60,
        ),
    }


def _timed(lab: RunningLab, name: str, method: Method) -> Timed:
    """Mean seconds of the timed steps of one job."""
    job = job_of(
        name.lower().replace(" ", "-").replace(",", "").replace("=", ""),
        method.rule,
        method.optimizer,
        num_steps=method.num_steps,
        replicas=_NUM_WORKERS,
        shape=_SHAPE,
        tokens=_TOKENS,
    )
    course = trained(lab, job, may_be_disturbed=True)
    took_s = course.ended_s[-1] - course.ended_s[method.before - 1]
    return Timed(step_s=took_s / (method.num_steps - method.before), num_failures=course.num_plans - 1)
