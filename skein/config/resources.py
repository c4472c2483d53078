"""Workers that a job wants: how many at least and at most, and where."""

from typing import Annotated

from pydantic import Field, model_validator

from skein.errors import UserError
from skein.spec import Spec

MOST_WORKERS = 1_000_000


class ResourcesSpec(Spec):
    """Workers that a job may be given, where several share a coordinator. By default any, and as many as there are."""

    min_workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = None
    """The job starts with no fewer, and is not shrunk below; null: one for each stage, or all where fewer are here."""
    max_workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = None
    """The job gets no more; null: no limit."""
    sites: tuple[str, ...] = ()
    """Sites that its workers may be at; none: anywhere."""

    @model_validator(mode="after")
    def _check(self) -> "ResourcesSpec":
        least, most = self.min_workers, self.max_workers
        if least is not None and most is not None and least > most:
            hint = f"min_workers is {least}: give at least that, or a smaller min_workers"
            raise UserError("max_workers", most, hint)
        if "" in self.sites:
            raise UserError("sites", "", "give the names of sites, as `skein workers` shows them")
        return self
