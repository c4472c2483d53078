"""Vocabulary in blocks of rows, so that a cut may go through it: each block is a layer, and a tensor of its own.

Rules of this file
- The blocks follow from the number of rows alone: a shard is a run of them, so that whoever cuts the vocabulary
  otherwise reads the same tensors, adds in the same order, and comes to the same numbers.
- A block is named after the whole tensor and its rows, as in `lm_head.weight[0:64]`. Files from elsewhere, and what is
  exported, have the whole one.
"""

import re
from collections.abc import Collection, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple, assert_never

from skein.spec import Spec

_MOST_BLOCKS = 64
_LEAST_ROWS = 16
_NAME = re.compile(r"(?P<whole>.+)\[(?P<start>\d{1,10}):(?P<stop>\d{1,10})\]", re.ASCII | re.DOTALL)


class VocabularySplit(StrEnum):
    """Matrices over the vocabulary that are cut into rows: none, the output's, or the input's as well.

    `AUTO`: what a planner chooses of these.
    """

    OFF = "off"
    OUTPUT = "output"
    BOTH = "both"
    AUTO = "auto"


class RowCut(StrEnum):
    """Sizes of shards: equal, by how fast those compute who hold them, or by the memory that they have left."""

    EVEN = "even"
    SPEED = "speed"
    MEMORY = "memory"


class ShardScope(StrEnum):
    """Workers that may hold shards: all of the pipeline, or those of the site that its last layers are in."""

    PIPELINE = "pipeline"
    SITE = "site"


class VocabularySpec(Spec):
    """Cut of the matrices over the vocabulary into shards, one for each of `parallel.stages` workers."""

    split: VocabularySplit = VocabularySplit.OFF
    """`output`: the matrix that scores every token, and the loss with it; `both`: that which embeds them as well.

    Try it where the vocabulary is large: without, the ends of the pipeline have more to do, and to hold, than others.
    `auto`: whatever a first plan is shortest with, where cutting shortens it by a twentieth or nothing else fits.
    """
    rows: RowCut = RowCut.SPEED
    """`speed`: shards as equal as can be, and fewer rows for slow workers where a search finds that shorter; by memory
    where equal ones do not fit. `even`: equal, one of each end on each worker. `memory`: likewise one of each, with as
    many rows as its worker has memory left for, beside its layers between the ends: take it where memory is short."""
    scope: ShardScope = ShardScope.PIPELINE
    """`site`: on workers of the site that the last layers before the output are in. Take it where sites are far apart:
    a microbatch crosses from site to site once for the shards, rather than from shard to shard."""

    @property
    def num_ends(self) -> int:
        """Ends of the pipeline that are cut into shards, for all that is settled."""
        match self.split:
            case VocabularySplit.OFF | VocabularySplit.AUTO:
                return 0
            case VocabularySplit.OUTPUT:
                return 1
            case VocabularySplit.BOTH:
                return 2
            case _:
                assert_never(self.split)


class BlockName(NamedTuple):
    """Name of a tensor as it is read: the whole tensor's, and which of its rows."""

    whole: str
    rows: range


def row_blocks(num_rows: int) -> tuple[range, ...]:
    """Rows of each block of a vocabulary: as equal as can be, 64 of them unless they would be small.

    >>> [len(rows) for rows in row_blocks(50)], len(row_blocks(128_256))
    ([16, 17, 17], 64)
    """
    num_blocks = max(1, min(_MOST_BLOCKS, num_rows // _LEAST_ROWS))
    ends = [num_rows * i // num_blocks for i in range(num_blocks + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def block_name(whole: str, rows: range) -> str:
    """Name of a block of a tensor.

    >>> block_name("lm_head.weight", range(16, 32))
    'lm_head.weight[16:32]'
    """
    return f"{whole}[{rows.start}:{rows.stop}]"


def parse_block(name: str) -> BlockName | None:
    """Rows and whole tensor of a block's name; None if it names a whole tensor.

    >>> parse_block("lm_head.weight[16:32]"), parse_block("lm_head.weight")
    (BlockName(whole='lm_head.weight', rows=range(16, 32)), None)
    """
    found = _NAME.fullmatch(name)
    return (
        None if found is None else BlockName(found["whole"], range(int(found["start"]), int(found["stop"])))
    )


def made_of(name: str, held: Collection[str]) -> tuple[str, ...]:
    """Names of the tensors that one is made of, of those that there are, in the order of their rows; none: not there.

    A block is a part of the whole tensor, and the whole one all its blocks, where there is no tensor of that name.

    >>> made_of("w[2:4]", {"w"}), made_of("w", {"w[2:4]", "w[0:2]", "x"}), made_of("y", {"x"})
    (('w',), ('w[0:2]', 'w[2:4]'), ())
    """
    block = parse_block(name)
    if name in held or (block is not None and block.whole in held):
        return (name if block is None or name in held else block.whole,)
    blocks = [(found.rows.start, x) for x in held if (found := parse_block(x)) and found.whole == name]
    return tuple(x for _, x in sorted(blocks))


def whole_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of whole tensors, where some are there in blocks, in the order of their first ones.

    >>> whole_shapes({"a": (2,), "w[0:2]": (2, 3), "w[2:3]": (1, 3)})
    {'a': (2,), 'w': (3, 3)}
    """
    wholes: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        block = parse_block(name)
        if block is None:
            wholes[name] = shape
        else:
            num_before = wholes[block.whole][0] if block.whole in wholes else 0
            wholes[block.whole] = (num_before + shape[0], *shape[1:])
    return wholes
