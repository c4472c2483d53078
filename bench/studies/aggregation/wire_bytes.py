"""What each rule sends, by the bytes that really leave four workers, headers and all; and what `skein plan` says of it.

How bytes are counted says `shaped`. A model of 1.25 million parameters: the smaller it is, the more headers weigh. The
whole run is that of 1-bit LAMB's paper: 1000 of 5993 steps of BERT's first phase are warm-up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bench.report import Row
from bench.studies.aggregation.shaped import job_of, shaped, trained
from client.lab.start import RunningLab
from client.planning.estimates import estimate_of_job
from skein.config.aggregation import AggregationSpec, AllReduce, DiLoCo, Gossip, OneBitAdam, OneBitLamb
from skein.config.job import JobSpec
from skein.config.optimizer import AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.model.families.llama import LlamaShape

_NUM_WORKERS = 4
_PRESET = "two-sites"
_SHAPE = LlamaShape(
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
_WARMUP_STEPS, _NUM_STEPS = 1000, 5993
_ONE_BIT_GOAL, _RUN_GOAL, _DILOCO_GOAL = 30.0, 4.5, 200.0
_WITHIN = 0.05
_PACKETS = 1500 / 1448
"""What IPv4 and TCP with timestamps make of what they carry in full packets: `skein plan` counts tensors alone."""
_FP32, _BF16 = "all-reduce fp32", "all-reduce bf16"
_WARMUP = "warm-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Steps of one kind: those that the longer of two jobs has more. A warm-up of 0 steps means none.

    `goal` is how many times less than an all-reduce in fp32 they are to send, if anything is asked of them.
    """

    name: str
    rule: AggregationSpec
    optimizer: OptimizerSpec
    short: tuple[int, int]
    long: tuple[int, int]
    """Steps in all, and of these in the warm-up."""
    goal: float | None = None

    @property
    def num_steps(self) -> int:
        return self.long[0] - self.short[0]

    def jobs(self) -> tuple[JobSpec, JobSpec]:
        """The shorter and the longer one."""
        return self._job(*self.short), self._job(*self.long)

    def _job(self, num_steps: int, warmup_steps: int) -> JobSpec:
        rule = self.rule
        if isinstance(rule, OneBitAdam | OneBitLamb):
            rule = rule.model_copy(update={"warmup_steps": warmup_steps})
        name = f"{rule.rule}-{num_steps}-{warmup_steps}".replace("_", "-")
        return job_of(name, rule, self.optimizer, num_steps=num_steps, replicas=_NUM_WORKERS, shape=_SHAPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Bytes that a worker sends in a step of a phase: to others, as `skein plan` says and as that is in packets; and
    those that go between it and the coordinator."""

    phase: Phase
    measured: float
    estimated: float
    packed: float
    control: float


def rows(*, is_quick: bool) -> tuple[Row, ...]:
    """Each phase beside fp32 all-reduce, runs with a warm-up beside one in two bytes, and estimates beside all."""
    with shaped(_PRESET, _NUM_WORKERS) as lab:
        sent = {phase.name: _sent(lab, phase) for phase in phases(is_quick=is_quick)}
    return tuple(rows_of(sent))


def rows_of(sent: Mapping[str, Sent]) -> Iterator[Row]:
    """Likewise, of what was measured, by name of the phase."""
    for found in sent.values():
        yield _less(found, sent[_FP32])
    for rule in ("1-bit LAMB", "1-bit Adam"):
        if rule in sent:
            yield _whole_run(rule, sent[f"{rule}, {_WARMUP}"], sent[rule], sent[_BF16])
    for found in sent.values():
        yield _estimated(found)


def phases(*, is_quick: bool) -> tuple[Phase, ...]:
    """What is measured."""
    adam = AdamWSpec(warmup_steps=2)
    one_bit_lamb = OneBitLamb(rule="one_bit_lamb", warmup_steps=10), LambSpec(name="lamb", warmup_steps=2)
    one_bit_adam = OneBitAdam(rule="one_bit_adam", warmup_steps=10), adam
    found = [
        _steady(_FP32, AllReduce(), adam),
        _steady(_BF16, AllReduce(wire="bf16"), adam),
        *_one_bit("1-bit LAMB", *one_bit_lamb),
    ]
    if not is_quick:
        streamed = DiLoCo(rule="diloco", wire="int4", local_steps=50, fragments=5, overlap_steps=1)
        sgd = SgdSpec(name="sgd", momentum=0.8, learning_rate=1e-3, warmup_steps=2)
        found += [
            *_one_bit("1-bit Adam", *one_bit_adam),
            _steady("all-reduce int8", AllReduce(wire="int8"), adam),
            _steady("DecentLaM on a ring", Gossip(rule="gossip", graph="ring"), sgd),
            Phase(
                name="DiLoCo int4, H = 50, 5 fragments",
                rule=streamed,
                optimizer=adam,
                short=(50, 0),
                long=(150, 0),
                goal=_DILOCO_GOAL,
            ),
        ]
    return tuple(found)


def _steady(name: str, rule: AggregationSpec, optimizer: OptimizerSpec) -> Phase:
    """Steps that are all alike."""
    return Phase(name=name, rule=rule, optimizer=optimizer, short=(6, 0), long=(18, 0))


def _one_bit(name: str, rule: OneBitAdam | OneBitLamb, optimizer: OptimizerSpec) -> tuple[Phase, Phase]:
    """Steps of the warm-up, and steps behind it."""
    behind = Phase(
        name=name, rule=rule, optimizer=optimizer, short=(14, 10), long=(38, 10), goal=_ONE_BIT_GOAL
    )
    return replace(behind, name=f"{name}, {_WARMUP}", long=(26, 22), goal=None), behind


def _sent(lab: RunningLab, phase: Phase) -> Sent:
    """Runs both jobs of a phase."""
    jobs = phase.jobs()
    short, long = (trained(lab, job).traffic for job in jobs)
    per = phase.num_steps * _NUM_WORKERS
    estimates = [estimate_of_job(job).step_bytes * job.total_steps * _NUM_WORKERS for job in jobs]
    estimated = (estimates[1] - estimates[0]) / per
    return Sent(
        phase=phase,
        measured=(long.worker_bytes - short.worker_bytes) / per,
        estimated=estimated,
        packed=estimated * (_PACKETS if lab.status.mode == "namespaces" else 1.0),
        control=(long.control_bytes - short.control_bytes) / per,
    )


# --- rows ---


def _less(sent: Sent, fp32: Sent) -> Row:
    times, goal = fp32.measured / sent.measured, sent.phase.goal
    return Row(
        what=f"{sent.phase.name}, {_of()}: bytes that a worker puts on the wire in a step",
        value=round(sent.measured),
        unit="bytes",
        against=f"{_FP32} over this; with the coordinator {sent.control:.0f} more",
        ratio=round(times, 3),
        goal="none" if goal is None else f"ratio >= {goal:g}",
        holds=goal is None or times >= goal,
        spread=0.0,
    )


def _whole_run(rule: str, warmup: Sent, behind: Sent, two_bytes: Sent) -> Row:
    run = _WARMUP_STEPS * warmup.measured + (_NUM_STEPS - _WARMUP_STEPS) * behind.measured
    other = _NUM_STEPS * two_bytes.measured
    return Row(
        what=f"{rule}, {_of()}: bytes in {_NUM_STEPS} steps, {_WARMUP_STEPS} of them warm-up",
        value=round(run),
        unit="bytes",
        against=f"{_BF16} over this",
        ratio=round(other / run, 3),
        goal=f"ratio >= {_RUN_GOAL:g}",
        holds=other / run >= _RUN_GOAL,
        spread=0.0,
    )


def _estimated(sent: Sent) -> Row:
    ratio = sent.measured / sent.packed
    return Row(
        what=f"{sent.phase.name}: bytes on the wire beside the estimate of skein plan",
        value=round(sent.measured),
        unit="bytes",
        against=f"estimate, {sent.estimated:.0f}, in packets {sent.packed:.0f}",
        ratio=round(ratio, 4),
        goal=f"within {_WITHIN:.0%}",
        holds=abs(ratio - 1) <= _WITHIN,
        spread=0.0,
    )


def _of() -> str:
    return f"{_NUM_WORKERS} workers, 1.25 M parameters"
