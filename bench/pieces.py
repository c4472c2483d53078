"""Seconds of a layer of experts in pieces, whose exchanges and experts only wait, beside what its lanes predict.

    python -m bench.pieces [--rounds 3] [--json]

A device's own functions send rows, compute and send results back. In place of another device there is a lane that waits
as long as an exchange would, one after the other, and experts that wait as long as theirs: of pieces of 50 ms or
more what a busy machine adds is small. Each number of pieces is measured in turns, the median counts; the best once
more with sums of gradients for as long as the lane is idle. And, without waiting, what numbers of pieces lose that
are chosen by published times, as a mesh chooses by its own. Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from time import perf_counter, sleep

import torch
from torch import Tensor

from bench.published import EXCHANGES, PublishedLayer, layers
from bench.report import Row, finish, spread
from skein.plan.pieces.choice import ExpertLines, TimedRows, sizes_to_time
from skein.plan.pieces.lanes import MOST_PIECES, LayerWork, Work, best_pieces, end_s, idle_s
from skein.plan.pieces.line import TimeLine
from worker.mesh.pieces.tokens import tokens_of
from worker.mesh.share import Share
from worker.model.sparse.spread import Piece, SpreadRows, there_and_back

GOAL = 0.15
"""Most that measured times are off by, as a share of the predicted."""
GAIN = 1.10
"""Where the best number of pieces is predicted to gain so much over one, it shall."""
LOSS = 0.02
"""Most that chosen numbers of pieces lose on published times, against the best."""
NOISE = 0.02
"""Most that a time is off by which devices measure."""
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
    """Rows, or a sum, that come when a lane has waited for them."""

    def __init__(self, coming: Future[Tensor]) -> None:
        self._coming = coming

    def wait(self) -> Tensor:
        return self._coming.result()


class EmulatedGroup:
    """Two devices, of which the other one sends rows of zeros, one exchange or sum after the other."""

    index, size = 0, 2

    def __init__(self, exchange: Work, num_rows: int, factor: float, sums_s: float = 0.0) -> None:
        self._exchange = exchange
        self._num_rows = num_rows
        self._factor = factor
        self._sums_s = sums_s
        self._lane = ThreadPoolExecutor(max_workers=1)

    def close(self) -> None:
        """End the lane."""
        self._lane.shutdown()

    def sum_in_place(self, tensor: Tensor) -> None:
        """The other device adds nothing."""

    def begin_sum(self, tensor: Tensor) -> _Waited:
        """The same, once the lane has waited."""

        def travel() -> Tensor:
            sleep(self._sums_s * self._factor)
            return tensor

        return _Waited(self._lane.submit(travel))

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
    """A layer in so many pieces, with what is predicted of it; `sums_s` are summed while the lane is idle."""

    name: str
    layer: LayerWork
    num_pieces: int
    sums_s: float = 0.0

    @property
    def predicted_s(self) -> float:
        """Seconds, by the lanes."""
        return end_s(self.layer, self.num_pieces)

    def with_sums(self) -> "Case":
        """The same, with as many sums as there is room for."""
        return replace(self, sums_s=idle_s(self.layer, self.num_pieces))


def measured_s(case: Case, factor: float = 1.0) -> float:
    """Seconds of the layer's way there and back, each wait `factor` times as long."""
    tokens = torch.arange(NUM_TOKENS)
    # Evenly: each token goes to one expert of either device.
    choices = torch.stack((tokens % 2, 2 + tokens % 2), -1)
    num_rows = NUM_TOKENS * NUM_CHOSEN // EmulatedGroup.size
    group = EmulatedGroup(case.layer.exchange, num_rows, factor, case.sums_s)
    share = Share(group)
    rows = SpreadRows.of(choices, None, NUM_EXPERTS, tokens_of(share, choices[None]))

    def compute(piece: Piece, given: Tensor) -> Tensor:
        sleep(_seconds(case.layer.experts, sum(piece.num_rows), num_rows) * factor)
        return given

    begun: list[_Waited] = []
    try:
        began_s = perf_counter()
        there_and_back(
            torch.ones(num_rows, 8),
            rows.pieces(case.num_pieces),
            share,
            compute,
            lambda: sleep(case.layer.after_s * factor),
            lambda: begun.append(group.begin_sum(torch.ones(1))) if case.sums_s else None,
        )
        for summed in begun:
            summed.wait()
        return perf_counter() - began_s
    finally:
        group.close()


