"""Prints what the project needs with the extras named on the command line, for pip: `requirements.py worker`."""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def requirements(extras: list[str], project_file: Path) -> list[str]:
    """Requirement lines of the project itself, then those of `extras`, and of the extras that these name in turn.

    Raises:
        KeyError: the project has no such extra.
    """
    project = tomllib.loads(project_file.read_text(encoding="utf-8"))["project"]
    return [
        *map(str, project["dependencies"]),
        *(line for extra in extras for line in _lines(extra, project)),
    ]


def _lines(extra: str, project: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[str]:
    for line in project["optional-dependencies"][extra]:
        ours = re.fullmatch(rf"{project['name']}\[(.+)\]", line)
        if ours is None:
            yield str(line)
        else:
            for inner in ours[1].split(","):
                yield from _lines(inner, project)


if __name__ == "__main__":
    print(*requirements(sys.argv[1:], Path("pyproject.toml")), sep="\n")
