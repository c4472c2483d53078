"""Separator of a job's documents, as far as it can be told here: a tokenizer's file may lie on workers only."""

import json
from pathlib import Path

from skein.config.data.spec import BYTES, DataSpec
from skein.data.separator import separator_of, separator_of_bytes


def end_of_documents(data: DataSpec) -> str | None:
    """Separator that ends every document, in words; None where the data are no text.

    Raises:
        UserError: what the job asks for is no token.
    """
    if not data.has_text:
        return None
    if data.tokenizer == BYTES:
        return str(separator_of_bytes(data.separator))
    tokens = _vocabulary(Path(data.tokenizer))
    if tokens is None:
        return data.separator or "what the tokenizer has for that; its file cannot be read here"
    return str(separator_of(data.separator, tokens.get))


def _vocabulary(path: Path) -> dict[str, int] | None:
    """The tokens of a `tokenizers` JSON file by name; None if it cannot be read here."""
    try:
        found: object = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        return None
    tokens: dict[str, int] = {}
    vocabulary = found["model"].get("vocab")
    if isinstance(vocabulary, dict):
        tokens |= {str(name): number for name, number in vocabulary.items() if isinstance(number, int)}
    elif isinstance(vocabulary, list):  # of Unigram: pairs of token and score
        tokens |= {
            str(pair[0]): number for number, pair in enumerate(vocabulary) if isinstance(pair, list) and pair
        }
    for added in found.get("added_tokens") or ():
        if isinstance(added, dict) and isinstance(added.get("id"), int):
            tokens[str(added.get("content"))] = added["id"]
    return tokens
