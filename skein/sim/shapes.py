"""Shapes of small jobs and fleets, by words: `loop 3x2 tied skip 1/3 on 4` is what a failing seed is told with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from skein.config.aggregation import AllReduce
from skein.config.checks import ChecksSpec
from skein.config.data.coreset import CoresetSpec
from skein.config.data.sources import ArraysSource, TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import (
    BatchSpec,
    BudgetSpec,
    CheckpointSpec,
    EvaluationSpec,
    JobSpec,
    ParallelSpec,
    PlanSpec,
    SkipSpec,
)
from skein.config.optimizer import AdamWSpec
from skein.config.quota import QuotaSpec, QuotasSpec
from skein.config.rule import PatternName
from skein.config.sweep.arrays import array_job
from skein.config.sweep.rows import ArrayRow, ArraySpec
from skein.config.sweep.spec import SweepSpec
from skein.errors import UserError
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.families.mixtral import MixtralModel, MixtralShape
from skein.model.families.mlp import MlpModel
from skein.model.rows import VocabularySpec, VocabularySplit
from skein.model.table import ModelSpec
from skein.sim.rules import RULES
from skein.types import Layout

_ROUND_STEPS = 16
"""Local steps of a round of an array."""
_MOST_ROWS = 3
"""Rows of an array of a sweep: even few trials are several arrays."""
_SWEEP_ROUND_STEPS = 24
"""Local steps of a round of a sweep's array: the last round before a rung is shorter."""
_DIVERGING_SEED = 2
"""Seed of a row that diverges (`skein.sim.compute.arrays`): that of the first one, where it is asked for all."""
CHOSEN = CoresetSpec(method="craig", fraction=0.25, refresh_epochs=1, beside=False, max_overhead=1e6)
"""Rows of a job that chooses them; however long that takes, it does so every few steps: an array's rounds end there."""
_CHOOSING: Mapping[str, Mapping[str, object]] = {
    "chosen": {},
    "beside": {"beside": True, "refresh_epochs": 2},
    "local": {"distributed": "local"},
    "ungrouped": {"group_by": "source"},
    "shared": {"share": "first_alive"},
}
"""Words of a job that chooses rows, and what each changes of `CHOSEN`; the first is said alone too."""
_HINT = (
    "as in `loop 3x2 tied skip 1/3 on 4`: layout, stages x replicas, and what else; ` + ` before another job"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimShape:
    """A job of `replicas` x `stages` on `num_workers`; two microbatches for each replica."""

    text: str
    layout: Layout
    stages: int
    replicas: int
    num_workers: int
    is_tied: bool
    skip_ratio: float
    pattern: PatternName = "auto"
    num_slow: int = 0
    """The last of the workers: too slow for a microbatch, so they hold stages silently."""
    chunks: int = 1
    """Stages for each worker."""
    rows: VocabularySplit = VocabularySplit.OFF
    """Ends of the model whose vocabulary is cut into shards."""
    checked: float = 0.0
    """Share of the steps that are computed again without one worker."""
    is_split: bool = False
    """Whether backwards are split where they can be."""
    is_in_v: bool = False
    """Whether a worker's chunks are laid there and back; otherwise they lie beside each other."""
    is_sparse: bool = False
    """Whether its blocks have experts."""
    coreset: CoresetSpec | None = None
    """Part of its rows that it trains a classifier on, chosen along the run; None: it is a language model."""
    num_walled: int = 0
    """The first of the workers, whom nobody can dial: the coordinator relays, and so do the other workers."""
    num_meshes: int = 0
    """The first of the workers, which are meshes of `num_devices`."""
    num_devices: int = 2
    quota_workers: int | None = None
    """Workers that all jobs have together at most; None: as many as there are."""
    quota_running: int | None = None
    """Jobs that have workers at once, at most."""
    num_rows: int = 0
    """Rows of an array that the job is; 0: it is none."""
    rewinds: bool = False
    """Whether rows that diverge go on once from where their round began."""
    num_trials: int = 0
    """Trials of a sweep that the job is; 0: it is none."""
    num_rungs: int = 0
    """Rungs after each of which every second trial goes on; 0: all are trained to their end, and none diverges."""
    is_evaluated: bool = False
    """Whether trials are compared by their evaluations, and not by their losses."""
    rule: str = ""
    """A word of `RULES`; none: plain sums along `pattern`, and AdamW."""
    priority: int = 0
    after_s: float = 0.0
    """Time at which the job is submitted."""
    others: tuple["SimShape", ...] = ()
    """Shapes of the jobs that are submitted with it, to the same workers."""

    @property
    def quotas(self) -> QuotasSpec:
        """Quotas of the namespace that all its jobs are in."""
        bounds = QuotaSpec(workers=self.quota_workers, running_jobs=self.quota_running)
        return QuotasSpec(default=bounds)

    @property
    def each(self) -> tuple["SimShape", ...]:
        """The shape of every job, as if it were alone."""
        first = self.text.split(" + ")[0]
        return (replace(self, text=first, others=()), *self.others)

    def job(self, *, steps: int, every: int = 3) -> JobSpec:
        """A language model of two blocks per stage, evaluated and saved every so many steps; 0: never."""
        blocks: dict[str, object] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2 * self.stages * self.chunks,
            "tie_word_embeddings": self.is_tied,
        }
        if self.num_meshes:
            # So that four devices share blocks, and three that are left of them cannot.
            blocks["num_key_value_heads"] = 4
        model: ModelSpec = LlamaModel(shape=LlamaShape.model_validate(blocks))
        if self.is_sparse:
            model = MixtralModel(shape=MixtralShape.model_validate(blocks))
        plain = AllReduce(pattern=self.pattern), AdamWSpec()
        data = DataSpec(sources=(TextSource(path="/simulated"),), sequence_tokens=64)
        if self.coreset is not None:
            num_hidden = 2 * self.stages * self.chunks - 1
            model = MlpModel(family="mlp", widths=(64,) * num_hidden, num_features=64, num_classes=3)
            source = ArraysSource(format="arrays", path="/simulated.npz")
            data = DataSpec(sources=(source,), coreset=self.coreset)
        aggregation, optimizer = RULES[self.rule] if self.rule else plain
        job = JobSpec(
            name="sim",
            model=model,
            data=data,
            batch=BatchSpec(samples=4 * self.replicas, microbatch_samples=2),
            parallel=ParallelSpec(
                stages=self.stages,
                replicas=self.replicas,
                layout=self.layout,
                chunks=self.chunks,
                vocabulary=VocabularySpec(split=self.rows),
            ),
            skip=SkipSpec(ratio=self.skip_ratio),
            plan=PlanSpec(method="balanced", backward="split") if self.is_split else PlanSpec(),
            aggregation=aggregation,
            optimizer=optimizer,
            checks=ChecksSpec(fraction=self.checked),
            budget=BudgetSpec(steps=steps),
            evaluation=EvaluationSpec(every_steps=every, samples=4),
            checkpoint=CheckpointSpec(every_steps=every, keep=2),
            priority=self.priority,
        )
        if self.num_trials:
            return self._sweep(job, steps=steps)
        return self._array(job, steps=steps) if self.num_rows else job

    def _sweep(self, trial: JobSpec, *, steps: int) -> JobSpec:
        """A sweep whose trials make as many local steps as an array of so many rounds."""
        asked = SweepSpec(
            search="hyperband" if self.num_rungs else "grid",
            # Of even seeds some diverge, which a trial that is no row does not.
            trials=tuple({"seed": at if self.num_rungs else 2 * at + 1} for at in range(self.num_trials)),
            metric="evaluation_loss" if self.is_evaluated else "loss",
            eta=2,
            least_steps=steps * _ROUND_STEPS // 2**self.num_rungs,
            per_array=_MOST_ROWS,
            round_steps=_SWEEP_ROUND_STEPS,
        )
        changed = {
            "sweep": asked,
            "budget": BudgetSpec(steps=steps * _ROUND_STEPS),
            "on_divergence": "rewind" if self.rewinds else "ignore",
            "evaluation": trial.evaluation if self.is_evaluated else EvaluationSpec(every_steps=0),
        }
        return trial.model_copy(update=changed)

    @property
    def has_one_choice(self) -> bool:
        """Whether all trials of an array draw by the choice of the first that is left, rather than each by its own."""
        return self.coreset is not None and self.coreset.share == "first_alive"

    def _array(self, trial: JobSpec, *, steps: int) -> JobSpec:
        """An array of trials, of so many rounds; the last is shorter than the others."""
        last_step = steps * _ROUND_STEPS - 1
        first = _DIVERGING_SEED if self.has_one_choice else 0
        array = ArraySpec(
            rows=tuple(
                ArrayRow(trial=row, optimizer=trial.optimizer, seed=first + row)
                for row in range(self.num_rows)
            ),
            last_step=last_step,
            schedule_steps=last_step,
            on_divergence="rewind" if self.rewinds else "retire",
        )
        return array_job(trial, array, round_steps=_ROUND_STEPS)


