"""Data of a job: sources, how they are read, and what validates."""

from typing import Annotated

from pydantic import Field, model_validator

from skein.config.data.coreset import CoresetSpec
from skein.config.data.sources import SourceSpec
from skein.errors import UserError
from skein.spec import Spec

BYTES = "bytes"
"""The tokenizer that needs no file: a token is a byte."""

HELD_OUT_RATIO = 0.02
"""Share of the samples that validates where a job says nothing about it."""


FIRST_RULES, NEWEST_RULES = 1, 2
"""Versions of the rules by which files become samples.

1: of plain and packed (`.gz`) files in a folder only the plain ones are read, where there are any.
2: both are read, as one list sorted by name.
"""


class DataSpec(Spec):
    """Sources that samples come from, read by the workers that hold the first stage."""

    sources: Annotated[tuple[SourceSpec, ...], Field(min_length=1, max_length=64)]
    tokenizer: str = BYTES
    """`bytes` (256 byte values), or a `tokenizers` JSON file, named as the path of a source is."""
    separator: Annotated[str, Field(max_length=64)] | None = None
    """The token that ends every document, by name, or "" for none; null: the tokenizer's own, NUL for `bytes`."""
    sequence_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 256
    validation: Annotated[tuple[SourceSpec, ...], Field(max_length=64)] = ()
    """Sources to validate on. If there are any, nothing of `sources` is held out."""
    validation_ratio: Annotated[float, Field(ge=0, le=0.5)] | None = None
    """Share of `sources` that is held out to validate on; null: 0.02, or nothing if `validation` has sources."""
    coreset: CoresetSpec = CoresetSpec()
    rules: Annotated[int, Field(ge=FIRST_RULES, le=NEWEST_RULES)] = NEWEST_RULES
    """Version of the rules by which files become samples, recorded at submission so that an upgrade changes no job's
    samples. Give an older one to read what an earlier job read."""

    @model_validator(mode="after")
    def _check(self) -> "DataSpec":
        if self.validation and self.validation_ratio:
            hint = "sources of their own validate, so nothing is held out: leave one of the two away"
            raise UserError("validation_ratio", self.validation_ratio, hint)
        if self.coreset.follows_model and len(self.sources) > 1:
            hint = f"choices by the model are made of one source, here are {len(self.sources)}"
            raise UserError(
                "coreset.feature", self.coreset.feature, f"{hint}: give inputs, or method: random"
            )
        if self.separator is not None and not self.has_text:
            hint = "no source is text, and token ids have their separators already: leave it away"
            raise UserError("separator", self.separator, hint)
        return self

    @property
    def has_text(self) -> bool:
        """Whether a tokenizer is needed."""
        return any(source.is_text for _, source in self.named_sources)

    @property
    def held_out_ratio(self) -> float:
        """Share of `sources` that validates."""
        if self.validation_ratio is not None:
            return self.validation_ratio
        return 0.0 if self.validation else HELD_OUT_RATIO

    @property
    def named_sources(self) -> tuple[tuple[str, SourceSpec], ...]:
        """All sources with their fields, those that validate last."""
        training = ((f"data.sources[{index}]", source) for index, source in enumerate(self.sources))
        others = ((f"data.validation[{index}]", source) for index, source in enumerate(self.validation))
        return (*training, *others)
