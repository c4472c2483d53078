"""The three kinds of failure that are exceptions. A lost peer or a plan that does not fit is none: machines tell those.

`UserError` is the user's to mend, `RemoteError` a peer's fault, `LocalError` ours.
"""


class SkeinError(Exception):
    """Root of everything Skein raises on purpose."""


class UserError(SkeinError, ValueError):
    """A user's mistake: which field, what it was, what would be right.

    >>> str(UserError("batch.samples", -4, "give a whole number of at least 1"))
    'batch.samples: -4: give a whole number of at least 1'
    """

    def __init__(self, field: str, value: object, hint: str) -> None:
        super().__init__(f"{field}: {shown(value)}: {hint}")
        self.field = field
        self.value = value
        self.hint = hint


class UnfitError(UserError):
    """A job names what this process lacks or cannot reach; another may have it."""


class RemoteError(SkeinError):
    """Another process broke the protocol; its message is refused and counted."""


class OutOfRangeError(RemoteError):
    """A number in a message that no honest process sends: which field, what it was, what would be right.

    >>> str(OutOfRangeError("Beat.running_s", -1.0, "give seconds, from 0 to 1e9"))
    'Beat.running_s: -1.0: give seconds, from 0 to 1e9'
    """

    def __init__(self, field: str, value: float, hint: str) -> None:
        super().__init__(f"{field}: {value}: {hint}")
        self.field = field
        self.value = value
        self.hint = hint


class LocalError(SkeinError):
    """This process found its own state wrong."""


def shown(value: object) -> str:
    """A value as people write it: what is said by a word in YAML and JSON, in their word.

    >>> shown(True), shown(None), shown("auto"), shown(0.5)
    ('true', 'null', "'auto'", '0.5')
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(value)
        case _:
            return str(value)