def _choosing(word: str, shape: SimShape) -> SimShape:
    return replace(shape, coreset=(shape.coreset or CHOSEN).model_copy(update=_CHOOSING[word]))


def _by_rule(shape: SimShape, rule: str) -> SimShape:
    if rule not in RULES:
        raise UserError("shape", rule, f"rules are {', '.join(RULES)}")
    return replace(shape, rule=rule)


_PLAIN: Mapping[str, Callable[[SimShape], SimShape]] = {
    "tied": lambda shape: replace(shape, is_tied=True),
    "direct": lambda shape: replace(shape, pattern="direct"),
    "ring": lambda shape: replace(shape, pattern="ring"),
    "tree": lambda shape: replace(shape, pattern="tree"),
    "split": lambda shape: replace(shape, is_split=True),
    "v": lambda shape: replace(shape, is_in_v=True),
    "sparse": lambda shape: replace(shape, is_sparse=True),
    "evaluated": lambda shape: replace(shape, is_evaluated=True),
    "rewinds": lambda shape: replace(shape, rewinds=True),
    **{word: partial(_choosing, word) for word in _CHOOSING},
}
"""Change that each word makes by itself."""
_GIVEN: Mapping[str, Callable[[SimShape, str], SimShape]] = {
    "skip": lambda shape, ratio: replace(shape, skip_ratio=float(Fraction(ratio))),
    "by": _by_rule,
    "on": lambda shape, number: replace(shape, num_workers=int(number)),
    "priority": lambda shape, number: replace(shape, priority=int(number)),
    "after": lambda shape, seconds: replace(shape, after_s=float(seconds)),
    "array": lambda shape, number: replace(shape, num_rows=int(number)),
    "sweep": lambda shape, number: replace(shape, num_trials=int(number)),
    "rungs": lambda shape, number: replace(shape, num_rungs=int(number)),
    "slow": lambda shape, number: replace(shape, num_slow=int(number)),
    "rows": lambda shape, ends: replace(shape, rows=VocabularySplit(ends)),
    "chunks": lambda shape, number: replace(shape, chunks=int(number)),
    "meshes": lambda shape, number: replace(shape, num_meshes=int(number)),
    "devices": lambda shape, number: replace(shape, num_devices=int(number)),
    "walled": lambda shape, number: replace(shape, num_walled=int(number)),
    "quota": lambda shape, number: replace(shape, quota_workers=int(number)),
    "running": lambda shape, number: replace(shape, quota_running=int(number)),
    "checked": lambda shape, share: replace(shape, checked=float(share)),
}
"""Change that each word makes with the one that comes after it."""


