"""Makespans of every op schedule over the latency of a hop, simulated; no clock is read.

    python -m bench.studies.schedules [--json]

Four equal workers in a row, forward, input gradient and weight gradient 1 s each (T = 3 s), any two workers c apart,
memory for everything. Ends with one JSON line; exit code 1 if what is chosen misses its goal.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from bench.report import Row, finish
from bench.studies.schedules.choice import Candidate, choose
from skein.plan.route.schedules.shape import PipelinePlacement
from tests.support.scheduling.pricing import Cut, Links, StageCost, even_cut

NUM_WORKERS = 4
NUM_MICROBATCHES = (8, 32)
NUM_SLOTS = 4
"""Of the table with little memory: as many microbatches of a worker's whole share as textbook 1F1B holds."""
HOPS = ((0.0, "0"), (0.25, "1/12"), (0.5, "1/6"), (1.0, "1/3"), (2.0, "2/3"), (3.0, "1"), (6.0, "2"))
"""Seconds of a hop, and the same as a part of T."""
_TOTAL_S = 3.0
_SHARE_BYTES = 60
_SHARE = StageCost(
    forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=_SHARE_BYTES, kept_bytes=_SHARE_BYTES
)
_KINDS = (
    (1, PipelinePlacement.LOOP),
    (2, PipelinePlacement.LOOP),
    (4, PipelinePlacement.LOOP),
    (2, PipelinePlacement.V),
)


def cuts() -> list[Cut]:
    """The same model with one, two and four chunks per worker."""
    return [even_cut([_SHARE] * NUM_WORKERS, num_chunks, placement) for num_chunks, placement in _KINDS]


def with_output(num_barriers: int) -> list[Cut]:
    """The same model with an output as heavy as a worker's share: on the last worker, or in rows over all of them.

    Scores are one product with a shard's rows and terms two; with one barrier two and one.
    """
    if not num_barriers:
        last = replace(_SHARE, forward_s=2.0, input_s=2.0, weight_s=2.0)
        return [Cut(stages=(*[_SHARE] * (NUM_WORKERS - 1), last))]
    product_s = _TOTAL_S / 3 / NUM_WORKERS
    num_scores = 3 - num_barriers
    # Logits are not counted among what is held: the tables' unit are the activations of a share.
    shard = StageCost(
        forward_s=num_scores * product_s,
        input_s=0.0,
        weight_s=(3 - num_scores) * product_s,
        activation_bytes=0,
        kept_bytes=0,
    )
    shards = (shard,) * NUM_WORKERS
    kinds = ((1, PipelinePlacement.LOOP), (2, PipelinePlacement.V))
    return [
        replace(even_cut([_SHARE] * NUM_WORKERS, *kind), shards=shards, num_barriers=num_barriers)
        for kind in kinds
    ]


@cache
def ranking(
    num_microbatches: int, latency_s: float, num_slots: int | None = None, num_barriers: int | None = None
) -> tuple[Candidate, ...]:
    """All schedules that differ and fit, the quickest first; of the model `with_output`, if barriers are given."""
    matrix = np.full((NUM_WORKERS, NUM_WORKERS), latency_s)
    np.fill_diagonal(matrix, 0.0)
    links = Links(latency_s=matrix, bytes_per_s=np.full_like(matrix, np.inf))
    memory_bytes = None if num_slots is None else [num_slots * _SHARE_BYTES] * NUM_WORKERS
    of = cuts() if num_barriers is None else with_output(num_barriers)
    return choose(num_microbatches, of, links, memory_bytes).ranking


def markdown(num_microbatches: int, num_slots: int | None = None) -> str:
    """Rows are schedules, columns hops; the least of a column is bold. Empty: the same as another one there."""
    return _table(
        [{x.name: x for x in ranking(num_microbatches, latency_s, num_slots)} for latency_s, _ in HOPS]
    )


