"""Memory that comparing rows takes."""

from skein.config.data.coreset import CoresetSpec
from skein.errors import UserError
from skein.model.layers import AnyModel
from skein.units import format_bytes

MOST_FEATURE_BYTES = 4 << 30
"""Numbers by which one process compares rows take no more, in float64."""
_WORD_BYTES = 8


def feature_bytes(model: AnyModel, spec: CoresetSpec, num_rows: int) -> int:
    """Bytes of what a classifier's head has of so many rows for a choice: logits, and if wanted what they are made of.

    >>> from skein.model.families.mlp import MlpModel
    >>> model = MlpModel(family="mlp", widths=(100,), num_classes=10)
    >>> [feature_bytes(model, CoresetSpec(method="craig", feature=x), 1) for x in ("last_layer", "logits")]
    [880, 80]
    """
    num_classes, num_inputs = model.layer_parameters()[-1]["classifier.weight"]
    num_numbers = num_classes + (num_inputs if spec.feature == "last_layer" else 0)
    return _WORD_BYTES * num_numbers * num_rows


def no_room(spec: CoresetSpec) -> UserError:
    """Refusal of rows that one worker cannot compare with each other."""
    hint = (
        f"features of the rows of one worker take more than {format_bytes(MOST_FEATURE_BYTES)}: "
        "give feature: logits, method: random, or more workers; in a sweep a smaller per_array"
    )
    return UserError("data.coreset.feature", spec.feature, hint)
