"""Which files a pattern finds, and that looking for them counts as getting further."""

from functools import partial
from pathlib import Path

import pytest

from skein.errors import UnfitError
from skein.storage.outside import Outside
from skein.storage.roots import EVERYTHING, Roots
from worker.data.files import DataFile, open_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.txt", "b.md", ".hidden.txt", "in/c.txt", "in/deeper/d.txt", "in/[e].txt", "other/f.TXT"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "in" / "round").symlink_to(tmp_path)
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "broken.txt").symlink_to("nothing")
    (tmp_path / "itself.txt").symlink_to("itself.txt")
    (tmp_path / "folder.txt").mkdir()
    return tmp_path


def found(folder: Path, *patterns: str) -> tuple[DataFile, ...]:
    return open_files(str(folder), patterns, field="data.sources[0]", roots=EVERYTHING)


@pytest.mark.parametrize(
    "pattern",
    ["*", "*.txt", "**/*.txt", "in/*.txt", "**/**/[ac].*", "*/round/a.txt", "**/deeper/*", "./in/c.txt"],
)
def test_files_are_found_as_python_finds_them(folder: Path, pattern: str) -> None:
    expected = {path.relative_to(folder).as_posix() for path in folder.glob(pattern) if path.is_file()}
    assert [file.name for file in found(folder, pattern)] == sorted(expected)


def test_a_pattern_with_stars_amid_a_name_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"glob: 'a\*\*': .*only between slashes"):
        found(folder, "a**")


async def test_every_entry_of_a_folder_is_a_sign_of_life_though_none_matches(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.bin").touch()
    outside = Outside()
    with pytest.raises(UnfitError, match="matches no file"):
        await outside.answer(partial(found, tmp_path, "*.txt"), "data")
    assert outside.num_moved >= 40


async def test_every_empty_file_is_a_sign_of_life(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").touch()
    outside = Outside()
    # Once when it is listed, once when it is looked for in the roots, once when it is opened.
    assert len(await outside.answer(partial(found, tmp_path, "*.txt"), "data")) == 10
    assert outside.num_moved == 30


def test_files_of_an_offered_folder_are_named_below_it(folder: Path) -> None:
    roots = Roots.of("--data-root", [], usual="data", offers={"books": folder})
    files = open_files("data://books/in", ["**/*.txt"], field="data.sources[0]", roots=roots)
    assert [file.name for file in files] == [file.name for file in found(folder / "in", "**/*.txt")]
    (folder / "in" / "out.txt").symlink_to("/etc/hostname")
    with pytest.raises(UnfitError, match="leads out of what is offered as books"):
        open_files("data://books/in", ["*.txt"], field="data.sources[0]", roots=roots)
