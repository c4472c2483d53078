"""Input op and weight op of decoder blocks, beside their whole backward.

    python -m bench.split [--rounds 10] [--blocks 3] [--json]

One thread; a stage of blocks of width 256, two samples of 256 tokens, memory kept by malloc as in a worker. Each round
takes both ways, in turns, from the same input; gradients must be equal bit for bit, and what is put aside as large as
predicted. The ratio is the median of the rounds'. Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from bench.report import Row, finish, spread
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.layers import pending_bytes
from skein.types import Precision, StageIndex, StageSpec
from worker.model.ops import go_back
from worker.model.pending import add_up, held_bytes
from worker.model.stage import Stage, build_stage
from worker.transport.memory import keep_message_buffers

GOALS = {Precision.FP32: 1.10, Precision.BF16: 1.05}
"""Most seconds of both ops over those of the whole backward."""
WIDTH = 256
NUM_SAMPLES = 2
NUM_TOKENS = 256
NUM_WARM_ROUNDS = 3
"""At the start, not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of one backward each way."""

    whole_s: float
    input_s: float
    weight_s: float

    @property
    def ratio(self) -> float:
        """Both ops over the whole backward."""
        return (self.input_s + self.weight_s) / self.whole_s


def model_of(num_blocks: int) -> LlamaModel:
    """Blocks of width 256, inner width 688, four heads."""
    sizes = {
        "vocab_size": 256,
        "hidden_size": WIDTH,
        "intermediate_size": 688,
        "num_hidden_layers": num_blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    return LlamaModel(shape=LlamaShape.model_validate(sizes))


class Sides:
    """The blocks of a model as one stage, and what goes into it and comes back to it."""

    def __init__(self, num_blocks: int, precision: Precision) -> None:
        model, blocks = model_of(num_blocks), StageSpec(index=StageIndex(1), first=1, stop=1 + num_blocks)
        self.stage: Stage = build_stage(
            model,
            blocks,
            sequence_tokens=NUM_TOKENS,
            seed=1,
            precision=precision,
            device=torch.device("cpu"),
        )
        self.pending_bytes = pending_bytes(
            model, blocks, num_samples=NUM_SAMPLES, sequence_tokens=NUM_TOKENS, precision=precision
        )
        for parameter in self.stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        draw = torch.Generator().manual_seed(1)
        self.x, self.grad = (torch.randn(NUM_SAMPLES, NUM_TOKENS, WIDTH, generator=draw) for _ in range(2))

    def round(self, *, is_whole_first: bool) -> Round:
        """One backward each way, in one order or the other."""
        if is_whole_first:
            (whole_s, expected), (input_s, weight_s, found) = self._whole(), self._split()
        else:
            (input_s, weight_s, found), (whole_s, expected) = self._split(), self._whole()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), "gradients differ"
        return Round(whole_s=whole_s, input_s=input_s, weight_s=weight_s)

    def _whole(self) -> tuple[float, list[Tensor]]:
        x, y = self._forward()
        begun_s = perf_counter()
        go_back([y], [self.grad])
        took_s = perf_counter() - begun_s
        assert x.grad is not None
        return took_s, [x.grad, *self._taken()]

    def _split(self) -> tuple[float, float, list[Tensor]]:
        x, y = self._forward()
        begun_s = perf_counter()
        pending = self.stage.put_aside([y], [self.grad])
        between_s = perf_counter()
        held = held_bytes(pending)
        resumed_s = perf_counter()
        add_up(pending)
        ended_s = perf_counter()
        assert held == self.pending_bytes, f"{held} bytes were put aside, {self.pending_bytes} predicted"
        assert x.grad is not None
        return between_s - begun_s, ended_s - resumed_s, [x.grad, *self._taken()]

    def _forward(self) -> tuple[Tensor, Tensor]:
        x = self.x.clone().requires_grad_()
        return x, self.stage(x)

    def _taken(self) -> list[Tensor]:
        """Copies of all gradients, which begin at zero again."""
        grads = [x.grad for x in self.stage.parameters() if x.grad is not None]
        taken = [x.clone() for x in grads]
        for grad in grads:
            grad.zero_()
        return taken


def row_of(precision: Precision, rounds: Sequence[Round], *, num_blocks: int, held_bytes: int) -> Row:
    """The median ratio beside its goal."""
    ratio = median(x.ratio for x in rounds)
    input_s, weight_s, whole_s = (
        median(x) for x in zip(*((x.input_s, x.weight_s, x.whole_s) for x in rounds), strict=True)
    )
    what = (
        f"input op {input_s * 1e3:.1f} ms, weight op {weight_s * 1e3:.1f} ms, {num_blocks} blocks of width "
    )
    return Row(
        what=f"{what}{WIDTH}, {NUM_SAMPLES} x {NUM_TOKENS} tokens, {precision}; {held_bytes} bytes put aside",
        value=(input_s + weight_s) * 1e3,
        unit="ms",
        against=f"the whole backward: {whole_s * 1e3:.1f} ms",
        ratio=ratio,
        goal=f"<= {GOALS[precision]}",
        holds=ratio <= GOALS[precision],
        spread=spread([x.ratio for x in rounds]),
    )


def main() -> int:
    """Take turns, print the median ratio of each precision."""
    parser = argparse.ArgumentParser(prog="skein bench split", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_message_buffers()
    rows: list[Row] = []
    for precision in GOALS:
        sides = Sides(args.blocks, precision)
        rounds = [sides.round(is_whole_first=i % 2 == 0) for i in range(args.rounds + NUM_WARM_ROUNDS)]
        counted = rounds[NUM_WARM_ROUNDS:]
        rows.append(row_of(precision, counted, num_blocks=args.blocks, held_bytes=sides.pending_bytes))
        if not args.json:
            print(f"{precision}: {rows[-1].ratio:.3f} of the whole backward, {rows[-1].what}")
    return finish("split", rows)


if __name__ == "__main__":
    sys.exit(main())
