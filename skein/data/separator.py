"""Token that ends every document, so that a model learns where one ends and the next begins."""

from collections.abc import Callable
from dataclasses import dataclass

from skein.errors import UserError

FIELD = "data.separator"
USUAL = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
"""Under these names tokenizers have a token of their own for the end of a text; the first that is there is taken."""
_BYTE = 0
"""NUL, which text does not use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Separator:
    """A token, and what it is called; None: documents run together."""

    token: int | None
    name: str

    def __str__(self) -> str:
        return (
            "nothing: documents run together" if self.token is None else f"{self.name} (token {self.token})"
        )


NOTHING = Separator(token=None, name="")


def separator_of_bytes(wanted: str | None) -> Separator:
    """Separator where a token is a byte: NUL, unless a job asks for another sign, or for none by "".

    Raises:
        UserError: it is more than one byte.

    >>> str(separator_of_bytes(None))
    'NUL (token 0)'
    """
    if wanted is None:
        return Separator(token=_BYTE, name="NUL")
    raw = wanted.encode()
    if len(raw) > 1:
        raise UserError(FIELD, wanted, "with tokenizer bytes give a sign of one byte, or '' for none")
    return Separator(token=raw[0], name=repr(wanted)) if raw else NOTHING


def separator_of(wanted: str | None, token_of: Callable[[str], int | None]) -> Separator:
    """Separator from a tokenizer: its own token for that if it has one, unless a job names one, or "" for none.

    Args:
        token_of: a token by its name; None if the tokenizer has none of that name.

    Raises:
        UserError: the tokenizer has no token of that name.
    """
    if wanted == "":
        return NOTHING
    for name in USUAL if wanted is None else (wanted,):
        token = token_of(name)
        if token is not None:
            return Separator(token=token, name=name)
    if wanted is None:
        return NOTHING
    found = [name for name in USUAL if token_of(name) is not None]
    such_as = f", such as {found[0]}" if found else ""
    hint = f"is no token of the tokenizer: give one that it has{such_as}, or '' for none"
    raise UserError(FIELD, wanted, hint)
