"""Published times of exchanges and experts: two clusters and three links, for layers as Pan et al. vary them.

Sources
- Pan et al., FSMoE, 2025, and https://github.com/xpan413/FSMoE, tools/optim.py: milliseconds by elements, of products
  by multiplications.
- The same, testbed A, as quoted by others: its exchange takes 2.21e-7 ms of each unit, taken for a byte, which is what
  such a network allows. What we do not know of it is taken from elsewhere: for each call the 0.337 ms of its gathers,
  for products the authors' file.
- Links that the authors of SkipPipe (Blagoev et al., 2025) list between cities, and within one: milliseconds, GiB/s.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from skein.plan.pieces.line import TimeLine

_ELEMENT_BYTES = 4
NUM_SHARDS = 8
"""Devices over which the authors' layers are spread."""

EXPERTS = TimeLine(alpha_s=0.591943532e-3, beta_s=5.6847387697e-14)
"""Products, by multiplications."""


def _link(latency_ms: float, gib_per_s: float) -> TimeLine:
    return TimeLine(alpha_s=latency_ms / 1000, beta_s=_ELEMENT_BYTES / (gib_per_s * 2**30))


EXCHANGES: Mapping[str, TimeLine] = {
    "FSMoE's file": TimeLine(alpha_s=0.23515350484e-3, beta_s=1.8543323833e-9),
    "FSMoE's testbed A": TimeLine(alpha_s=0.337e-3, beta_s=_ELEMENT_BYTES * 2.21e-10),
    "within a city": _link(1, 2.0),
    "Belgium to Germany": _link(4, 0.2425),
    "Australia to London": _link(132, 0.0093994140625),
}
"""Exchanges, by elements of a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLayer:
    """A layer of experts: rows of one device, and features of rows and within experts."""

    num_rows: int
    num_features: int
    num_inner: int

    def exchange(self, line: TimeLine) -> TimeLine:
        """Seconds of an exchange by rows."""
        return TimeLine(alpha_s=line.alpha_s, beta_s=line.beta_s * self.num_features)

    def experts(self) -> TimeLine:
        """Seconds of experts by rows, forward; as long again for gradients of rows, and for those of matrices."""
        num_products = 3 * self.num_features * self.num_inner
        return TimeLine(alpha_s=EXPERTS.alpha_s, beta_s=EXPERTS.beta_s * num_products)


def layers() -> Iterator[PublishedLayer]:
    """72 layers, as the authors vary them."""
    for samples, tokens, hidden, widening, factor in product(
        (1, 4), (512, 1024, 2048), (1024, 2048, 4096), (2, 4), (1.2, 2.4)
    ):
        yield PublishedLayer(
            num_rows=int(factor * samples * tokens / NUM_SHARDS),
            num_features=hidden,
            num_inner=widening * hidden,
        )
