"""Nothing leaves a root: not by its text, not by a link, not by what changes between a look and an opening."""

import os
from pathlib import Path

import pytest

from skein.config.location import parse_offers
from skein.errors import UnfitError, UserError
from skein.storage.folders import RootedFolder
from skein.storage.places import Places
from skein.storage.roots import Inside, Roots

FIELD = "data.sources[0].path"
SECRET = b"not for jobs"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a file, and a secret beside the root."""
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "secret").write_bytes(SECRET)
    (tmp_path / "root" / "books").mkdir(parents=True)
    (tmp_path / "root" / "books" / "a.txt").write_bytes(b"a")
    return tmp_path / "root"


def roots_of(*folders: Path) -> Roots:
    return Roots.of("--data-root", folders, usual="data")


def read(place: Inside) -> bytes:
    with place.open() as file:
        return file.read()


def test_what_lies_in_a_root_is_read(root: Path) -> None:
    found = roots_of(root / "none", root).find(str(root / "books" / "a.txt"), field=FIELD)
    assert read(found) == b"a"
    assert found.path == root / "books" / "a.txt"


def test_links_within_roots_are_followed_also_those_of_the_root_itself(root: Path) -> None:
    (root / "newest").symlink_to("books")
    (root.parent / "alias").symlink_to(root)
    roots = roots_of(root.parent / "alias")
    assert roots.may_hold(str(root.parent / "alias" / "newest" / "a.txt"))
    assert read(roots.find(str(root / "newest" / "a.txt"), field=FIELD)) == b"a"
    assert read(roots.find(str(root.parent / "alias" / "newest" / "a.txt"), field=FIELD)) == b"a"


@pytest.mark.parametrize(
    "way", ["{}/../secret", "{}/books/../../secret", "{}/link", "{}/out/secret", "/etc/passwd"]
)
def test_what_leads_out_is_refused_with_the_name_of_the_root(root: Path, way: str) -> None:
    (root / "link").symlink_to("../secret")
    (root / "out").symlink_to(root.parent / "beside")
    with pytest.raises(
        UserError, match=r"leads out of the data root .*root: put it there, .* --data-root"
    ) as failure:
        roots_of(root).find(way.format(root), field=FIELD)
    assert failure.value.field == FIELD


def test_a_folder_whose_name_only_begins_like_the_root_is_outside(root: Path) -> None:
    (root.parent / "root2").mkdir()
    with pytest.raises(UserError):
        roots_of(root).find(str(root.parent / "root2"), field=FIELD)
    assert not roots_of(root).may_hold(str(root.parent / "root2"))


def test_what_became_a_link_after_it_was_judged_is_not_followed(root: Path) -> None:
    found = roots_of(root).find(str(root / "books" / "a.txt"), field=FIELD)
    (root / "books" / "a.txt").unlink()
    (root / "books" / "a.txt").symlink_to(root.parent / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        found.open()
    found = roots_of(root).find(str(root / "books" / "secret"), field=FIELD)
    (root / "books").rename(root / "old")
    (root / "books").symlink_to(root.parent / "beside")
    with pytest.raises(OSError, match="Not a directory"):
        found.open()


def test_only_ordinary_files_are_read(root: Path) -> None:
    os.mkfifo(root / "pipe")
    for name in ("pipe", "books"):
        with pytest.raises(OSError, match="not a regular file"):
            roots_of(root).find(str(root / name), field=FIELD).open()


# --- checkpoints ---


# --- what is offered under names ---


def offering(**offers: Path) -> Roots:
    return Roots.of("--data-root", [], usual="data", offers=offers)


def test_what_is_offered_is_found_by_name_and_below(root: Path) -> None:
    roots = offering(books=root / "books", corpus=root / "books" / "a.txt")
    for path in ("data://books/a.txt", "data://corpus"):
        assert read(roots.find(path, field=FIELD)) == b"a"
    assert roots.find("data://books", field=FIELD).is_folder()


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        (
            "data://films",
            r"is not offered by this worker, which offers data://books, data://other: .* --data films=PATH",
        ),
        ("data://books/link", r"leads out of what is offered as books"),
        ("data://books/across/secret", r"leads out of what is offered as books"),
        ("/etc/passwd", r"is a bare path, and this worker lets jobs name data://books, data://other alone"),
        ("books/a.txt", r"is a bare path"),
    ],
)
def test_nothing_else_is_found(root: Path, path: str, cause: str) -> None:
    (root / "books" / "link").symlink_to(root.parent / "secret")
    (root / "books" / "across").symlink_to(root.parent / "beside")
    roots = offering(books=root / "books", other=root.parent / "beside")
    with pytest.raises(UnfitError, match=cause):
        roots.find(path, field=FIELD)


@pytest.mark.parametrize(
    "path", ["data://", "data://../a", "data://a/../b", "data://a//b", "data:a", "data://a b"]
)
def test_what_is_no_name_is_the_jobs_mistake(root: Path, path: str) -> None:
    with pytest.raises(UserError) as failure:
        offering(a=root).find(path, field=FIELD)
    assert not isinstance(failure.value, UnfitError)


def test_a_root_beside_offers_takes_plain_paths(root: Path) -> None:
    roots = Roots.of("--data-root", [root], usual="data", offers={"books": root / "books"})
    assert read(roots.find(str(root / "books" / "a.txt"), field=FIELD)) == b"a"


@pytest.mark.parametrize(
    "offers", [["books"], ["=/x"], ["books="], ["a/b=/x"], ["a=/x", "a=/y"], [f"n{i}=/x" for i in range(65)]]
)
def test_offers_that_are_none_are_refused(offers: list[str]) -> None:
    with pytest.raises(UserError, match="--data: "):
        parse_offers(offers)


def test_a_url_outside_of_the_roots_is_refused_before_and_when_it_is_opened(root: Path) -> None:
    (root / "out").symlink_to(root.parent / "beside")
    places = Places.of([], [str(root), "s3://bucket/runs"])
    for url in (str(root.parent / "beside"), "/etc", "s3://bucket/other", "s3://bucket", "gs://bucket/runs"):
        with pytest.raises(
            UserError,
            match=r"lies out of the checkpoint root .*root or s3://bucket/runs: .*--checkpoint-root",
        ):
            places.admit(url)
    assert str(places.admit("s3://bucket/runs/mine")) == "s3://bucket/runs/mine"
    assert str(places.admit(str(root / "out"))) == str(root / "out")
    with pytest.raises(UserError, match="leads out of the checkpoint root"):
        places.open(str(root / "out"))


def test_files_are_kept_whole_and_found_again(root: Path) -> None:
    files = Places.of([], [str(root)]).open(str(root / "jobs"), "small-1")
    assert (files.list(""), files.size("v1/a"), files.list("v1")) == ((), None, ())
    files.put("v1/a", b"one")
    files.put("v1/a", b"other")
    files.put_file("v1/b", root / "books" / "a.txt")
    assert (files.list(""), files.list("v1"), files.size("v1/a")) == (["v1"], ["a", "b"], 5)
    with files.open("v1/a") as file:
        assert file.read() == b"other"
    for path in ("v1/a", "v1/b", "v1/c", "v1", "v2"):
        files.delete(path)
    assert files.list("") == []


def test_a_link_among_checkpoints_is_never_written_through(root: Path) -> None:
    (root / "small-1").mkdir()
    (root / "small-1" / "v1").symlink_to(root.parent / "beside")
    (root / "small-1" / "v2").mkdir()
    (root / "small-1" / "v2" / "a").symlink_to(root.parent / "secret")
    files = Places.of([], [str(root)]).open(str(root), "small-1")
    with pytest.raises(OSError, match="Not a directory"):
        files.put("v1/secret", b"")
    files.put("v2/a", b"ours")
    assert (root.parent / "secret").read_bytes() == SECRET
    assert (root.parent / "beside" / "secret").read_bytes() == SECRET
    assert (root / "small-1" / "v2" / "a").read_bytes() == b"ours"


def test_a_root_that_is_not_there_yet_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    files = Places.of([], [str(tmp_path / "new" / "root")]).open(str(tmp_path / "new" / "root" / "jobs"))
    assert isinstance(files, RootedFolder)
    files.put("a", b"1")
    assert (tmp_path / "new" / "root").stat().st_mode & 0o777 == 0o700


def test_a_path_with_a_zero_byte_is_refused_as_a_users_mistake(root: Path) -> None:
    with pytest.raises(UserError, match="zero byte"):
        roots_of(root).find(f"{root}/books\0", field=FIELD)
