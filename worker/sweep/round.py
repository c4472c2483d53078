"""Round of an array: a copy of the rows that make steps, and local steps on it.

Rules of this file
- What a local step computes depends on a row's state alone: a round is a function of the rows that it began from.
- A row that diverges is put back to where its round began: it is retired there, or goes on from there at half its rate.
- Rows that make no more steps are not in the copy: nothing is computed for them.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from skein.numeric.rows import RowBuffer
from skein.protocol.messages.array_rounds import (
    PARAMETERS_NOT_FINITE,
    ArrayRound,
    PassKind,
    RowNumbers,
)
from worker.model.base import Stage
from worker.probe import synchronize
from worker.sweep.array import RowArray, RowStep
from worker.sweep.blame import check_device, check_samples
from worker.sweep.choosing import PassChoice, PassChoices
from worker.sweep.held import RATE_RATIO, HeldRows
from worker.sweep.reading import RowReader


class RowRound:
    """Working copy of the rows that make steps, and what has come of the round so far.

    `places` has the row that each of the copy's is.

    Args:
        held: rows as the round begins.
        module: a model like each of theirs.
        choices: knows which pass is the quickest.
        reader: reads samples that passes are tried with.
    """

    def __init__(
        self,
        held: HeldRows,
        module: Stage,
        choices: PassChoices,
        reader: RowReader,
    ) -> None:
        self._held = held
        self.numbers = [replace(told, num_tokens=0) for told in held.numbers]
        """Numbers of all rows at the newest local step."""
        self._took_s: list[float] = []
        """Seconds of a local step in each op that made some."""
        self.num_ops = 0
        """Ops that the copy is after."""
        self.places = held.going()
        rows = held.taken(self.places)
        settings = [held.settings_of(row) for row in self.places]
        last_step, dues = held.job.array.last_step, map(reader.due, self.places)
        self._ends = [last_step if due is None else min(due, last_step) for due in dues]
        """Steps at which each of the copy's rests."""
        self.choice = self._chosen(module, choices, reader, rows)
        self.array = RowArray.over(module, rows, settings, self.choice.kind)

    def _chosen(self, module: Stage, choices: PassChoices, reader: RowReader, rows: RowBuffer) -> PassChoice:
        array = self._held.job.array
        if not self.places or array.fuse == "never":
            return PassChoice(kind=PassKind.LOOPED, speedup=1.0, words="")
        batch = reader.batch(self.places, rows.num_updates)
        least = array.min_speedup if array.fuse == "auto" else 0.0
        return choices.of(module, rows, batch, min_speedup=least)

    def op(self, reader: RowReader) -> ArrayRound:
        """Make the local steps of the next op; after the last one of a round, what it led to is looked at too.

        Where it raises, the copy is of no use any more.
        """
        job = self._held.job
        is_last = self.num_ops == job.batch.num_microbatches - 1
        num_steps, began_s = job.array.op_steps, time.perf_counter()
        steps = [self._step(reader, is_last=is_last and made == num_steps - 1) for made in range(num_steps)]
        self.num_ops += 1
        array = ArrayRound.together(steps)
        assert array is not None, "an op has a local step"
        return replace(array, step_s=self._paced(array.num_local_steps, began_s))

    def _paced(self, num_made: int, began_s: float) -> float:
        """Seconds of a local step so far, by the ops of the round; the first, a cold one, only if there is no other."""
        if num_made:
            synchronize(self._held.device)
            self._took_s.append((time.perf_counter() - began_s) / num_made)
        return median(self._took_s[1:] or self._took_s or [0.0])

    def _step(self, reader: RowReader, *, is_last: bool) -> ArrayRound:
        is_made = self._move(reader)
        if is_last:
            self._look()
        memory = self.choice.memory
        return ArrayRound(
            rows=tuple(self.numbers),
            num_local_steps=int(is_made),
            pass_kind=self.choice.kind,
            speedup=self.choice.speedup,
            fixed_bytes=0 if memory is None else memory.fixed_bytes,
            row_bytes=0 if memory is None else memory.row_bytes,
        )

    def _move(self, reader: RowReader) -> bool:
        """Have every row make a step that is neither at its end nor has a choice due; whether there is one."""
        array = self.array
        resting = [
            place
            for place, count in enumerate(array.rows.num_updates)
            if count >= self._ends[place] or place in array.frozen
        ]
        self.numbers = [replace(x, num_tokens=0) for x in self.numbers]
        if len(resting) == len(self.places):
            return False
        batch = reader.batch(self.places, array.rows.num_updates)
        steps = array.step([batch], resting)
        moved = [place for place in range(len(self.places)) if place not in resting]
        if gone := [place for place in moved if place in array.frozen]:
            check_samples(batch.inputs[gone])
        if len(gone) == len(moved) > 1:
            check_device(batch.inputs.device)
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
        row, held = self.places[place], self._held
        before = self.numbers[row]
        may_rewind = held.job.array.on_divergence == "rewind" and not before.num_rewinds
        ratio = RATE_RATIO if may_rewind else None
        self.array.put(place, held.taken([row]), 0, rate_ratio=ratio)
        self.numbers[row] = replace(
            before,
            num_updates=held.numbers[row].num_updates,
            num_rewinds=before.num_rewinds + may_rewind,
            retired="" if may_rewind else reason,
        )


def _are_finite(rows: RowBuffer) -> Sequence[bool]:
    """Whether all numbers of each row are finite, its optimizer's state included."""
    found = torch.isfinite(rows.params).all(1)
    for flat in rows.state.values():
        found &= torch.isfinite(flat).all(1)
    return [bool(x) for x in found.tolist()]
