"""Sweep of a job file: keys of the job that trials differ in, their values, and how trials are compared."""

import json
from collections.abc import Mapping
from math import isinf, prod
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, model_validator

from skein.config.explain import Words
from skein.config.sweep.rows import Fuse
from skein.errors import UserError
from skein.spec import Spec

MOST_TRIALS = 1024
USUAL_ROWS = 16
"""Rows of an array where nothing is said: more gain little, and one that ends late holds up more."""


def _or_a_list(schema: dict[str, JsonValue]) -> None:
    """Tell editors that a list may stand for a mapping with `values`."""
    schema["type"] = ["object", "array"]


class ValuesSpec(Spec):
    """Values of a key: a list of them, or bounds between which `random` draws."""

    model_config = ConfigDict(json_schema_extra=_or_a_list)

    values: Annotated[tuple[JsonValue, ...], Field(min_length=1, max_length=MOST_TRIALS)] | None = None
    """Values to try; a list in place of all this says the same."""
    uniform: tuple[float, float] | None = None
    """Bounds of a number that is drawn evenly between them."""
    log_uniform: tuple[float, float] | None = None
    """Bounds, above 0, of a number whose logarithm is drawn evenly. Take it for what spans decades, such as rates."""

    @model_validator(mode="before")
    @classmethod
    def _listed(cls, given: object) -> object:
        if isinstance(given, list | tuple):
            given = {"values": given}
        if isinstance(given, dict):
            # Strict as JSON is, and no JSON any more: there lists would do.
            return {key: tuple(x) if isinstance(x, list) else x for key, x in given.items()}
        if isinstance(given, ValuesSpec):
            return given
        raise UserError("values", given, "give a list of values, uniform or log_uniform")

    @model_validator(mode="after")
    def _check(self) -> "ValuesSpec":
        if [self.values, self.uniform, self.log_uniform].count(None) != 2:
            raise UserError("values", Words("none, or several ways"), "give a list, uniform or log_uniform")
        if self.values is not None:
            if len({json.dumps(value, sort_keys=True) for value in self.values}) < len(self.values):
                raise UserError("values", list(self.values), "give each value once")
            return self
        low, high = self.bounds
        field = "uniform" if self.log_uniform is None else "log_uniform"
        if low >= high:
            raise UserError(field, [low, high], "give the lower bound first, then a higher one")
        if self.log_uniform is not None and low <= 0:
            raise UserError(field, [low, high], "give bounds above 0: only those have logarithms")
        if isinf(high - low):
            raise UserError("uniform", [low, high], "give bounds less far apart")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of what is drawn."""
        found = self.uniform or self.log_uniform
        assert found is not None, "values are not drawn"
        return found


class SweepSpec(Spec):
    """Trials of a job: each is the job with some keys replaced, and is trained for `budget` unless it ends early."""

    search: Literal["grid", "random", "hyperband"] = "grid"
    """`grid`: every combination of `space`; `random`: `num_trials` drawn from it, each trained to its end; `hyperband`:
    likewise drawn, or listed, and the worst are ended early: after each rung one of `eta` goes on."""
    space: Mapping[str, ValuesSpec] = {}
    """Values by the dotted key of the job, such as `optimizer.learning_rate`."""
    trials: tuple[Mapping[str, JsonValue], ...] = ()
    """Values of each trial by dotted key, instead of a space."""
    num_trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = None
    """Trials to draw; of a grid or a list of trials there are as many as it has."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of what is drawn from the space. The seed that a trial trains with is its job's."""
    metric: Literal["loss", "evaluation_loss"] = "loss"
    """Measure that trials are compared by: the mean loss of their newest round of steps (of a trial alone, its newest
    step), or that of their newest evaluation, which says more."""
    goal: Literal["min", "max"] = "min"
    """Whether the least or the greatest measure is the best."""
    eta: Annotated[int, Field(ge=2, le=16)] = 3
    """Times fewer trials that each rung of `hyperband` has; steps grow by as much."""
    least_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps after which `hyperband` compares trials first; null: a 27th of the budget, or so. Raise it where losses say
    little as early as that, for instance in a warm-up."""
    num_brackets: Annotated[int, Field(ge=1, le=16)] = 1
    """Brackets that `hyperband` shares its trials out to; each later one compares first when the one before does so for
    the second time. Raise it where good trials may begin slowly."""
    fuse: Fuse = "auto"
    """Training of trials that differ in numbers only as rows of one array: `auto` if a probe at the worker finds that
    worth it, else in turn; `always`; or `never`, and each trial is a job of its own."""
    min_speedup: Annotated[float, Field(ge=1, le=100)] = 1.10
    """Times as fast as in turn that rows have to be together under `auto`."""
    per_array: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = None
    """Most rows of an array; null: 16, or fewer where memory or the number of workers says so."""
    round_steps: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Steps of each row between two commits, which is what a death costs; null: about two seconds of them."""

    @model_validator(mode="after")
    def _check(self) -> "SweepSpec":
        if not self.space and not self.trials:
            raise UserError("space", Words("empty"), "give keys and their values to try, or trials")
        if self.space and self.trials:
            raise UserError("space", Words("beside trials"), "give either space or trials")
        for key, values in self.space.items():
            if values.values is None and self.search == "grid":
                hint = "a grid has no drawn values: give a list of them, or search: random"
                raise UserError(f"space.{key}", Words("drawn"), hint)
        self._check_number()
        return self

    def _check_number(self) -> None:
        if self.trials or self.search == "grid":
            if self.num_trials is not None:
                hint = (
                    f"there are {self.size} trials, whatever this says: leave it away, or give search: random"
                )
                raise UserError("num_trials", self.num_trials, hint)
            if self.trials and self.search == "random":
                raise UserError("search", "random", "trials are listed, not drawn: leave it away")
        elif self.num_trials is None:
            raise UserError("num_trials", Words("missing"), "say how many are to be drawn, such as 20")
        if self.size > MOST_TRIALS:
            raise UserError("space", Words(f"{self.size} trials"), f"give at most {MOST_TRIALS}")

    @property
    def most_rows(self) -> int:
        """Rows of an array, at most."""
        return 1 if self.fuse == "never" else self.per_array or USUAL_ROWS

    @property
    def size(self) -> int:
        """Number of trials."""
        if self.trials:
            return len(self.trials)
        if self.search != "grid":
            return self.num_trials or 0
        return prod(len(x.values or ()) for x in self.space.values())

    def __hash__(self) -> int:
        # Mappings have none.
        return hash(self.model_dump_json())
