"""Seconds of a layer of experts in pieces, whose exchanges and experts only wait, beside what its lanes predict.

    python -m bench.pieces [--rounds 3] [--json]

A device's own functions send rows, compute and send results back. In place of another device there is a lane that waits
as long as an exchange would, one after the other, and experts that wait as long as theirs: of pieces of 50 ms or
more what a busy machine adds is small. Each number of pieces is measured in turns, the median counts. Ends with one
JSON line; exit code 1 if a goal is missed.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from time import perf_counter, sleep

import torch
from torch import Tensor

from bench.report import Row, finish, spread
from skein.plan.pieces.lanes import LayerWork, Work, best_pieces, end_s
from worker.mesh.share import Share
from worker.model.sparse.spread import Piece, SpreadRows, there_and_back

GOAL = 0.15
"""Most that measured times are off by, as a share of the predicted."""
GAIN = 1.10
"""Where the best number of pieces is predicted to gain so much over one, it shall."""
NUM_TOKENS, NUM_EXPERTS, NUM_CHOSEN = 240, 4, 2
NUM_PIECES = (1, 2, 3, 4, 7)
LAYERS = {
    "both alike": LayerWork(exchange=Work(each_s=0.01, all_s=0.4), experts=Work(each_s=0.01, all_s=0.6)),
    "slow exchanges": LayerWork(exchange=Work(each_s=0.02, all_s=0.6), experts=Work(each_s=0.01, all_s=0.4)),
    "slow experts, back": LayerWork(
        exchange=Work(each_s=0.01, all_s=0.35), experts=Work(each_s=0.01, all_s=0.7), after_s=0.3
    ),
    "far away": LayerWork(exchange=Work(each_s=0.3, all_s=0.1), experts=Work(each_s=0.01, all_s=0.35)),
}


class _Waited:
    """Rows that come when a lane has waited for them."""

    def __init__(self, coming: Future[Tensor]) -> None:
        self._coming = coming

    def wait(self) -> Tensor:
        return self._coming.result()


class EmulatedGroup:
    """Two devices, of which the other one sends rows of zeros, one exchange after the other."""

    index, size = 0, 2

    def __init__(self, exchange: Work, num_rows: int, factor: float) -> None:
        self._exchange = exchange
        self._num_rows = num_rows
        self._factor = factor
        self._lane = ThreadPoolExecutor(max_workers=1)

    def close(self) -> None:
        """End the lane."""
        self._lane.shutdown()

    def sum_in_place(self, tensor: Tensor) -> None:
        """The other device adds nothing."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Rows of both."""
        return torch.cat((tensor, torch.zeros_like(tensor)))

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """The first half, to which the other device adds nothing."""
        return whole[: len(whole) // self.size]

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> _Waited:
        """Rows that are here when the lane has waited for all before, and as long as these take."""
        took_s = _seconds(self._exchange, sum(sent), self._num_rows) * self._factor

        def travel() -> Tensor:
            sleep(took_s)
            return rows.new_zeros(sum(received), *rows.shape[1:])

        return _Waited(self._lane.submit(travel))


def _seconds(work: Work, num_rows: int, of_all: int) -> float:
    return work.each_s + work.all_s * num_rows / of_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layer in so many pieces, with what is predicted of it."""

    name: str
    layer: LayerWork
    num_pieces: int

    @property
    def predicted_s(self) -> float:
        """Seconds, by the lanes."""
        return end_s(self.layer, self.num_pieces)


def measured_s(case: Case, factor: float = 1.0) -> float:
    """Seconds of the layer's way there and back, each wait `factor` times as long."""
    tokens = torch.arange(NUM_TOKENS)
    # Evenly: each token goes to one expert of either device.
    choices = torch.stack((tokens % 2, 2 + tokens % 2), -1)
    num_rows = NUM_TOKENS * NUM_CHOSEN // EmulatedGroup.size
    group = EmulatedGroup(case.layer.exchange, num_rows, factor)
    share = Share(group)
    rows = SpreadRows.of(choices, None, NUM_EXPERTS, share)

    def compute(piece: Piece, given: Tensor) -> Tensor:
        sleep(_seconds(case.layer.experts, sum(piece.num_rows), num_rows) * factor)
        return given

    try:
        began_s = perf_counter()
        there_and_back(
            torch.ones(num_rows, 8),
            rows.pieces(case.num_pieces),
            share,
            compute,
            lambda: sleep(case.layer.after_s * factor),
        )
        return perf_counter() - began_s
    finally:
        group.close()


def rounds(num_rounds: int) -> dict[Case, list[float]]:
    """Seconds of each case, round by round."""
    cases = [
        Case(name=name, layer=layer, num_pieces=num) for name, layer in LAYERS.items() for num in NUM_PIECES
    ]
    found: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(num_rounds):
        for case in cases:
            found[case].append(measured_s(case))
    return found


def rows_of(found: dict[Case, list[float]]) -> list[Row]:
    """Figures: what each layer is off by at most, and what it gains by pieces."""
    rows = []
    for name, layer in LAYERS.items():
        own = {case: runs for case, runs in found.items() if case.name == name}
        ratios = [median(runs) / case.predicted_s for case, runs in own.items()]
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        best = min(own, key=lambda case: case.predicted_s)
        single = next(case for case in own if case.num_pieces == 1)
        gain, predicted = median(own[single]) / median(own[best]), single.predicted_s / best.predicted_s
        rows += [
            Row(
                what=f"{name}: seconds in {best.num_pieces} pieces, of 1 to 16 best {best_pieces(layer)}",
                value=median(own[best]),
                unit="s",
                against=f"{best.predicted_s:.3f} s predicted; farthest off of all numbers of pieces",
                ratio=worst,
                goal=f"within {GOAL:.0%}",
                holds=abs(worst - 1) <= GOAL,
                spread=spread(own[best]),
            ),
            Row(
                what=f"{name}: one piece over {best.num_pieces}",
                value=gain,
                unit="times",
                against=f"{predicted:.2f} predicted",
                ratio=gain / predicted,
                goal=f"at least {GAIN} where predicted",
                holds=gain >= GAIN or predicted < GAIN,
                spread=spread(own[single]),
            ),
        ]
    return rows


def main() -> int:
    """Run all rounds and print what came of them."""
    parser = argparse.ArgumentParser(prog="bench pieces", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = rounds(arguments.rounds)
    if not arguments.json:
        for case, runs in found.items():
            sys.stdout.write(
                f"{case.name}, {case.num_pieces} pieces: {median(runs):.3f} s, predicted {case.predicted_s:.3f} s\n"
            )
    return finish("pieces", rows_of(found))


if __name__ == "__main__":
    sys.exit(main())