def shape_of(text: str) -> SimShape:
    """Shape that the words describe.

    Raises:
        UserError: they say nothing known.

    >>> shape = shape_of("loop 3x2 tied skip 1/3 on 4")
    >>> shape.stages, shape.replicas, shape.num_workers, shape.is_tied, round(shape.skip_ratio, 2)
    (3, 2, 4, True, 0.33)
    >>> shape_of("line 2x2").num_workers
    4
    >>> [part.text for part in shape_of("line 2x2 on 8 + loop 2x2").each]
    ['line 2x2 on 8', 'loop 2x2']
    >>> [(part.priority, part.after_s) for part in shape_of("line 2x2 + line 2x2 priority 1 after 3.5").each]
    [(0, 0.0), (1, 3.5)]
    >>> shape_of("line 2x2 on 6 walled 4 quota 5").quotas.of("lab").workers
    5
    """
    first, *more = text.split(" + ")
    return replace(_one(first), text=text, others=tuple(_one(other) for other in more))


def _one(text: str) -> SimShape:
    """Shape of one job, by its words."""
    words = text.split()
    try:
        layout = Layout(words.pop(0))
        stages, replicas = (int(number) for number in words.pop(0).split("x"))
        shape = SimShape(
            text=text,
            layout=layout,
            stages=stages,
            replicas=replicas,
            num_workers=stages * replicas,
            is_tied=False,
            skip_ratio=0.0,
        )
        while words:
            word = words.pop(0)
            shape = _GIVEN[word](shape, words.pop(0)) if word in _GIVEN else _PLAIN[word](shape)
    except UserError:
        raise  # of a word that says more of what would be right
    except (KeyError, ValueError, IndexError) as error:
        raise UserError("shape", text, _HINT) from error
    return shape


SEVERAL = tuple(
    shape_of(text)
    for text in (
        "line 2x2 on 8 + loop 2x2 + line 1x3",
        "line 3x2 tied on 8 + line 2x2 + loop 2x1",
        "loop 3x2 skip 1/3 on 8 + line 2x3 ring + line 4x1",
        "line 2x2 on 5 + line 2x2 + line 2x2",
    )
)
"""Shapes of several jobs beside each other."""

