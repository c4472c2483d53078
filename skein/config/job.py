"""The job specification: what a user submits, as frozen values with defaults one would defend.

Everything is in SI base units inside; sizes and durations may be written with units in YAML.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from skein.config.aggregation import AggregationSpec, AllReduce
from skein.config.checks import ChecksSpec
from skein.config.data.sources import DigitsSource
from skein.config.data.spec import BYTES, FIRST_RULES, DataSpec
from skein.config.explain import Words
from skein.config.mesh.tensor import TensorSpec
from skein.config.optimizer import AdamWSpec, LambSpec, OptimizerSpec
from skein.config.resources import ResourcesSpec
from skein.config.sweep.rows import ArrayRow, ArraySpec
from skein.config.sweep.spec import SweepSpec
from skein.errors import LocalError, UserError
from skein.model.layers import LayerSpec, layers_of
from skein.model.rows import VocabularySpec, VocabularySplit
from skein.model.table import ModelSpec
from skein.spec import Spec
from skein.types import MOST_STEPS, Layout, Precision

Name = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="1 to 63 lower-case letters, digits and inner hyphens",
    ),
]


MOST_MICROBATCH_SAMPLES = 65_536


class BatchSpec(Spec):
    """Samples per step over all workers, and per microbatch."""

    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    microbatch_samples: Annotated[int, Field(ge=1, le=MOST_MICROBATCH_SAMPLES)] = 4

    @model_validator(mode="after")
    def _check(self) -> "BatchSpec":
        if self.samples % self.microbatch_samples:
            hint = f"give a multiple of microbatch_samples ({self.microbatch_samples})"
            raise UserError("samples", self.samples, hint)
        return self

    @property
    def num_microbatches(self) -> int:
        return self.samples // self.microbatch_samples


AUTO_CHUNKS = (1, 2, 4)
"""Numbers of chunks that `auto` chooses among."""


class ParallelSpec(Spec):
    """Stages that the model is cut into, replicas that hold it, and the layout of paths."""

    stages: Annotated[int, Field(ge=1, le=512)] = 2
    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    layout: Layout = Layout.LINE
    chunks: Annotated[int, Field(ge=1, le=8)] | Literal["auto"] = 1
    """Chunks of each worker: the model is cut into so many times `stages`, for as many workers. Raise this if workers
    idle while a step begins and ends, and links between them are fast: more tensors travel. `auto`: 1, 2 or 4,
    whatever a first plan is shortest with."""
    vocabulary: VocabularySpec = VocabularySpec()
    tensor: TensorSpec = TensorSpec()

    @property
    def num_stages(self) -> int:
        """Stages that the model is cut into at least, without the head of `LOOP`; plans may have more under `auto`."""
        return self.stages * (1 if self.chunks == "auto" else self.chunks) + self.num_shards

    @property
    def num_shards(self) -> int:
        """Stages that are shards of the vocabulary."""
        return self.stages * self.vocabulary.num_ends

    @property
    def shares(self) -> tuple[int, int, int]:
        """Numbers of stages that the input's rows, the layers between, and the output's rows are cut into."""
        num_ends = self.vocabulary.num_ends
        num_outputs = self.stages * (num_ends > 0)
        return self.num_shards - num_outputs, self.num_stages - self.num_shards, num_outputs

    @property
    def runs(self) -> tuple[range, range, range]:
        """Stages that are the input's rows, the layers between, and the output's rows."""
        num_inputs, num_between, num_outputs = self.shares
        outputs = range(num_inputs + num_between, num_inputs + num_between + num_outputs)
        return range(num_inputs), range(num_inputs, outputs.start), outputs

    def may_have(self, num_stages: int) -> bool:
        """Whether a plan may have so many stages, without the head of `LOOP`."""
        every_chunks = AUTO_CHUNKS if self.chunks == "auto" else (self.chunks,)
        is_open = self.vocabulary.split is VocabularySplit.AUTO
        every_shards = range(0, 2 * self.stages + 1, self.stages) if is_open else (self.num_shards,)
        return num_stages in [
            self.stages * chunks + shards for chunks in every_chunks for shards in every_shards
        ]

    @property
    def is_cut(self) -> bool:
        """Whether a microbatch goes through more than one stage, that of the head alone included."""
        return self.num_stages + self.layout.num_head_stages > 1


class BudgetSpec(Spec):
    """Limits of the job: it is done with the first of those that are given. One must be, and not only `hours`."""

    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    tokens: Annotated[int, Field(ge=1, le=10**18)] | None = None
    """To train on, to whole steps of `batch.samples` times `data.sequence_tokens`; a digit counts as one."""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Times that all samples to train on are seen, to whole steps; counted when workers first open the data."""
    hours: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Hours of work, counted from step to step: what is paused, planned, recovered and evaluated in between is not."""

    @model_validator(mode="after")
    def _check(self) -> "BudgetSpec":
        if self.steps is None and self.tokens is None and self.epochs is None:
            raise UserError(
                "steps", Words("none"), "give steps, tokens or epochs, with hours beside them if wanted"
            )
        return self

    @property
    def is_open(self) -> bool:
        """Whether only the data can tell how many steps it is at most."""
        return self.steps is None and self.tokens is None

    def steps_of_epochs(self, num_samples: int, batch_samples: int) -> int | None:
        """Steps of `batch_samples` that its epochs are on data of so many samples; None without epochs.

        >>> BudgetSpec(epochs=1.5).steps_of_epochs(100, 8), BudgetSpec(steps=5).steps_of_epochs(100, 8)
        (19, None)
        """
        if self.epochs is None:
            return None
        # Of 0.1 times 30 nothing is left over, whatever floats say.
        num_steps = math.ceil(round(self.epochs * num_samples / batch_samples, 6))
        return min(MOST_STEPS, max(1, num_steps))


class EvaluationSpec(Spec):
    """Loss on validation data, every so many steps; 0: only after the last step.

    Of the samples whole microbatches count; of a sweep's trials, which are compared, all do.
    """

    every_steps: Annotated[int, Field(ge=0)] = 100
    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 64


class CheckpointSpec(Spec):
    """Period in steps at which resumable state is written, and its place; 0: only after the last step.

    With no `url` the workers upload to the coordinator. A URL must reach the same place from all workers.
    """

    every_steps: Annotated[int, Field(ge=0)] = 100
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    url: str | None = None


class BackupSpec(Spec):
    """Copies of every stage in the memory of workers elsewhere, for when all holders of a stage die at once."""

    every_steps: Annotated[int, Field(ge=0)] = 20
    """Steps that are lost at most, if links allow it. 0: no copies, back to the newest checkpoint."""
    link_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of a link's time that copies may take. Where too little, copies are made less often, and it is said."""
    neighbour_average: bool = False
    """Make a lost inner stage of the average of its neighbours, where no copy of it is as new, rather than go back. No
    step is lost then, but the stage is another, and its optimizer begins anew: this is not exact."""


