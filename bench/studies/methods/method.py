"""What every method is: a function from a problem to a routing, anytime and deterministic."""

from collections.abc import Callable
from typing import Protocol

from skein.plan.plan import Infeasible
from skein.plan.route.problem import Problem, Routing

MayGoOn = Callable[[], bool]
"""Asked now and then; a method that hears False answers soon, with the best it has."""


class Method(Protocol):
    """Answers with the problem that it solved (a full pipeline has longer paths than were asked for) and its routing.

    Equal (problem, seed) and equal answers of `may_go_on` give an equal routing.
    """

    def __call__(
        self, problem: Problem, *, seed: int, may_go_on: MayGoOn
    ) -> tuple[Problem, Routing] | Infeasible: ...
