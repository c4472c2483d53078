"""Words in which a reader is refused whose data are not those of the job: the same from a worker and a coordinator."""

from skein.errors import UnfitError

SHOWN = 12
"""Characters of a fingerprint in messages."""


def other_data(found: str, trained_on: str) -> UnfitError:
    """The refusal of a reader that has other data than the job was trained on.

    Args:
        found: fingerprint of the reader's data.
        trained_on: fingerprint of the data of the steps so far.
    """
    hint = (
        f"the job was trained on other data ({trained_on[:SHOWN]}): give this worker the same files, "
        f"or have the job go on with what its workers have now (skein resume JOB --new-data)"
    )
    return UnfitError("data", found[:SHOWN], hint)