def rounds(num_rounds: int) -> dict[Case, list[float]]:
    """Seconds of each case, round by round."""
    cases = [
        Case(name=name, layer=layer, num_pieces=num) for name, layer in LAYERS.items() for num in NUM_PIECES
    ]
    best = [
        min((case for case in cases if case.name == name), key=lambda case: case.predicted_s)
        for name in LAYERS
    ]
    # Where exchanges are the bottleneck there is no room.
    cases += [summed for case in best if (summed := case.with_sums()).sums_s]
    found: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(num_rounds):
        for case in cases:
            found[case].append(measured_s(case))
    return found


def rows_of(found: dict[Case, list[float]]) -> list[Row]:
    """Figures: what each layer is off by at most, and what it gains by pieces."""
    rows = []
    for name, layer in LAYERS.items():
        own = {case: runs for case, runs in found.items() if case.name == name and not case.sums_s}
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


def summed_rows(found: dict[Case, list[float]]) -> list[Row]:
    """Figures: what layers take with sums beside them, for as long as there is room."""
    return [
        Row(
            what=f"{case.name}: {case.num_pieces} pieces with {case.sums_s:.2f} s of sums in the idle lane",
            value=median(runs),
            unit="s",
            against=f"{case.predicted_s:.3f} s predicted, as without",
            ratio=median(runs) / case.predicted_s,
            goal=f"within {GOAL:.0%}",
            holds=abs(median(runs) / case.predicted_s - 1) <= GOAL,
            spread=spread(runs),
        )
        for case, runs in found.items()
        if case.sums_s
    ]


def lines_of(layer: PublishedLayer, exchange: TimeLine, noise: float = 0.0) -> ExpertLines:
    """Lines as devices would fit them to the published times, each of which they measure off by up to `noise`."""
    by_rows, experts, draw = layer.exchange(exchange), layer.experts(), Random(1)

    def measured(line: TimeLine, num: int) -> float:
        return line.seconds(num) * draw.uniform(1 - noise, 1 + noise)

    return ExpertLines.of(
        [
            TimedRows(
                num_rows=num,
                exchange_s=measured(by_rows, num),
                forward_s=measured(experts, num),
                backward_s=measured(experts, num),
                weights_s=measured(experts, num),
            )
            for num in sizes_to_time(layer.num_rows)
        ]
    )


def losses(exchange: TimeLine) -> Iterator[float]:
    """What the chosen number of pieces loses against the best of four times as many, layer by layer, each way."""
    for layer in layers():
        lines = lines_of(layer, exchange)
        chosen = lines_of(layer, exchange, NOISE).pieces(layer.num_rows)
        for num, is_forward in ((chosen.forward, True), (chosen.backward, False)):
            work = lines.layer(layer.num_rows, is_forward=is_forward)
            best_s = min(end_s(work, other) for other in range(1, 4 * MOST_PIECES + 1))
            yield end_s(work, num) / best_s - 1


def published_rows() -> list[Row]:
    """Figures: the worst loss of each cluster and link."""
    rows = []
    for name, exchange in EXCHANGES.items():
        found = list(losses(exchange))
        rows.append(
            Row(
                what=f"{name}: pieces chosen for {len(found)} layers, slower than the best at most",
                value=100 * max(found),
                unit="%",
                against=f"the best of 1 to {4 * MOST_PIECES} simulated",
                ratio=1 + max(found),
                goal=f"{LOSS:.0%}",
                holds=max(found) <= LOSS,
                spread=0.0,
            )
        )
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
                f"{case.name}, {case.num_pieces} pieces, {case.sums_s:.2f} s of sums: {median(runs):.3f} s,"
                f" predicted {case.predicted_s:.3f} s\n"
            )
    return finish("pieces", rows_of(found) + summed_rows(found) + published_rows())


if __name__ == "__main__":
    sys.exit(main())
