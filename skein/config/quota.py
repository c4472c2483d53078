"""Quotas: what a coordinator's operator lets the jobs of one namespace take together."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Final

from pydantic import Field, ValidationError, model_validator

from skein.config.explain import explain_mistakes
from skein.config.load import Document, JobFileErrors, parse_document
from skein.errors import UserError
from skein.spec import Spec
from skein.units import format_bytes, parse_bytes

_SIZES: Final = ("job_bytes", "stored_bytes")
_MOST = 2**60
_Count = Annotated[int, Field(ge=1, le=1_000_000)] | None
_Bytes = Annotated[int, Field(ge=1, le=_MOST)] | None


class QuotaSpec(Spec):
    """Bounds for the jobs of a namespace; null: none. Sizes may have units, as in `50 GiB`.

    By default nothing is bounded here: only an operator knows what is scarce and who is to have it, and bounds on the
    whole coordinator (1,000 jobs that wait, 1 MiB for a job file, room left on the disk) hold anyway.
    """

    workers: _Count = None
    """Workers that its jobs have together."""
    running_jobs: _Count = None
    """Jobs that have workers."""
    queued_jobs: _Count = None
    """Jobs that wait for workers; who submits one more is refused."""
    job_bytes: _Bytes = None
    """Size of a job file, as it is sent."""
    stored_bytes: _Bytes = None
    """Checkpoints of its jobs, wherever they lie. One that is over is not taken, and the job goes on without."""

    @model_validator(mode="before")
    @classmethod
    def _read_sizes(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {key: _bytes(key, value) if key in _SIZES else value for key, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUse:
    """Quota of a namespace that has a bound: its name, how much there is of it, and the bound."""

    quota: str
    used: int
    most: int

    @property
    def shown(self) -> str:
        """Use and bound, for people.

        >>> QuotaUse(quota="stored_bytes", used=1 << 30, most=4 << 30).shown
        'stored_bytes 1.0 GiB of 4.0 GiB'
        """
        show: Callable[[int], str] = format_bytes if self.quota.endswith("_bytes") else str
        return f"{self.quota} {show(self.used)} of {show(self.most)}"


class QuotasSpec(Spec):
    """Quotas of all namespaces: those of the ones that are named, and of each other one `default`."""

    default: QuotaSpec = QuotaSpec()
    """Quota of every namespace; what is said of one by name takes the place of what is said here."""
    namespaces: dict[str, QuotaSpec] = Field(default_factory=dict)

    def of(self, namespace: str) -> QuotaSpec:
        """The quota of a namespace.

        >>> quotas = parse_quotas("{default: {workers: 4, queued_jobs: 9}, namespaces: {lab: {workers: null}}}")
        >>> quotas.of("lab").workers, quotas.of("lab").queued_jobs, quotas.of("mill").workers
        (None, 9, 4)
        """
        own = self.namespaces.get(namespace)
        if own is None:
            return self.default
        return self.default.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


UNBOUNDED: Final = QuotasSpec()
"""No quotas at all."""


def parse_quotas(text: str, *, origin: str = "quotas") -> QuotasSpec:
    """The quotas that the YAML in `text` describes.

    Raises:
        JobFileErrors: all mistakes that could be found.
    """
    document = parse_document(text, origin=origin)
    try:
        return QuotasSpec.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        raise JobFileErrors(explain_mistakes(error, _schema())) from error


@cache
def _schema() -> Document:
    return QuotasSpec.model_json_schema()


def _bytes(name: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise UserError(name, value, "give a size such as '50 GiB'") from error