class SkipSpec(Spec):
    """Limits to how far each microbatch may leave the straight way through all stages. By default not at all."""

    ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the stages that each microbatch leaves out, to whole stages. Raise it if slow links rule the step."""
    max_swaps: Annotated[int, Field(ge=0, le=16)] = 0
    """Most times that a microbatch may visit a stage just after the one that follows it."""
    max_jump: Annotated[int, Field(ge=1, le=512)] | None = None
    """Most stages that a microbatch may go on above its highest so far; null: as far as it likes."""


class PlanSpec(Spec):
    """Settings of planning: how plans are made, and when another is wanted."""

    method: Literal["search", "balanced", "full"] = "search"
    """`search` looks for the shortest step; `balanced` settles each question once; `full` ignores `skip`."""
    budget_s: Annotated[float, Field(ge=0, le=600)] = 5.0
    """Seconds that a search may take, `auto` included. Raise it for fleets of hundreds of workers."""
    replan_if_off_by: Annotated[float, Field(gt=0, le=1_000_000)] = 0.15
    """Plan anew when measured times are off by this share of the planned; a million: never. Raise it if speeds vary."""
    backward: Literal["auto", "whole", "split"] = "whole"
    """`split`: weight gradients wait until nothing else is to do; `auto`: if a first plan is shorter with that.

    Try it where workers idle in a step: what waits takes their time then, and no more memory than activations do.
    """

    @property
    def splits(self) -> bool:
        """Whether backwards are split."""
        return self.backward == "split"


class JobSpec(Spec):
    """All that defines a job. Equal specs have equal `content_hash`."""

    version: Literal[1] = 1
    name: Name
    model: ModelSpec
    data: DataSpec
    batch: BatchSpec = BatchSpec()
    parallel: ParallelSpec = ParallelSpec()
    skip: SkipSpec = SkipSpec()
    plan: PlanSpec = PlanSpec()
    optimizer: OptimizerSpec = AdamWSpec()
    aggregation: AggregationSpec = AllReduce()
    """Rule by which the replicas of a stage agree: see docs/aggregation.md."""
    precision: Precision = Precision.FP32
    budget: BudgetSpec
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    recovery: Literal["exact", "best_effort"] = "exact"
    """`exact` computes again whatever a death has taken; `best_effort` goes on without it, and says what it was."""
    backup: BackupSpec = BackupSpec()
    on_divergence: Literal["stop", "rewind", "ignore"] = "stop"
    """Remedy if losses are not finite, or far above what was learned: `stop` fails and keeps the last good checkpoint;
    `rewind` goes back to it, up to three times, with half the learning rate each time; `ignore` goes on."""
    checks: ChecksSpec = ChecksSpec()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Jobs with a higher one get workers first, and may have others saved and set aside."""
    resources: ResourcesSpec = ResourcesSpec()
    sweep: SweepSpec | None = None
    """Trials to make of the job, side by side on all workers that hold a whole model: see docs/sweeps.md."""

    @model_validator(mode="after")
    def _check(self) -> "JobSpec":
        self._check_coreset()
        if self.skip.ratio:
            self._check_skip_ratio()
        self._check_chunks()
        self._check_vocabulary()
        self.check_sizes()
        if self.plan.splits:
            self._check_split()
        if self.budget.hours is not None and self.aggregation.walkers.are_lines:
            hint = (
                f"walkers of {self.aggregation.rule} meet in the last step, which must be known: leave it out"
            )
            raise UserError("budget.hours", self.budget.hours, hint)
        most, num_visited = self.skip.max_jump, self.num_visited_stages
        least = -(-(self.parallel.num_stages - 1) // max(1, num_visited - 1))
        if most is not None and most < least:
            visited = f"{num_visited} of {self.parallel.num_stages} stages"
            hint = f"with {visited} the last is not reached: give at least {least}"
            raise UserError("skip.max_jump", most, hint)
        self.aggregation.check(self)
        if self.checks.fraction and not self.aggregation.is_additive:
            hint = f"{self.aggregation.rule} does not end each step with a plain sum that others could repeat: give 0"
            raise UserError("checks.fraction", self.checks.fraction, hint)
        return self

    def _check_coreset(self) -> None:
        coreset = self.data.coreset
        if coreset.chooses and self.model.labelled is None:
            hint = f"nothing is measured of it for language models such as {self.model.family}: give none"
            raise UserError("data.coreset.method", coreset.method, hint)
        if coreset.follows_model and self.aggregation.walkers.are_lines:
            hint = (
                f"walkers of {self.aggregation.rule} have models of their own to compare rows by: give inputs"
            )
            raise UserError("data.coreset.feature", coreset.feature, hint)

    def _check_chunks(self) -> None:
        chunks = self.parallel.chunks
        if chunks == "auto":
            return
        if chunks > 1 and self.skip.ratio:
            hint = f"with skip.ratio {self.skip.ratio:g} microbatches leave out stages, not parts of them: give 1"
            raise UserError("parallel.chunks", chunks, hint)
        if chunks > 1 and self.aggregation.walkers.are_lines:
            hint = (
                f"with {self.aggregation.rule} a walker holds each stage once, on workers of its own: give 1"
            )
            raise UserError("parallel.chunks", chunks, hint)

    def _check_vocabulary(self) -> None:
        split, hint = self.parallel.vocabulary.split, None
        if not self.model.has_vocabulary:
            hint = f"models of family {self.model.family} have no vocabulary: give off"
        elif self.parallel.layout.comes_back:
            hint = "in layout loop labels stay where samples are read, and every shard needs them: give off, or line"
        elif self.skip.ratio or self.skip.max_swaps:
            hint = "shards of the vocabulary cannot be left out or change places: give off, or no skip"
        elif self.aggregation.walkers.are_lines:
            hint = f"with {self.aggregation.rule} a walker holds each stage once, on workers of its own: give off"
        elif isinstance(self.optimizer, LambSpec):
            hint = f"{self.optimizer.name} goes by the norm of whole tensors, which nobody holds: give off"
        if split is VocabularySplit.AUTO:
            # A planner cuts what can be cut, and chooses among the blocks of both ends.
            split = VocabularySplit.BOTH if hint is None else VocabularySplit.OFF
        object.__setattr__(self, "model", self.model.with_rows(split))
        if hint is not None and split is not VocabularySplit.OFF:
            raise UserError("parallel.vocabulary.split", split.value, hint)

    def _check_skip_ratio(self) -> None:
        stages, num_fixed, ratio = self.parallel.num_stages, self.num_fixed_stages, self.skip.ratio
        kept = "the first stage" if num_fixed == 1 else "the first and the last stage"
        if stages <= num_fixed:
            raise UserError(
                "skip.ratio", ratio, f"{kept} cannot be left out: give 0, or raise parallel.stages"
            )
        if round(stages * (1 - ratio)) <= num_fixed:
            hint = f"{kept} cannot be left out, and some stage besides must be used: give at most "
            raise UserError("skip.ratio", ratio, f"{hint}{1 - (num_fixed + 1) / stages:.2g}")
        num_visits = self.batch.num_microbatches * (self.num_visited_stages - num_fixed)
        if num_visits < stages - num_fixed:
            hint = f"so few microbatches ({self.batch.num_microbatches} in a step) leave some stages unused: give less"
            raise UserError("skip.ratio", ratio, hint)

    def check_sizes(self) -> None:
        """Refuses a microbatch, or devices that share a layer, that the model's sizes do not go with, if it says them.

        Raises:
            UserError: they do not.
        """
        self.model.check_microbatch(self.batch.microbatch_samples, self.data.sequence_tokens)
        self.parallel.tensor.check(self.model, self.batch.microbatch_samples)

    def _check_split(self) -> None:
        backward = self.plan.backward
        if not self.model.has_split_backward:
            hint = f"models of family {self.model.family} have whole backwards only: give whole"
            raise UserError("plan.backward", backward, hint)

    @property
    def total_steps(self) -> int:
        """Steps after which the budget is spent, if its hours last and its epochs are not fewer."""
        by_tokens = MOST_STEPS
        if self.budget.tokens is not None:
            step_tokens = self.batch.num_microbatches * self.microbatch_tokens
            by_tokens = min(by_tokens, -(-self.budget.tokens // step_tokens))
        return min(by_tokens, self.budget.steps or MOST_STEPS)

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch; a digit counts as one."""
        return self.batch.microbatch_samples * self.model.sample_tokens(self.data.sequence_tokens)

    @property
    def num_fixed_stages(self) -> int:
        """Stages that no microbatch leaves out: the first and, in `LINE`, the last."""
        return min(self.parallel.num_stages, self.parallel.layout.num_ends)

    @property
    def num_visited_stages(self) -> int:
        """Stages that each microbatch visits, without the head stage of `LOOP`."""
        if self.plan.method == "full":
            return self.parallel.num_stages
        return max(self.num_fixed_stages, round(self.parallel.num_stages * (1 - self.skip.ratio)))

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layer list of the model at this sample length and precision.

        Raises:
            UserError: see `skein.model.layers.layers_of`.
        """
        return layers_of(self.model, sequence_tokens=self.data.sequence_tokens, precision=self.precision)

    @property
    def word_bytes(self) -> int:
        """Bytes of one number in parameters and in what is reduced."""
        return self.precision.word_bytes

    @property
    def step_batch(self) -> BatchSpec:
        """Samples of one update of the parameters."""
        return self.batch

    @property
    def rows(self) -> tuple[ArrayRow, ...]:
        """Trials that train side by side in it, where it is an array inside a sweep."""
        return ()

    def paths(self) -> Iterator[tuple[str, str]]:
        """Field and path of everything that workers read for this job."""
        for field, source in self.data.named_sources:
            if not isinstance(source, DigitsSource):
                yield f"{field}.path", source.path
        if self.data.tokenizer != BYTES:
            yield "data.tokenizer", self.data.tokenizer
        if self.model.begins_from is not None:
            yield "model.init_from", self.model.begins_from

    def canonical_json(self) -> str:
        """The one JSON text of this job: every field, sorted keys, no spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def content_hash(self) -> str:
        """Hex SHA-256 of `canonical_json`."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()


class ArrayJob(JobSpec):
    """An array inside a sweep, as the run log has it: no job file and no client can ask for one.

    Its steps are rounds: a microbatch stands for an op of `array.op_steps` local steps, and has as many samples as a
    step of one row.
    """

    array: ArraySpec

    @property
    def rows(self) -> tuple[ArrayRow, ...]:
        return self.array.rows

    @property
    def step_batch(self) -> BatchSpec:
        samples = self.batch.microbatch_samples
        return BatchSpec(samples=samples, microbatch_samples=samples)

    @property
    def round_steps(self) -> int:
        """Steps of each row in a round."""
        return self.batch.num_microbatches * self.array.op_steps


@lru_cache(maxsize=256)
def read_spec(text: str) -> JobSpec:
    """The job whose canonical JSON is in a record, a directive or a manifest, read once however often it is asked for.

    Raises:
        LocalError: this release does not know such a job.
    """
    found = json.loads(text)
    kind = ArrayJob if "array" in found else JobSpec
    data = found.get("data")
    if isinstance(data, dict) and "rules" not in data:
        # It was submitted before the rules had a version: it goes on reading what it has read so far.
        text = json.dumps({**found, "data": {**data, "rules": FIRST_RULES}})
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise LocalError(f"the job's specification is not one this release knows: {error}") from error


def with_steps(job: JobSpec, steps: int) -> JobSpec:
    """`job` with a number of steps as its only budget.

    Raises:
        UserError: there cannot be so many, or the job does not agree with them.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise UserError("budget.steps", steps, f"give a whole number from 1 to {MOST_STEPS}")
    longer = job.model_copy(update={"budget": BudgetSpec(steps=steps)})
    longer.aggregation.check(longer)
    return longer
