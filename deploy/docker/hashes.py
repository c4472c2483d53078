"""Prints what an image installs, by version and hashes: `python -m deploy.docker.hashes EXTRA...`.

Versions are those of constraints.txt, hashes those that PyPI tells of the wheels that a Linux image may install. torch
has none here: its builds for CPUs and for each release of CUDA come from indexes of their own, under one version.
"""

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from deploy.docker.requirements import requirements

ROOT = Path(__file__).resolve().parents[2]

INDEX = "https://pypi.org/simple"
ELSEWHERE = {"torch"}
INTERPRETERS = ("py3", "py2.py3", "cp311")
MACHINES = ("x86_64", "aarch64")
TIMEOUT_S = 60.0


def fits(name: str, version: Version) -> bool:
    """Whether an image may install the file `name` as `version` of its package.

    >>> fits("click-8.5.1-py3-none-any.whl", Version("8.5.1")), fits("click-8.5.1.tar.gz", Version("8.5.1"))
    (True, False)
    """
    try:
        _, found, _, tags = parse_wheel_filename(name)
    except InvalidWheelFilename:
        return False
    return found == version and any(
        (tag.platform == "any" or ("manylinux" in tag.platform and tag.platform.endswith(MACHINES)))
        and (tag.interpreter in INTERPRETERS or tag.abi == "abi3")
        for tag in tags
    )


def wheel_hashes(pin: str) -> list[str]:
    """SHA-256 of the wheels of one pin, `name==version`, sorted.

    Raises:
        OSError: the index does not answer.
        ValueError: it has no wheel that fits.
    """
    name, version = pin.split("==")
    request = urllib.request.Request(
        f"{INDEX}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        files = json.load(reply)["files"]
    found = sorted(file["hashes"]["sha256"] for file in files if fits(file["filename"], Version(version)))
    if not found:
        raise ValueError(f"{pin}: the index has no wheel for Linux on {' or '.join(MACHINES)}")
    return found


def lock(extras: Sequence[str]) -> Iterator[str]:
    """Requirements of an image with these extras, and of all that they need, for pip's --require-hashes mode.

    Raises:
        subprocess.CalledProcessError: pip finds no set of versions that go together.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            report.name,
        ]
        wanted = requirements([*extras], ROOT / "pyproject.toml")
        subprocess.run([sys.executable, *command, "-c", str(ROOT / "constraints.txt"), *wanted], check=True)
        parts = [part["metadata"] for part in json.load(report)["install"]]
    pins = sorted(f"{canonicalize_name(part['name'])}=={part['version']}" for part in parts)
    asked = [pin for pin in pins if pin.split("==")[0] not in ELSEWHERE]
    with ThreadPoolExecutor(8) as pool:
        for pin, found in zip(asked, pool.map(wheel_hashes, asked), strict=True):
            yield " \\\n    ".join([pin, *(f"--hash=sha256:{one}" for one in found)])


if __name__ == "__main__":
    print(*lock(sys.argv[1:]), sep="\n")