def markdown_with_output(num_microbatches: int) -> str:
    """The same with an output to be computed, whole or split, with one barrier or two."""
    labels = {0: "output on the last worker", 1: "one barrier", 2: "two barriers"}
    columns = []
    for latency_s, _ in HOPS:
        rankings = {b: ranking(num_microbatches, latency_s, None, b) for b in labels}
        columns.append({f"{x.name}, {labels[b]}": x for b, found in rankings.items() for x in found})
    return _table(columns)


def _table(columns: Sequence[dict[str, Candidate]]) -> str:
    names = sorted({name for column in columns for name in column})
    lines = [
        "| c / T | " + " | ".join(part for _, part in HOPS) + " | holds |",
        "|---|" + "---:|" * (len(HOPS) + 1),
    ]
    for name in names:
        cells = [_cell(column, name) for column in columns]
        lines.append(f"| `{name}` | " + " | ".join(cells) + f" | {_held(columns, name)} |")
    return "\n".join(lines)


def _cell(column: dict[str, Candidate], name: str) -> str:
    if name not in column:
        return ""
    least_s = min(x.simulation.makespan_s for x in column.values())
    makespan_s = column[name].simulation.makespan_s
    shown = f"{makespan_s:g}"
    return f"**{shown}**" if makespan_s <= least_s * (1 + 1e-9) else shown


def _held(columns: Sequence[dict[str, Candidate]], name: str) -> str:
    """The fullest worker's activations, in microbatches of its whole share: over all latencies, least and most."""
    held = [
        max(peak.num_bytes for peak in column[name].simulation.peaks) / _SHARE_BYTES
        for column in columns
        if name in column
    ]
    return f"{min(held):g}" if min(held) == max(held) else f"{min(held):g} to {max(held):g}"


def tables() -> list[str]:
    """All tables, each under a line that says what it is of."""
    ample = [
        f"{NUM_WORKERS} workers, {num_microbatches} microbatches:\n\n{markdown(num_microbatches)}"
        for num_microbatches in NUM_MICROBATCHES
    ]
    many = NUM_MICROBATCHES[-1]
    title = f"{NUM_WORKERS} workers, {many} microbatches, memory for the activations of {NUM_SLOTS}:"
    few = NUM_MICROBATCHES[0]
    output = f"{NUM_WORKERS} workers, {few} microbatches, an output as heavy as a worker's share:"
    return [
        *ample,
        f"{title}\n\n{markdown(many, NUM_SLOTS)}",
        f"{output}\n\n{markdown_with_output(few)}",
    ]


def rows() -> list[Row]:
    """What is chosen beside textbook 1F1B, and beside a row of workers none of which ever waits for a gradient."""
    found = []
    for num_microbatches in NUM_MICROBATCHES:
        for latency_s, part in HOPS:
            by_name = {x.name: x.simulation.makespan_s for x in ranking(num_microbatches, latency_s)}
            chosen = ranking(num_microbatches, latency_s)[0]
            # What one chunk each and whole backwards cannot beat: every worker's work, behind the way there and back.
            whole_s = (num_microbatches + NUM_WORKERS - 1) * _TOTAL_S + 2 * (NUM_WORKERS - 1) * latency_s
            ratio = chosen.simulation.makespan_s / by_name["one_f_one_b"]
            found.append(
                Row(
                    what=f"{chosen.name}, chosen for {num_microbatches} microbatches and a hop of {part} T",
                    value=chosen.simulation.makespan_s,
                    unit="s, simulated",
                    against=f"one_f_one_b: {by_name['one_f_one_b']:g} s",
                    ratio=round(ratio, 3),
                    goal=f"<= {whole_s:g} s, the bound of one chunk each and whole backwards",
                    holds=chosen.simulation.makespan_s <= whole_s,
                    spread=0.0,
                )
            )
    return found


def main() -> int:
    """Print the tables of docs/schedules.md and the line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.schedules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    if not parser.parse_args().json:
        print("\n\n".join(tables()))
    return finish("schedules", rows())


if __name__ == "__main__":
    sys.exit(main())