GUARDED = tuple(
    shape_of(text)
    for text in (
        "line 2x2 on 8 quota 5 + loop 2x2 + line 1x3",
        "line 2x2 on 8 running 1 + line 2x2 + loop 2x1",
        "line 3x2 tied on 6 walled 5",
        "line 2x2 on 8 walled 6 quota 6 + loop 2x2 + line 2x1",
        "line 2x3 ring on 6 walled 6",
    )
)
"""Shapes of jobs below quotas, and on workers that nobody can dial."""

ARRAYS = tuple(
    shape_of(text)
    for text in (
        "line 1x1 array 4 on 3",
        "line 1x1 array 4 rewinds on 3",
        "line 1x1 tied array 8 on 4",
        "line 1x1 array 1 on 3",
        "line 1x1 array 4 on 4 + line 1x1 array 3 rewinds + line 1x1 array 4",
        "line 2x2 on 5 + line 1x1 array 4",
        "line 1x1 array 4 chosen on 3",
        "line 1x1 array 4 chosen rewinds on 3",
        "line 1x1 array 4 chosen shared on 3",
        "line 1x1 array 3 chosen shared rewinds on 3 + line 1x3 chosen",
    )
)
"""Shapes of arrays of trials, alone and beside other jobs."""

SWEEPS = tuple(
    shape_of(text)
    for text in (
        "line 1x1 sweep 8 rungs 2 on 3",
        "line 1x1 sweep 7 on 3",
        "line 1x1 sweep 8 rungs 2 chosen on 3",
        "line 1x1 sweep 12 rungs 3 rewinds on 4",
        "line 1x1 sweep 6 rungs 1 rewinds evaluated on 2",
        "line 1x1 sweep 8 rungs 3 rewinds on 4 + line 1x1 sweep 5 + line 1x1 array 3",
        "line 2x2 on 5 + line 1x1 sweep 8 rungs 2",
    )
)
"""Shapes of sweeps, alone and beside other jobs: trials of the first one of `rungs` are ended after some rounds."""

MESHES = tuple(
    shape_of(text)
    for text in (
        "line 2x2 meshes 4",
        "line 2x2 on 5 meshes 3 devices 4",
        "loop 3x2 tied meshes 4 devices 3",
        "line 1x3 meshes 2 devices 4",
        "line 4x1 meshes 4",
        "line 2x2 chunks 2 split meshes 3 devices 4",
        "line 3x2 rows output split meshes 4",
        "line 2x2 sparse meshes 2",
        "line 2x3 ring meshes 4 devices 4",
        "line 2x2 on 8 meshes 5 devices 4 + loop 2x2 meshes 4 devices 4 + line 2x2",
    )
)
"""Shapes of jobs on meshes beside single devices."""

SHAPES = tuple(
    shape_of(text)
    for text in (
        "line 2x2",
        "line 3x2",
        "loop 2x2",
        "loop 3x2 tied",
        "line 3x2 tied",
        "line 3x2 on 3",
        "line 1x3",
        "line 4x1",
        "line 3x3 on 12",
        "line 4x2 skip 1/4",
        "loop 4x2 tied skip 1/2",
        "loop 3x2 skip 1/3 on 4",
        "line 2x3 ring",
        "loop 2x3 tied ring on 5",
        "line 2x4 tree",
        "line 2x3 tied tree",
        "line 2x2 on 3 slow 2",
        "loop 3x2 tied slow 2",
        "line 4x2 split",
        "loop 3x2 tied skip 1/3 split on 4",
        "line 2x2 chunks 2 split",
        "line 3x2 rows output split",
        "line 2x2 tied rows both",
        SEVERAL[0].text,
        "loop 3x2 tied skip 1/3 split sparse",
        "line 1x3 chosen on 5",
        "loop 2x2 chosen beside local",
        "line 2x2 chosen beside ungrouped on 5",
    )
)
"""Shapes that seeds walk over."""

PIPELINES = tuple(
    shape_of(text)
    for text in (
        "line 4x2 split",
        "line 2x2 chunks 2",
        "loop 3x2 chunks 2 split",
        "line 2x2 chunks 2 split v",
        "line 3x2 chunks 2 tied split v on 5",
        "line 1x3 chunks 4 split",
        "line 2x3 chunks 2 split ring v",
        "line 3x2 rows output split",
        "line 2x2 tied rows both",
        "line 2x2 chunks 2 tied rows both split",
        "line 3x2 chunks 2 rows output split v",
        "loop 3x2 tied skip 1/3 split on 4",
        "line 2x3 tied tree",
        "line 3x2 tied split slow 2",
        "line 2x2 chunks 2 split v on 8 + line 3x2 rows output split",
        MESHES[5].text,
    )
)
"""Shapes of chunks, split backwards, shards of a vocabulary and tied ends, together and by themselves."""
