"""Tokens a second through a layer of experts, beside one feed-forward of equal arithmetic.

    python -m bench.sparse [--rounds 10] [--json]

One thread, float32; eight experts of width 256 and inner width 344, two for each token, against a feed-forward of inner
width 688: forward and backward of four samples of 256 tokens. Each round takes both, in turns. The ratio is the
median of the rounds'. Ends with one JSON line; exit code 1 if the goal is missed.
"""

import argparse
import sys
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from bench.report import Row, finish, spread
from skein.model.shape import DecoderShape
from skein.model.sparse.experts import ExpertNames, Experts
from skein.types import Precision
from worker.model.decoder import Mlp
from worker.model.pending import Tray
from worker.model.sparse.junction import Junction
from worker.model.sparse.layer import SparseMlp
from worker.transport.memory import keep_message_buffers

GOAL = 0.7
"""Least tokens a second of the experts over those of the feed-forward."""
WIDTH, NUM_INNER = 256, 344
NUM_EXPERTS, NUM_CHOSEN = 8, 2
NUM_SAMPLES, NUM_TOKENS = 4, 256
NUM_WARM_ROUNDS = 3
"""At the start, not counted."""


def layers() -> tuple[SparseMlp, Mlp]:
    """Experts and a feed-forward by which a token is multiplied by equally many numbers."""
    experts = Experts(
        num_experts=NUM_EXPERTS,
        num_chosen=NUM_CHOSEN,
        num_features=WIDTH,
        num_inner=NUM_INNER,
        is_normalised=True,
        names=ExpertNames(module="mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    )
    shape = DecoderShape(hidden_size=WIDTH, intermediate_size=NUM_CHOSEN * NUM_INNER)
    sparse = SparseMlp(experts, Precision.FP32, Tray(), Junction())
    dense = Mlp(shape, torch.float32, Tray())
    draw = torch.Generator().manual_seed(1)
    for parameter in (*sparse.parameters(), *dense.parameters()):
        parameter.data.normal_(std=0.05, generator=draw)
        parameter.grad = torch.zeros_like(parameter)
    return sparse, dense


def seconds(layer: nn.Module, x: Tensor, grad: Tensor) -> float:
    """Seconds of one forward and backward, as a stage does them in training."""
    given = x.clone().requires_grad_()
    begun_s = perf_counter()
    torch.autograd.backward(layer(given), grad)
    return perf_counter() - begun_s


def rounds(num_rounds: int) -> list[tuple[float, float]]:
    """Seconds of the experts and of the feed-forward, round by round."""
    sparse, dense = layers()
    draw = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(NUM_SAMPLES, NUM_TOKENS, WIDTH, generator=draw) for _ in range(2))
    found = []
    for number in range(NUM_WARM_ROUNDS + num_rounds):
        sides = (sparse, dense) if number % 2 else (dense, sparse)
        took_s = {side: seconds(side, x, grad) for side in sides}
        found.append((took_s[sparse], took_s[dense]))
    return found[NUM_WARM_ROUNDS:]


def main() -> int:
    """Run all rounds and print what came of them."""
    parser = argparse.ArgumentParser(prog="bench sparse", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_message_buffers()
    found = rounds(arguments.rounds)
    ratios = [dense_s / sparse_s for sparse_s, dense_s in found]
    num_tokens = NUM_SAMPLES * NUM_TOKENS
    per_s, dense_per_s = (num_tokens / median(column) for column in zip(*found, strict=True))
    if not arguments.json:
        sys.stdout.write(
            f"{NUM_EXPERTS} experts, {NUM_CHOSEN} for each token: {per_s:,.0f} tokens/s; a feed-forward of equal "
            f"arithmetic: {dense_per_s:,.0f} tokens/s; median ratio {median(ratios):.2f}\n"
        )
    row = Row(
        what=f"tokens/s of {NUM_EXPERTS} experts, {NUM_CHOSEN} for each token, forward and backward",
        value=per_s,
        unit="tokens/s",
        against=f"a feed-forward of equal arithmetic: {dense_per_s:,.0f} tokens/s",
        ratio=median(ratios),
        goal=f"at least {GOAL}",
        holds=median(ratios) >= GOAL,
        spread=spread(ratios),
    )
    return finish("sparse", [row])


if __name__ == "__main__":
    sys.exit(main())
