"""What every part of a job file is made of."""

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """A part of a job file: immutable, and no key is silently ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
