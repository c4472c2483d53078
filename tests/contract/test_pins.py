"""What is installed from nothing is what was tested, on any machine."""

import re
import tomllib

from tests.contract.source import ROOT

PINS = (ROOT / "constraints.txt").read_text().splitlines()


def test_constraints_are_exact_versions_without_hosts_paths_or_builds() -> None:
    assert [line for line in PINS if not re.fullmatch(r"[a-z0-9.-]+==[0-9a-z.!]+", line)] == []
    assert sorted(PINS) == PINS


def test_torch_is_pinned_for_every_build_of_it() -> None:
    assert "torch==2.13.0" in PINS


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    names = {re.split(r"[\[<>=!;]", line)[0].lower().replace("_", "-") for line in declared} - {"skein-train"}
    assert names - {line.partition("==")[0] for line in PINS} == set()


def test_torch_and_ray_stay_out_of_the_base_installation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    heavy = ("torch", "ray", "transformers", "tokenizers", "scikit-learn")
    assert [line for line in project["dependencies"] if line.startswith(heavy)] == []
