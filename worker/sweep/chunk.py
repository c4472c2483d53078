"""Array as a chunk: rows, and a copy of them that the local steps of a round work on until a record makes it the rows.

Rules of this file
- An op is some local steps of every row that makes steps; what a step computes depends on a row's state alone.
- A row that diverges is put back to where its round began: it is retired there, or goes on from there at half its rate.
- Rows that make no more steps leave the copy when a round is over, so that nothing is computed for them.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Self

import torch
from torch import Tensor

from skein.config.job import ArrayJob
from skein.config.rule import Walkers
from skein.errors import LocalError
from skein.numeric.aggregate.rules import rule_of
from skein.numeric.optim.optimizers import optimizer_of
from skein.numeric.rows import RowBuffer
from skein.numeric.sums import exact_sum
from skein.numeric.walker import Walker
from skein.protocol.log.records import walker_prefix
from skein.protocol.messages.array_rounds import (
    PARAMETERS_NOT_FINITE,
    REASONS,
    ArrayRound,
    PassKind,
    RowNumbers,
    RowScore,
)
from skein.protocol.messages.directives import StepRecord
from skein.protocol.worker.ops import Loss, LossInputOp, LossOp
from skein.types import GroupId, StageSpec, Step
from worker.compute.batches import BatchReader
from worker.compute.chunk import Chunk
from worker.compute.state import FATE, STEP, by_name
from worker.model.stage import Stage, build_stage
from worker.sweep.array import RowArray, RowSettings, RowStep
from worker.sweep.blame import check_sane
from worker.sweep.choosing import PassChoice, PassChoices
from worker.sweep.reading import RowReader

_REASONS = ("", *REASONS)
"""By the number under which a reason is saved."""
_RATE_RATIO = 0.5
"""Share of its learning rate that a row goes on with after it was put back."""


class ArrayChunk(Chunk):
    """The only chunk of an array. Only the torch thread touches it.

    `module` is a model like those of the rows; its parameters are row 0's.
    """

    def __init__(
        self,
        job: ArrayJob,
        module: Stage,
        rows: RowBuffer,
        *,
        version: Step,
        choices: PassChoices | None = None,
    ) -> None:
        super().__init__(module, rule_of(job.aggregation, job.optimizer), version=version)
        self.job = job
        self.rows = rows
        """Rows as the last record left them."""
        self.choices = PassChoices() if choices is None else choices
        self._num_rewinds = [0] * len(rows)
        self._retired = [""] * len(rows)
        self._told = [_nothing_yet(count) for count in rows.num_updates]
        self._scorer = copy.deepcopy(module)
        """Model that scores a row's samples, after it has taken that row's parameters."""
        self._reader: RowReader | None = None
        self._round: _Round | None = None
        """The copy that the round in progress works on; None: nothing was done of it."""
        self._settle()

    @classmethod
    def drawn_rows(
        cls,
        job: ArrayJob,
        stage: StageSpec,
        *,
        version: Step,
        device: torch.device,
        choices: PassChoices | None = None,
    ) -> Self:
        """The array as the seeds of its rows draw it."""
        modules = [
            build_stage(
                job.model,
                stage,
                sequence_tokens=job.data.sequence_tokens,
                seed=row.seed,
                precision=job.precision,
                device=device,
            )
            for row in job.rows
        ]
        walkers = []
        for module, row in zip(modules, job.rows, strict=True):
            params = {name: x.detach() for name, x in module.named_parameters()}
            walkers.append(Walker(params=params, state=optimizer_of(row.optimizer).init(params)))
        return cls(job, modules[0], RowBuffer.of(walkers), version=version, choices=choices)

    def _settle(self) -> None:
        """Rows have become others: what is beside them follows."""
        self.walker = self.rows.walker(0)
        for name, param in self.params.items():
            param.data = self.walker.params[name]
        self._round = None

    # --- a round ---

    def own_loss(self, op: LossOp | LossInputOp, batches: BatchReader | None) -> Loss:
        """Local step of all rows, or the score of each on validation data."""
        if batches is None:
            raise LocalError("a round begins here, but no data were opened")
        if self._reader is None or self._reader.dataset is not batches.dataset:
            self._reader = RowReader(batches.dataset, self.job, self._device)
        return self._step(self._reader, op) if op.phase.trains else self._score(self._reader, op)

    @property
    def _device(self) -> torch.device:
        return self.rows.params.device

    def _step(self, reader: RowReader, op: LossOp | LossInputOp) -> Loss:
        if self._round is None:
            self._round = _Round(self, reader)
        is_last_op = op.microbatch == self.job.batch.num_microbatches - 1
        num_steps = self.job.array.op_steps
        steps = [
            self._round.step(reader, is_last=is_last_op and made == num_steps - 1)
            for made in range(num_steps)
        ]
        array = ArrayRound.together(steps)
        assert array is not None, "an op has a local step"
        rows = array.rows
        loss_sum = exact_sum(row.loss * row.num_tokens for row in rows)
        return Loss(loss_sum=loss_sum, num_tokens=array.num_tokens, array=array)

    @torch.no_grad()
    def _score(self, reader: RowReader, op: LossOp | LossInputOp) -> Loss:
        scores = []
        for row in range(len(self.rows)):
            params = self.rows.layout.views(self.rows.params[row])
            for name, param in self._scorer.named_parameters():
                param.data = params[name]
            inputs, labels = reader.validation(row, op.step, op.microbatch)
            loss, num_tokens = self._scorer.loss(inputs, labels)
            scores.append(RowScore(loss_sum=loss.item(), num_tokens=num_tokens))
        return Loss(
            loss_sum=exact_sum(x.loss_sum for x in scores if isfinite(x.loss_sum)),
            num_tokens=sum(x.num_tokens for x in scores),
            rows=tuple(scores),
        )

    # --- the copy, where other chunks have sums ---

    def accumulator(self, group: GroupId) -> Tensor:
        """All numbers of the copy, as one vector: what is voted on."""
        rows = self.rows if self._round is None else self._round.array.rows
        return torch.cat(
            [x.reshape(-1) for x in (rows.params, *(rows.state[slot] for slot in sorted(rows.state)))]
        )

    def lay_out(self, groups: object, worker: object) -> None:
        """Begin the round anew."""
        self._round = None

    @property
    def groups(self) -> tuple[GroupId, ...]:
        """Groups that sum its gradients: there are none."""
        return ()

    def clear(self) -> None:
        """Give up what was done of a round."""
        self._round = None

    def apply(self, record: StepRecord, result_by_group: Mapping[GroupId, Tensor]) -> None:
        """Have the copy be the rows."""
        done, self._round = self._round, None
        if done is not None:
            self.rows.put(done.places, done.array.rows)
            for row in range(len(self.rows)):
                self._told[row] = done.numbers[row]
                self._num_rewinds[row] = done.numbers[row].num_rewinds
                self._retired[row] = done.numbers[row].retired
            self.walker = self.rows.walker(0)
        self.version = Step(record.step + 1)

    # --- state, as it travels and is saved ---

    def row_state(self, row: int) -> dict[str, Tensor]:
        """Tensors of one row by name, its count of updates and its fate among them."""
        walker = self.rows.walker(row)
        fate = torch.tensor([self._num_rewinds[row], _REASONS.index(self._retired[row])])
        count = torch.tensor(walker.num_updates, dtype=torch.int64)
        return {**walker.params, **by_name(walker.state, walker.state.keys()), STEP: count, FATE: fate}

    def state(self) -> dict[str, Tensor]:
        """Tensors of all rows, each row's named after it."""
        return {
            f"{walker_prefix(row)}{name}": tensor
            for row in range(len(self.rows))
            for name, tensor in self.row_state(row).items()
        }

    def copy_for_checkpoint(
        self, walkers: Walkers = Walkers.ONE
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of the parameters of all rows, and of all else of them: together they are fewer files to write."""
        copies = self.copy_state()
        names = [f"{walker_prefix(row)}{name}" for row in range(len(self.rows)) for name in self.params]
        return {name: copies.pop(name) for name in names}, copies

    def load_state(self, state: Mapping[str, Tensor], *, version: Step) -> None:
        """Take over the state of all rows, as `state` gives it.

        Raises:
            LocalError: a tensor is missing or of another shape.
        """
        for row in range(len(self.rows)):
            prefix = walker_prefix(row)
            self.load_row(
                row, {x: state[f"{prefix}{x}"] for x in self.row_state(row) if f"{prefix}{x}" in state}
            )
        self.version = version

    @torch.no_grad()
    def load_row(self, row: int, state: Mapping[str, Tensor]) -> None:
        """Have a row go on from a state that `row_state` gave, perhaps of another array.

        Raises:
            LocalError: a tensor is missing or of another shape; nothing has changed then.
        """
        targets = self.row_state(row)
        for name, target in targets.items():
            if name not in state or state[name].shape != target.shape:
                found = tuple(state[name].shape) if name in state else "nothing"
                raise LocalError(f"row {row}: {name} should be {tuple(target.shape)}, found {found}")
        for name in targets.keys() - {STEP, FATE}:
            targets[name].copy_(state[name])
        self.rows.num_updates[row] = int(state[STEP])
        num_rewinds, reason = state[FATE].tolist()
        if not 0 <= reason < len(_REASONS):
            raise LocalError(f"row {row}: this release knows no fate {reason}")
        self._num_rewinds[row], self._retired[row] = num_rewinds, _REASONS[reason]
        self._told[row] = replace(
            _nothing_yet(int(state[STEP])), num_rewinds=num_rewinds, retired=_REASONS[reason]
        )
        self._settle()

    def begin_with_parameters(self) -> None:
        """The parameters of row 0 were replaced before the first update: all rows begin with these."""
        params = {name: x.detach() for name, x in self.params.items()}
        self.rows = RowBuffer.of(
            [Walker(params=params, state=optimizer_of(row.optimizer).init(params)) for row in self.job.rows]
        )
        self._settle()

    def begin_as_newcomer(self) -> None:
        """Everything of a row is its own, and came with it."""

    # --- what rows do ---

    def going(self) -> list[int]:
        """Rows that make steps."""
        last = self.job.array.last_step
        return [
            row for row, count in enumerate(self.rows.num_updates) if not self._retired[row] and count < last
        ]

    def settings_of(self, row: int) -> RowSettings:
        """The numbers of a row."""
        return RowSettings(
            optimizer=self.job.rows[row].optimizer,
            num_steps=self.job.array.schedule_steps,
            rate_ratio=_RATE_RATIO ** self._num_rewinds[row],
        )

    def numbers(self) -> list[RowNumbers]:
        """Numbers of all rows as they were last, of no token."""
        return [replace(told, num_tokens=0) for told in self._told]


class _Round:
    """Working copy of the rows that make steps, and what has come of the round so far.

    `places` has the row that each of the copy's is.
    """

    def __init__(self, chunk: ArrayChunk, reader: RowReader) -> None:
        self._chunk = chunk
        self.numbers = chunk.numbers()
        """Numbers of all rows at the newest local step."""
        self.places = chunk.going()
        rows = chunk.rows.taken(self.places)
        settings = [chunk.settings_of(row) for row in self.places]
        self.choice = self._chosen(reader, rows)
        self.array = RowArray.over(chunk.module, rows, settings, self.choice.kind)

    def _chosen(self, reader: RowReader, rows: RowBuffer) -> PassChoice:
        array = self._chunk.job.array
        if not self.places or array.fuse == "never":
            return PassChoice(kind=PassKind.LOOPED, speedup=1.0, words="")
        batch = reader.batch(self.places, rows.num_updates)
        least = array.min_speedup if array.fuse == "auto" else 0.0
        return self._chunk.choices.of(self._chunk.module, rows, batch, min_speedup=least)

    def step(self, reader: RowReader, *, is_last: bool) -> ArrayRound:
        """Make a local step; after the last one of a round, what it led to is looked at too."""
        is_made = self._move(reader)
        if is_last:
            self._look()
        return ArrayRound(
            rows=tuple(self.numbers),
            num_local_steps=int(is_made),
            pass_kind=self.choice.kind,
            speedup=self.choice.speedup,
        )

    def _move(self, reader: RowReader) -> bool:
        """Have every row that is not at its end make a step; whether there is one."""
        chunk, array = self._chunk, self.array
        last_step = chunk.job.array.last_step
        resting = [
            place
            for place, count in enumerate(array.rows.num_updates)
            if count >= last_step or place in array.frozen
        ]
        self.numbers = [replace(x, num_tokens=0) for x in self.numbers]
        if len(resting) == len(self.places):
            return False
        batch = reader.batch(self.places, array.rows.num_updates)
        steps = array.step([batch], resting)
        moved = [place for place in range(len(self.places)) if place not in resting]
        if len(moved) > 1 and all(place in array.frozen for place in moved):
            check_sane(batch.inputs)
        for place in moved:
            self._made(place, steps[place])
        return True

    def _look(self) -> None:
        """Put back rows that the last update has spoilt."""
        for place, is_finite in enumerate(_are_finite(self.array.rows)):
            if not is_finite and place not in self.array.frozen:
                self.array.frozen[place] = PARAMETERS_NOT_FINITE
                self._put_back(place, PARAMETERS_NOT_FINITE)

    def _made(self, place: int, made: RowStep) -> None:
        row, count = self.places[place], self.array.rows.num_updates[place]
        if place in self.array.frozen:
            self.numbers[row] = replace(self.numbers[row], gradient_norm=made.gradient_norm)
            self._put_back(place, made.reason)
            return
        self.numbers[row] = RowNumbers(
            loss=made.loss,
            num_tokens=made.num_tokens,
            gradient_norm=made.gradient_norm,
            clip=made.clip,
            learning_rate=made.learning_rate,
            num_updates=count,
            num_rewinds=self.numbers[row].num_rewinds,
        )

    def _put_back(self, place: int, reason: str) -> None:
        """Have a row that has diverged be what it was when the round began: for good, or to go on at half its rate."""
        row, chunk = self.places[place], self._chunk
        before = self.numbers[row]
        may_rewind = chunk.job.array.on_divergence == "rewind" and not before.num_rewinds
        ratio = _RATE_RATIO if may_rewind else None
        self.array.put(place, chunk.rows, row, rate_ratio=ratio)
        self.numbers[row] = replace(
            before,
            num_updates=chunk.rows.num_updates[row],
            num_rewinds=before.num_rewinds + may_rewind,
            retired="" if may_rewind else reason,
        )


def _nothing_yet(num_updates: int) -> RowNumbers:
    return RowNumbers(
        loss=0.0, num_tokens=0, gradient_norm=0.0, clip=1.0, learning_rate=0.0, num_updates=num_updates
    )


def _are_finite(rows: RowBuffer) -> Sequence[bool]:
    """Whether all numbers of each row are finite, its optimizer's state included."""
    found = torch.isfinite(rows.params).all(1)
    for flat in rows.state.values():
        found &= torch.isfinite(flat).all(1)
    return [bool(x) for x in found.tolist()]
