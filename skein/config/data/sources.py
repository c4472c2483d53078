"""Origins of samples: files of several formats, and a bundled set."""

from typing import Annotated, Literal

from pydantic import Field

from skein.spec import Spec


class _Source(Spec):
    """Questions to the origin of samples, with their usual answers."""

    @property
    def is_text(self) -> bool:
        """Whether a tokenizer makes its samples."""
        return False

    @property
    def is_labelled(self) -> bool:
        """Whether its samples are numbers with a class each, for classifiers."""
        return False


class _WholeText(_Source):
    @property
    def is_text(self) -> bool:
        return True


class TextSource(_WholeText):
    """Text files: one file, or a folder with a glob; every file is one document.

    `path`, as of all sources, is `data://NAME`, or a way below it, of what workers offer with `--data NAME=PATH`; or a
    path on the workers, where these and the coordinator take one.
    """

    format: Literal["text"] = "text"
    path: str
    glob: str = "**/*.txt"
    weight: Annotated[float, Field(gt=0)] = 1.0


class JsonlSource(_Source):
    """JSON objects, one per line; the text is under `field`, or for classifiers a list of numbers."""

    format: Literal["jsonl"]
    path: str
    field: str = "text"
    label: str | None = None
    """Key of the class, a whole number from 0 on, for classifiers; null: `field` is text."""
    weight: Annotated[float, Field(gt=0)] = 1.0

    @property
    def is_text(self) -> bool:
        return self.label is None

    @property
    def is_labelled(self) -> bool:
        return self.label is not None


class ArraysSource(_Source):
    """An `.npz` file with numbers `x` (N, ...) and classes `y` (N,), whole numbers from 0 on; kept in memory."""

    format: Literal["arrays"]
    path: str
    weight: Annotated[float, Field(gt=0)] = 1.0

    @property
    def is_labelled(self) -> bool:
        return True


class TokenSource(_Source):
    """A flat little-endian array of token ids, memory-mapped."""

    format: Literal["tokens"]
    path: str
    dtype: Literal["uint8", "uint16", "uint32", "int32"] = "uint16"
    weight: Annotated[float, Field(gt=0)] = 1.0


class ParquetSource(_WholeText):
    """Parquet files: one file, or a folder with a glob; every row is one document, its text in the column `field`."""

    format: Literal["parquet"]
    path: str
    glob: str = "**/*.parquet"
    field: str = "text"
    weight: Annotated[float, Field(gt=0)] = 1.0


class DigitsSource(_Source):
    """scikit-learn's bundled digits: 1,797 grey images of 8 x 8."""

    format: Literal["digits"]
    weight: Annotated[float, Field(gt=0)] = 1.0

    @property
    def is_labelled(self) -> bool:
        return True


SourceSpec = Annotated[
    TextSource | JsonlSource | ParquetSource | TokenSource | DigitsSource | ArraysSource,
    Field(discriminator="format"),
]
