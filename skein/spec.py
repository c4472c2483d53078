"""Base of every part of a job file."""

from collections.abc import Hashable

from pydantic import BaseModel, ConfigDict, Discriminator


class Spec(BaseModel):
    """A part of a job file: immutable, and no key is silently ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def told_by(key: str, usual: str) -> Discriminator:
    """Tells which form of a field is meant by its `key`; whoever does not say is given the `usual` one."""

    def form(value: object) -> Hashable:
        return value.get(key, usual) if isinstance(value, dict) else getattr(value, key, None)

    return Discriminator(form)
