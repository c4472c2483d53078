"""A job's course: what each step and evaluation gave, without what the job went back from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from skein.wire.views import EvaluationFinished, JobEvent, StepFinished, WentBack


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A version of the model: what the step that led to it gave, and what validation data say of it.

    `step` counts from 1; version 0 has a validation loss only. Losses are nats per token, or per sample.
    """

    step: int
    wall_s: float
    tokens: int
    """Trained on so far."""
    loss: float | None = None
    validation_loss: float | None = None
    gradient_norm: float | None = None
    balance_loss: float | None = None
    """Mean over sparse layers of a model with experts: 1 where all are used evenly."""
    drop_ratio: float | None = None
    """Share of their choices that found an expert full."""
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    decision: str = ""
    """`apply`, or what became of the step instead."""


MEASURES = (
    "loss",
    "validation_loss",
    "gradient_norm",
    "balance_loss",
    "drop_ratio",
    "learning_rate",
    "tokens_per_s",
    "tokens",
)
"""The fields of a point that are curves."""


class Course:
    """Takes a job's events in order; knows the steps and evaluations that count."""

    def __init__(self, events: Iterable[JobEvent] = ()) -> None:
        self._steps: dict[int, tuple[float, StepFinished]] = {}
        self._evaluations: dict[int, tuple[float, EvaluationFinished]] = {}
        for event in events:
            self.take(event)

    def take(self, event: JobEvent) -> None:
        """Be as far as `event` says."""
        match event.body:
            case StepFinished() as step:
                self._steps[step.record.step + 1] = event.wall_s, step
            case EvaluationFinished() as evaluation:
                self._evaluations[evaluation.version] = event.wall_s, evaluation
            case WentBack(to_version=version):
                for taken in (self._steps, self._evaluations):
                    for gone in [number for number in taken if number > version]:
                        del taken[gone]
            case _:
                pass

    @property
    def steps(self) -> tuple[StepFinished, ...]:
        """Steps that no roll-back has undone, in order."""
        return tuple(self._steps[number][1] for number in sorted(self._steps))

    @property
    def evaluations(self) -> tuple[EvaluationFinished, ...]:
        """Evaluations that no roll-back has undone, in order."""
        return tuple(self._evaluations[number][1] for number in sorted(self._evaluations))

    def points(self) -> tuple[Point, ...]:
        """Points for all versions that a step or an evaluation tells of, in order."""
        tokens, found = 0, []
        for number in sorted(self._steps.keys() | self._evaluations.keys()):
            wall_s, step = self._steps.get(number, (None, None))
            evaluated_s, evaluation = self._evaluations.get(number, (0.0, None))
            tokens += 0 if step is None else step.record.num_tokens
            found.append(
                Point(
                    step=number,
                    wall_s=evaluated_s if wall_s is None else wall_s,
                    tokens=tokens,
                    loss=None if step is None else step.record.loss,
                    validation_loss=None if evaluation is None else evaluation.loss,
                    gradient_norm=None if step is None else step.record.gradient_norm,
                    balance_loss=None if step is None else step.record.balance_loss,
                    drop_ratio=None if step is None else step.record.drop_ratio,
                    learning_rate=None if step is None else step.record.learning_rate,
                    tokens_per_s=None if step is None else step.tokens_per_s,
                    decision="" if step is None else step.record.decision,
                )
            )
        return tuple(found)


def fewer_points(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """At most so many of `points`, evenly; the newest, and all with a validation loss while half of them have room.

    >>> points = [Point(step=step, wall_s=0.0, tokens=0) for step in range(1, 11)]
    >>> [point.step for point in fewer_points(points, 4)]
    [1, 4, 7, 10]
    """
    if len(points) <= most:
        return tuple(points)
    validated = [i for i, point in enumerate(points) if point.validation_loss is not None]
    kept = set(validated[:: 1 + 2 * len(validated) // most])
    every = -(-len(points) // max(1, most - len(kept)))
    kept |= set(range(len(points) - 1, -1, -every))
    return tuple(points[i] for i in sorted(kept))


def measures(point: Point) -> Mapping[str, float]:
    """Values known of `point`, by the names of `MEASURES`."""
    values = {name: getattr(point, name) for name in MEASURES}
    return {name: float(value) for name, value in values.items() if value is not None}
