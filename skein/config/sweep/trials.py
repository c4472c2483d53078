"""Trials of a sweep, each as the job that it would be if it were submitted alone.

Rules of this file
- A trial is checked like a job, and so are its keys: none is made up.
- What is drawn for a trial and a key follows from the sweep's seed and these two alone: more trials, or another key in
  the space, leave the others as they are.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from pydantic import JsonValue

from skein import rng
from skein.config.explain import Words
from skein.config.job import JobSpec
from skein.config.load import JobFileErrors, job_from_document
from skein.config.sweep.spec import SweepSpec, ValuesSpec
from skein.errors import UserError

Settings = Mapping[str, JsonValue]
"""Values by dotted key of a job."""
_MOST_CHARACTERS = 1 << 25
"""Characters of all jobs of a sweep together, as the run log has them."""
_KIND = "optimizer.name"
"""Key whose value says which other keys there are beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTrial:
    """A trial: its number from 0, what it replaces, and the job that comes of it."""

    number: int
    settings: Settings
    job: JobSpec


def settings_of(sweep: SweepSpec) -> tuple[Settings, ...]:
    """Settings of all trials, in the order of their numbers; of a grid the last key by name changes first.

    >>> space = {"seed": ValuesSpec(values=(1, 2)), "optimizer.eps": ValuesSpec(values=(1e-8, 1e-6))}
    >>> settings_of(SweepSpec(space=space))[1]
    {'optimizer.eps': 1e-08, 'seed': 2}
    """
    if sweep.trials:
        return sweep.trials
    keys = sorted(sweep.space)
    if sweep.search == "grid":
        lists = [sweep.space[key].values or () for key in keys]
        return tuple(dict(zip(keys, chosen, strict=True)) for chosen in product(*lists))
    return tuple(
        {key: _drawn(sweep.space[key], sweep.seed, trial, key) for key in keys} for trial in range(sweep.size)
    )


def _drawn(space: ValuesSpec, seed: int, trial: int, key: str) -> JsonValue:
    chance = rng.stream(seed, "sweep", trial, key)
    if space.values is not None:
        return space.values[int(chance.integers(len(space.values)))]
    low, high = space.bounds
    if space.log_uniform is None:
        return float(chance.uniform(low, high))
    return min(high, max(low, math.exp(chance.uniform(math.log(low), math.log(high)))))


def trials_of(job: JobSpec) -> tuple[SweepTrial, ...]:
    """The trials of a job with a sweep; of any other there are none.

    Raises:
        UserError: a key is not in the job, or the job refuses a value; it names trial, key and value.
    """
    return () if job.sweep is None else _trials_of(_Same(job))


class _Same:
    """A job by its text, which is made once it is compared with another: whoever asks again asks for the very same."""

    def __init__(self, job: JobSpec) -> None:
        self.job = job

    @cached_property
    def text(self) -> str:
        """Canonical JSON."""
        return self.job.canonical_json()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and (self.job is other.job or self.text == other.text)

    def __hash__(self) -> int:
        return hash(self.job.name)


# Whoever goes on with sweeps, or tells of them, asks for those of all that have not ended.
@lru_cache(maxsize=64)
def _trials_of(same: _Same) -> tuple[SweepTrial, ...]:
    text = same.text
    # As whoever reads the run log has it.
    job = JobSpec.model_validate_json(text)
    assert job.sweep is not None, "only a sweep has trials"
    if len(text) * job.sweep.size > _MOST_CHARACTERS:
        most = _MOST_CHARACTERS // len(text)
        hint = f"each is a job of {len(text)} characters: give at most {most}, or a smaller job"
        raise UserError("sweep", Words(f"{job.sweep.size} trials"), hint)
    return tuple(_trial(job, number, found) for number, found in enumerate(settings_of(job.sweep)))


def _trial(job: JobSpec, number: int, settings: Settings) -> SweepTrial:
    document: dict[str, JsonValue] = {**job.model_dump(mode="json"), "sweep": None}
    if _KIND in settings and settings[_KIND] != job.optimizer.name:
        # What the other kind is given by default is none of this one's business.
        document["optimizer"] = job.optimizer.model_dump(mode="json", exclude_defaults=True)
    # The kind first: it has keys of its own.
    for key in sorted(settings, key=lambda key: key != _KIND):
        _replace(document, key, settings, number)
    try:
        trial = job_from_document({**document})
    except JobFileErrors as error:
        raise named(error.errors[0], number, settings) from error
    except UserError as error:
        raise named(error, number, settings) from error
    return SweepTrial(number=number, settings=settings, job=trial)


def named(error: UserError, number: int, settings: Settings) -> UserError:
    """A mistake of a trial's job, with the trial: of all that it sets, or of the key that is meant."""
    shown = ", ".join(f"{key}: {json.dumps(value)}" for key, value in settings.items())
    meant = f"trial {number} of sweep ({shown}), {error.field}"
    return UserError(meant, error.value, error.hint)


_NOT_SWEPT = ("name", "priority", "sweep", "version")
"""Keys of the sweep as a whole."""


def _replace(document: dict[str, JsonValue], key: str, settings: Settings, number: int) -> None:
    """Put a value in the place of the one that is there."""
    *way, last = re.findall(r"[^.\[\]\s]+", key) or [""]
    place: JsonValue = document
    for part in way:
        place = _entry(place, part)
    # What keys an optimizer of another kind has its own check tells.
    is_known = _entry(place, last) is not _NOTHING or (isinstance(place, dict) and way == ["optimizer"])
    if not is_known or (way or [last])[0] in _NOT_SWEPT:
        hint = "is no key that trials may differ in: give one of the job's, such as optimizer.learning_rate"
        raise UserError(f"trial {number} of sweep", Words(key), hint)
    if isinstance(place, dict):
        place[last] = settings[key]
    elif isinstance(place, list):
        place[int(last)] = settings[key]


_NOTHING: JsonValue = {"": ""}
"""Entry of what has none."""


def _entry(place: JsonValue, part: str) -> JsonValue:
    if isinstance(place, dict):
        return place.get(part, _NOTHING)
    if isinstance(place, list) and part.isdecimal() and int(part) < len(place):
        return place[int(part)]
    return _NOTHING
