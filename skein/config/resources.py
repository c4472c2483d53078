"""Workers that a job wants: how many at least and at most, where, and with which labels."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from skein.errors import UserError
from skein.spec import Spec
from skein.types import WORKER_NAME_PATTERN

MOST_WORKERS = 1_000_000
MAX_LABELS = 16
"""Labels of one worker, and of those that one job asks for."""
_LABEL_HINT = "give KEY=VALUE, each of up to 64 letters, digits, dots, dashes and underscores, as in gpu=h100"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Label:
    """Label of a worker: what its owner says of it, for jobs to ask for.

    >>> str(Label(key="gpu", value="h100"))
    'gpu=h100'
    """

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def parse_labels(texts: Iterable[str]) -> tuple[Label, ...]:
    """Labels of a worker from texts such as `gpu=h100`, sorted.

    Raises:
        UserError: a text is no label, a key comes twice, or there are too many.

    >>> [str(label) for label in parse_labels(["gpu=h100", "disk=ssd"])]
    ['disk=ssd', 'gpu=h100']
    """
    parts = [text.partition("=") for text in texts]
    labels = tuple(sorted(Label(key=key, value=value) for key, _, value in parts))
    check_labels("label", labels)
    return labels


def check_labels(field: str, labels: Collection[Label]) -> None:
    """Refuse labels that a worker cannot have.

    Raises:
        UserError: one is malformed, a key comes twice, or there are too many.
    """
    for label in labels:
        if not all(re.fullmatch(WORKER_NAME_PATTERN, part) for part in (label.key, label.value)):
            raise UserError(field, str(label)[:160], _LABEL_HINT)
    if len(labels) > MAX_LABELS:
        raise UserError(field, f"{len(labels)} labels", f"give {MAX_LABELS} at most")
    keys = sorted(label.key for label in labels)
    for key, following in pairwise(keys):
        if key == following:
            raise UserError(field, key, "give each key once, with one value")


class ResourcesSpec(Spec):
    """Workers that a job may be given, where several share a coordinator. By default any, and as many as there are."""

    min_workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = None
    """The job starts with no fewer, and is not shrunk below; null: one for each stage, or all where fewer are here."""
    max_workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = None
    """The job gets no more; null: no limit."""
    sites: tuple[str, ...] = ()
    """Sites that its workers may be at; none: anywhere."""
    labels: Mapping[str, str] = {}
    """Labels that each of its workers must have (`skein worker up --label KEY=VALUE`); none: any workers."""

    @model_validator(mode="after")
    def _check(self) -> "ResourcesSpec":
        least, most = self.min_workers, self.max_workers
        if least is not None and most is not None and least > most:
            hint = f"min_workers is {least}: give at least that, or a smaller min_workers"
            raise UserError("max_workers", most, hint)
        if "" in self.sites:
            raise UserError("sites", "", "give the names of sites, as `skein workers` shows them")
        check_labels("labels", self.wanted_labels)
        return self

    def __hash__(self) -> int:
        # A mapping has none.
        return hash((self.min_workers, self.max_workers, self.sites, self.wanted_labels))

    @property
    def wanted_labels(self) -> frozenset[Label]:
        """Labels that each worker must have."""
        return frozenset(Label(key=key, value=value) for key, value in self.labels.items())

    @property
    def takes_all(self) -> bool:
        """Whether any workers will do, however many there are."""
        return self.min_workers is None and self.max_workers is None and not self.sites and not self.labels

    @property
    def where(self) -> str:
        """Sites and labels of workers that will do, in words that follow what they are; empty: any will.

        >>> ResourcesSpec(sites=("lyon", "paris"), labels={"gpu": "h100"}).where
        ' at lyon or paris with gpu=h100'
        """
        sites = f" at {' or '.join(self.sites)}" if self.sites else ""
        labels = f" with {', '.join(map(str, sorted(self.wanted_labels)))}" if self.labels else ""
        return sites + labels

    def allows(self, site: str, labels: Collection[Label]) -> bool:
        """Whether a worker of this site and with these labels will do."""
        return (not self.sites or site in self.sites) and self.wanted_labels.issubset(labels)
