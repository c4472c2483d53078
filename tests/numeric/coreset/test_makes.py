"""Equal rows give equal choices on every processor: sums in another order, other kernels and threads change nothing."""

import os
import platform
import subprocess
import sys

import numpy as np

from skein import rng
from skein.numeric.coreset.choice import choose_coreset
from skein.numeric.coreset.features import F64, Features, last_layer, vectors
from skein.numeric.coreset.greedy import Greedy

NUM_ROWS, NUM_PICKS = 2_500, 90
KERNELS = ("Prescott", "Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX")
"""Kernels of OpenBLAS, by processors, from the oldest; each needs the instructions of that processor."""
NEEDED = {"Sandybridge": "avx", "Haswell": "avx2", "Zen": "avx2", "SkylakeX": "avx512f"}
DIGESTS = {
    "exact": "efb911b51d12",
    "stochastic": "26edf96e913d",
    "partitioned": "f69834cf0a5e",
    "weighted": "1ae7de0eb829",
    "last layer": "08b95cd6ffdb",
}
"""Choices of `digests()`, as every processor makes them."""


def drawn(name: str, num_numbers: int, spread: float = 1.0) -> F64:
    """Rows of whole numbers, by operations that every processor rounds alike, some of them far away."""
    generator = rng.stream(0, "makes", name)
    rows = generator.integers(-(10**6), 10**6, size=(NUM_ROWS, num_numbers)) / 2**10
    rows[generator.integers(NUM_ROWS, size=20)] *= spread
    return np.asarray(rows, np.float64)


def digest(features: Features, form: Greedy, weights: F64 | None = None) -> str:
    groups = np.arange(NUM_ROWS) % 2
    return choose_coreset(features, groups, NUM_PICKS, form=form, seed=1, weights_N=weights).digest[:12]


def digests() -> dict[str, str]:
    """Choices of every form, and by both kinds of features."""
    rows = drawn("rows", 37, spread=1e4)
    return {
        "exact": digest(vectors(rows), Greedy.EXACT),
        "stochastic": digest(vectors(rows), Greedy.STOCHASTIC),
        "partitioned": digest(vectors(rows), Greedy.PARTITIONED),
        "weighted": digest(vectors(rows), Greedy.EXACT, drawn("weights", 1)[:, 0] ** 2 + 0.3),
        "last layer": digest(last_layer(rows, drawn("errors", 7)), Greedy.EXACT),
    }


def test_choices_are_those_of_every_other_machine() -> None:
    assert digests() == DIGESTS


def has(instructions: str | None) -> bool:
    """Whether this processor has such instructions."""
    if instructions is None:
        return True
    with open("/proc/cpuinfo", encoding="ascii") as file:
        return f" {instructions} " in file.read().replace("\n", " \n")


def test_kernels_of_other_processors_and_more_threads_make_the_same_choices() -> None:
    """OpenBLAS takes the kernel that the environment names; on machines other than x86 it keeps its own."""
    is_x86 = platform.machine() == "x86_64"
    kernels = [x for x in KERNELS if not is_x86 or has(NEEDED.get(x))]
    for num_threads, kernel in enumerate(kernels, start=1):
        environment = os.environ | {"OPENBLAS_CORETYPE": kernel, "OPENBLAS_NUM_THREADS": str(num_threads)}
        script = "from tests.numeric.coreset.test_makes import digests; print(digests())"
        found = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == str(DIGESTS), kernel


def test_the_order_of_coordinates_changes_no_choice() -> None:
    rows = drawn("rows", 37, spread=1e4)
    other = rows[:, rng.stream(0, "order").permutation(37)]
    for form in Greedy:
        assert digest(vectors(rows), form) == digest(vectors(other), form)


def test_of_two_rows_that_gain_as_much_the_lower_id_is_picked() -> None:
    """Two rows far from all others, near each other: each gains what the other does, but for how sums are rounded."""
    rows = drawn("pairs", 5)
    for first, second in ((100, 101), (700, 300), (41, 1_200)):
        rows[second] = rows[first] = rows[first] + 1e5 * (1 + first)
        rows[second] += np.array([0.1, 0.7, 0.3, 1.1, 0.9])
    choice = choose_coreset(vectors(rows), np.zeros(NUM_ROWS, np.int64), 6, form=Greedy.EXACT)
    assert {100, 300, 41} <= set(choice.ids.tolist())
    assert not {101, 700, 1_200} & set(choice.ids.tolist())
