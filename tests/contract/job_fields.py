"""Lists what a job file may say; `python -m tests.contract.job_fields` writes the committed list anew."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from skein.config.job import JobSpec

LISTED = Path(__file__).with_name("job_fields.txt")


def field_paths(spec: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all fields under `spec`; where a field has several forms, the form stands in brackets."""
    for name, field in spec.model_fields.items():
        forms = _specs(field.annotation)
        if not forms:
            yield f"{prefix}{name}"
        for form in forms:
            chosen = f"[{form.__name__}]" if len(forms) > 1 else ""
            yield from field_paths(form, f"{prefix}{name}{chosen}.")


def listing() -> str:
    return "".join(f"{path}\n" for path in field_paths(JobSpec))


def _specs(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [spec for part in get_args(annotation) for spec in _specs(part)]


if __name__ == "__main__":
    LISTED.write_text(listing())
