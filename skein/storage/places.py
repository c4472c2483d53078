"""Places that a job may name: data below a root, and checkpoints below a root or in a store that an operator named.

fsspec is never given a URL. Its file systems are made by name, without options, so that what is chained, cached or
rendered by one of its others cannot be reached from a job file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import fsspec

from skein.config.job import JobSpec
from skein.config.location import SCHEMES, Location, parse_location, parse_offered
from skein.config.sweep.trials import named, trials_of
from skein.errors import UnfitError, UserError
from skein.storage.folders import Folder, ObjectFolder, RootedFolder
from skein.storage.roots import EVERYTHING, Roots

FIELD = "checkpoint.url"
OPTION, ROOT_OPTION = "--checkpoint-root", "--data-root"
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Places that one process lets jobs name.

    `data`: where everything that is read lies. `checkpoints`: folders below which a `checkpoint.url` may lead;
    `stores`: buckets, or keys in buckets, likewise, None being any.
    """

    data: Roots
    checkpoints: Roots
    stores: tuple[Location, ...] | None = ()
    schemes: tuple[str, ...] = SCHEMES

    @staticmethod
    def of(
        data_roots: Sequence[Path],
        checkpoint_roots: Sequence[str],
        offers: Mapping[str, Path] | None = None,
    ) -> "Places":
        """Places as an operator names them; where no folder is named it is the usual one. Checkpoint roots may be URLs.

        Args:
            data_roots: folders that jobs may name by path.
            checkpoint_roots: see `checkpoints` and `stores`.
            offers: what jobs may name without knowing where it lies; with any, there is no usual folder of data.

        Raises:
            UserError: one is neither a folder nor a URL that is taken.
        """
        found = [parse_location(x, field=OPTION) for x in checkpoint_roots if "://" in x]
        folders = [Path(root) for root in checkpoint_roots if "://" not in root]
        folders += [Path(location.path) for location in found if location.scheme == "file"]
        stores = tuple(location for location in found if location.scheme != "file")
        return Places(
            data=Roots.of(ROOT_OPTION, data_roots, usual="data", offers=offers),
            checkpoints=Roots.of(OPTION, folders, usual="checkpoints"),
            stores=stores,
        )

    def admit_job(self, job: JobSpec) -> None:
        """Returns if all that the job names may be there, and each trial of its sweep, going by its text.

        Nothing is opened.

        Raises:
            UserError: something lies out of all roots, or is no place.
        """
        for field, path in job.paths():
            if "\0" in path:
                raise UserError(field, path, "holds a zero byte, which no path does: leave it out")
            # Who offers what only workers know.
            if parse_offered(path, field=field) is None and not self.data.may_hold(path):
                raise self.data.outside(path, field=field)
        if job.checkpoint.url is not None:
            self.admit(job.checkpoint.url)
        for trial in trials_of(job):
            try:
                self.admit_job(trial.job)
            except UserError as error:
                raise named(error, trial.number, trial.settings) from error

    def admit(self, url: str) -> Location:
        """Location that `url` names, if checkpoints may lie there by its text; nothing is opened.

        Raises:
            UserError: it is no URL that is taken, or lies out of all roots.
        """
        location = parse_location(url, field=FIELD, schemes=self.schemes)
        if location.scheme == "file":
            is_below = self.checkpoints.may_hold(location.path)
        else:
            is_below = self.stores is None or any(location.is_below(store) for store in self.stores)
        if not is_below:
            raise self._outside(url)
        return location

    def open(self, url: str, *below: str) -> Folder:
        """The folder that is called `below` under `url`; nothing is read or written yet.

        Raises:
            UserError: see `admit`; or a link leads out of all roots, or the package that opens it is not here.
            OSError: its links cannot be followed.
        """
        location = self.admit(url)
        if location.scheme == "file":
            return RootedFolder(self.checkpoints.find(location.path, field=FIELD).child(*below))
        return ObjectFolder(_files_of(location.scheme, url), "/".join((location.path, *below)))

    def _outside(self, url: str) -> UserError:
        stores = "".join(f" or {store}" for store in self.stores or ())
        hint = f"lies out of the checkpoint root {self.checkpoints}{stores}"
        where = "the coordinator and all workers"
        return UserError(FIELD, url, f"{hint}: name a place in it, or start {where} with {OPTION} {url}")


def _files_of(scheme: str, url: str) -> fsspec.AbstractFileSystem:
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        package = _PACKAGES.get(scheme, scheme)
        hint = f"this process lacks what opens {scheme}:// ({error}): pip install {package}"
        raise UnfitError(FIELD, url, hint) from error


ANYWHERE = Places(data=EVERYTHING, checkpoints=replace(EVERYTHING, option=OPTION), stores=None)
"""For a process whose own user names the place."""
