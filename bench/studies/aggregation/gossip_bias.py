"""How far from the minimum momentum leaves gossip: full-batch linear regression on eight peers of a mesh.

Each peer has fifty equations in thirty unknowns of its own, so peers want different things. Every method runs as it
does in a worker, in float64, until nothing moves; `B` is the mean over peers of |x_i - x*|² / |x*|².

Source of the setting: Yuan et al., "DecentLaM" (2021), full-batch linear regression; the noise is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bench.report import Row
from bench.studies.aggregation.measured import Measured
from bench.studies.plot import Chart, Line
from skein.config.aggregation import Gossip
from skein.config.optimizer import SgdSpec
from skein.config.rule import Due, GossipMethod, Reach
from skein.numeric.aggregate.gossip import GossipRule
from skein.numeric.aggregate.rule import Terms
from skein.numeric.walker import Walker
from skein.rng import stream
from skein.topology.graphs import Mixing, mesh
from tests.support.exchanges import exchange, talks_by_row

F64 = NDArray[np.float64]

NUM_PEERS, NUM_EQUATIONS, NUM_UNKNOWNS = 8, 50, 30
RATE, MOMENTUM = 1e-3, 0.8
NUM_STEPS, QUICK_STEPS = 1200, 1000
CURVE_STEPS = 300
GOAL = 1e-9
_NOISE = 1.0  # standard deviation of what the equations contradict each other by


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """One linear regression for each peer, and the minimum of their sum."""

    a_NED: F64
    b_NE: F64
    minimum_D: F64

    def gradient(self, x_ND: F64) -> F64:
        """Of each peer's own half sum of squares."""
        left = np.einsum("ned,nd->ne", self.a_NED, x_ND) - self.b_NE
        return np.asarray(np.einsum("ned,ne->nd", self.a_NED, left))

    def bias(self, x_ND: F64) -> float:
        """B."""
        apart = ((x_ND - self.minimum_D) ** 2).sum(axis=1).mean()
        return float(apart / (self.minimum_D**2).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """B after each step from none, and where the peers ended."""

    biases: tuple[float, ...]
    end_ND: F64


def regression(seed: int = 0) -> Regression:
    """Drawn by standard normals."""
    luck = stream(seed, "linear regression")
    a_NED = luck.standard_normal((NUM_PEERS, NUM_EQUATIONS, NUM_UNKNOWNS))
    common_D = luck.standard_normal(NUM_UNKNOWNS)
    b_NE = a_NED @ common_D + _NOISE * luck.standard_normal((NUM_PEERS, NUM_EQUATIONS))
    left = np.einsum("nei,nej->ij", a_NED, a_NED)
    minimum_D = np.linalg.solve(left, np.einsum("nei,ne->i", a_NED, b_NE))
    return Regression(a_NED=a_NED, b_NE=b_NE, minimum_D=minimum_D)


def course(
    method: GossipMethod, mixing: Mixing, problem: Regression, *, rate: float, momentum: float, num_steps: int
) -> Course:
    """Steps of the rule on all peers, from zero."""
    optimizer = SgdSpec(name="sgd", momentum=momentum, weight_decay=0.0)
    rule = GossipRule(spec=Gossip(rule="gossip", method=method), optimizer=optimizer)
    params = {"x": torch.zeros(NUM_UNKNOWNS, dtype=torch.float64)}
    walkers = [Walker(params=params, state=rule.init(params)).copy() for _ in range(NUM_PEERS)]
    talks = talks_by_row(Due(round=0, reach=Reach.NEIGHBOURS), mixing.rows.tolist())
    x_ND = np.zeros((NUM_PEERS, NUM_UNKNOWNS))
    biases = [problem.bias(x_ND)]
    for step in range(num_steps):
        grads = [{"x": torch.from_numpy(g)} for g in problem.gradient(x_ND)]
        terms = Terms(step=step, learning_rate=rate, gradient_scale=1.0)
        walkers = exchange(rule, walkers, grads, [terms] * NUM_PEERS, talks)
        x_ND = np.stack([walker.params["x"].numpy() for walker in walkers])
        biases.append(problem.bias(x_ND))
    return Course(biases=tuple(biases), end_ND=x_ND)


def measure(*, is_quick: bool) -> Measured:
    """Limits beside those that linear algebra says they must be, and the courses there."""
    problem, on, num_steps = regression(), mesh(NUM_PEERS), QUICK_STEPS if is_quick else NUM_STEPS

    def run(method: GossipMethod, *, rate: float = RATE, momentum: float = MOMENTUM) -> Course:
        return course(method, on, problem, rate=rate, momentum=momentum, num_steps=num_steps)

    dsgd = run("dsgd", momentum=0.0)
    larger = run("dsgd", rate=RATE / (1 - MOMENTUM), momentum=0.0)
    dmsgd, averaged, quasi, ours = (run(x) for x in _WITH_MOMENTUM)
    parallel = course(
        "dmsgd",
        Mixing(rows=np.full((NUM_PEERS, NUM_PEERS), 1 / NUM_PEERS)),
        problem,
        rate=RATE,
        momentum=MOMENTUM,
        num_steps=CURVE_STEPS,
    )
    rows = (
        _same("DecentLaM's limit", ours, dsgd, "DSGD's limit"),
        _same("QG-DmSGD's limit", quasi, dsgd, "DSGD's limit"),
        _same("DmSGD's limit", dmsgd, larger, "DSGD's limit at lr / (1 - momentum)"),
        _times_less("DecentLaM's bias", ours, dmsgd, "DmSGD's"),
        _sooner(ours, dsgd),
    )
    shown = (dsgd, dmsgd, averaged, quasi, ours, parallel)
    return Measured(rows=rows, charts={"gossip-bias": _chart(shown)})


_WITH_MOMENTUM: tuple[GossipMethod, ...] = ("dmsgd", "da_dmsgd", "qg_dmsgd", "decentlam")
_LABELS = ("DSGD", "DmSGD", "DA-DmSGD", "QG-DmSGD", "DecentLaM", "all average (mSGD)")


def _same(what: str, found: Course, like: Course, against: str) -> Row:
    apart = float(np.linalg.norm(found.end_ND - like.end_ND) / np.linalg.norm(like.end_ND))
    return Row(
        what=f"{what}, distance",
        value=apart,
        unit="relative",
        against=f"{against}, B {like.biases[-1]:.3e}",
        ratio=found.biases[-1] / like.biases[-1],
        goal=f"<= {GOAL:g}",
        holds=apart <= GOAL,
        spread=0.0,
    )


def _times_less(what: str, found: Course, like: Course, against: str) -> Row:
    ratio = found.biases[-1] / like.biases[-1]
    return Row(
        what=what,
        value=found.biases[-1],
        unit="B",
        against=f"{against}, {like.biases[-1]:.3e}",
        ratio=ratio,
        goal="<= 1/5 (small rates: 1/25)",
        holds=ratio <= 0.2,
        spread=0.0,
    )


def _sooner(found: Course, like: Course) -> Row:
    """Steps until B is within a tenth of where it ends."""
    taken, others = (_settled(x.biases) for x in (found, like))
    return Row(
        what="DecentLaM, steps until B is within 10 % of its limit",
        value=taken,
        unit="steps",
        against=f"DSGD, {others}",
        ratio=taken / others,
        goal="<= 1/2",
        holds=taken <= others / 2,
        spread=0.0,
    )


def _settled(biases: Sequence[float]) -> int:
    end = biases[-1]
    return 1 + max(k for k, bias in enumerate(biases) if abs(bias - end) > 0.1 * end)


def _chart(shown: Sequence[Course]) -> Chart:
    floor = 1e-9  # all that average go on to zero
    lines = tuple(
        Line(
            label=label,
            look=look % 5,
            points=tuple(
                (float(k), max(bias, floor))
                for k, bias in enumerate(found.biases[: CURVE_STEPS + 1])
                if k % 3 == 0
            ),
        )
        for look, (label, found) in enumerate(zip(_LABELS, shown, strict=True))
    )
    return Chart(
        title="Linear regression on eight peers of a mesh",
        description=(
            "Squared relative distance from the minimum over steps. DmSGD falls fast and stays seven times above DSGD, "
            "which falls slowly; DecentLaM falls fast and ends where DSGD does."
        ),
        x_label="step",
        y_label="squared relative distance",
        lines=lines,
        y_from=floor,
        is_log=True,
    )
