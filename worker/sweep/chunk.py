"""Array as a chunk: rows, and a copy of them that the local steps of a round work on until a record makes it the rows.

An op is some local steps of every row that makes steps.
"""

import copy
from collections.abc import Mapping
from math import isfinite
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from skein.config.job import ArrayJob
from skein.config.rule import Walkers
from skein.errors import LocalError
from skein.numeric.aggregate.rules import rule_of
from skein.numeric.sums import exact_sum
from skein.plan.sweeping.choosing import RowPlace, asked_rows
from skein.protocol.log.records import walker_prefix
from skein.protocol.messages.array_rounds import RowScore
from skein.protocol.messages.directives import StepRecord
from skein.protocol.worker.ops import Loss, LossInputOp, LossOp
from skein.types import GroupId, StageSpec, Step
from worker.compute.batches import BatchReader
from worker.compute.chunk import Chunk
from worker.model.stage import Stage, build_stage
from worker.selection.traits import RowAsked, Traits
from worker.sweep.choosing import PassChoices
from worker.sweep.held import HeldRows
from worker.sweep.reading import RowReader
from worker.sweep.round import RowRound


class ArrayChunk(Chunk):
    """The only chunk of an array. Only the torch thread touches it.

    `module` is a model like those of the rows; its parameters are those of the first row that makes steps.
    """

    def __init__(
        self,
        module: Stage,
        held: HeldRows,
        *,
        version: Step,
        choices: PassChoices | None = None,
    ) -> None:
        job = held.job
        super().__init__(module, rule_of(job.aggregation, job.optimizer), version=version)
        self.job = job
        self.held = held
        self.choices = PassChoices() if choices is None else choices
        self._scorer = copy.deepcopy(module)
        """Model that scores a row's samples, after it has taken that row's parameters."""
        self._reader: RowReader | None = None
        self._round: RowRound | None = None
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
        params = [{name: x.detach() for name, x in module.named_parameters()} for module in modules]
        return cls(modules[0], HeldRows.beginning(job, params), version=version, choices=choices)

    def _settle(self) -> None:
        """Rows have become others: what is beside them follows."""
        if self.held.places:
            self.walker = self.held.buffer.walker(0)
        for name, param in self.params.items():
            param.data = self.walker.params[name]
        self._round = None

    # --- a round ---

    def own_loss(self, op: LossOp | LossInputOp, batches: BatchReader | None, traits: Traits) -> Loss:
        """Local steps of all rows, or the score of each on validation data; in a selection `traits` keep its rows."""
        if batches is None:
            raise LocalError("a round begins here, but no data were opened")
        if self._reader is None or self._reader.dataset is not batches.dataset:
            self._reader = RowReader(batches.dataset, self.job, self.held.device)
        self._reader.draw_by(batches.row_drawings)
        if op.phase.selects:
            return self._compare(self._reader, op, traits)
        return self._step(self._reader, op) if op.phase.trains else self._score(self._reader, op)

    def _step(self, reader: RowReader, op: LossOp | LossInputOp) -> Loss:
        # Of an op that fails midway nothing may stay: the copy is given up, and made again up to that op; so is what
        # was read, which may be why.
        made, self._round, self._reader = self._round, None, None
        if made is None or made.num_ops != op.microbatch:
            made = RowRound(self.held, self.module, self.choices, reader)
            for _ in range(op.microbatch):
                made.op(reader)
        array = made.op(reader)
        self._round, self._reader = made, reader
        loss_sum = exact_sum(row.loss * row.num_tokens for row in array.rows)
        return Loss(loss_sum=loss_sum, num_tokens=array.num_tokens, array=array)

    @torch.no_grad()
    def _score(self, reader: RowReader, op: LossOp | LossInputOp) -> Loss:
        scores = []
        for row in range(len(self.held)):
            inputs, labels = reader.looked_at(row, op.phase, op.step, op.microbatch)
            loss, num_tokens = self._as_row(row).loss(inputs, labels)
            scores.append(RowScore(loss_sum=loss.item(), num_tokens=num_tokens))
        return Loss(
            loss_sum=exact_sum(x.loss_sum for x in scores if isfinite(x.loss_sum)),
            num_tokens=sum(x.num_tokens for x in scores),
            rows=tuple(scores),
        )

    def _as_row(self, row: int) -> Stage:
        """A model with the parameters of a row, until it is asked for again."""
        params = self.held.params_of(row)
        for name, param in self._scorer.named_parameters():
            param.data = params[name]
        return self._scorer

    @torch.no_grad()
    def _compare(self, reader: RowReader, op: LossOp | LossInputOp, traits: Traits) -> Loss:
        """Have features kept of a microbatch of training rows, by the model of each row that is asked."""
        counts, going = [x.num_updates for x in self.held.numbers], self.held.going()
        places = [
            RowPlace(count=count, is_going=row in going, due=reader.due(row))
            for row, count in enumerate(counts)
        ]
        loss_sum, num_tokens = 0.0, 0
        for row in asked_rows(self.job.data.coreset.share, places):
            inputs, labels = reader.looked_at(row, op.phase, op.step, op.microbatch)
            hidden, logits = self._as_row(row).traits(inputs)
            asked = RowAsked(row=row, step=Step(counts[row]))
            traits.keep(self.job, op.step, op.microbatch, hidden, logits, labels, of=asked)
            loss_sum += functional.cross_entropy(logits, labels, reduction="sum").item()
            num_tokens += len(labels)
        return Loss(loss_sum=loss_sum, num_tokens=num_tokens)

    # --- the copy, where other chunks have sums ---

    def accumulator(self, group: GroupId) -> Tensor:
        """All numbers of the copy, as one vector: what is voted on."""
        rows = self.held.buffer if self._round is None else self._round.array.rows
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
        """Have the copy be the rows.

        Raises:
            LocalError: there is none: rows would be told to be further than they are.
        """
        done, self._round = self._round, None
        if done is None:
            raise LocalError(f"round {record.step} is committed, and nothing of it is here")
        self.held.put(done.places, done.array.rows, done.numbers)
        self._settle()
        self.version = Step(record.step + 1)

    # --- state, as it travels and is saved ---

    def state(self) -> dict[str, Tensor]:
        """Tensors of all rows, each row's named after it."""
        return {
            f"{walker_prefix(row)}{name}": tensor
            for row in range(len(self.held))
            for name, tensor in self.held.state_of(row).items()
        }

    def copy_for_checkpoint(
        self, walkers: Walkers = Walkers.ONE
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of the parameters of all rows, and of all else of them: together they are fewer files to write."""
        copies = self.copy_state()
        names = [f"{walker_prefix(row)}{name}" for row in range(len(self.held)) for name in self.params]
        return {name: copies.pop(name) for name in names}, copies

    def load_state(self, state: Mapping[str, Tensor], *, version: Step) -> None:
        """Take over the state of all rows, as `state` gives it.

        Raises:
            LocalError: a tensor is missing or of another shape.
        """
        for row in range(len(self.held)):
            prefix = walker_prefix(row)
            names = [x for x in self.held.state_of(row) if f"{prefix}{x}" in state]
            self.load_row(row, {x: state[f"{prefix}{x}"] for x in names})
        self.version = version

    def load_row(self, row: int, state: Mapping[str, Tensor]) -> None:
        """Have a row go on from the state of a row, perhaps of another array.

        Raises:
            LocalError: a tensor is missing or of another shape; nothing has changed then.
        """
        self.held.load(row, state)
        self._settle()

    def begin_with_parameters(self) -> None:
        """The parameters of row 0 were replaced before the first update: all rows begin with these."""
        params = {name: x.detach() for name, x in self.params.items()}
        self.held = HeldRows.beginning(self.job, [params] * len(self.job.rows))
        self._settle()

    def begin_as_newcomer(self) -> None:
        """Everything of a row is its own, and came with it."""
