"""All methods by name, the simplest first."""

from collections.abc import Mapping

from skein.plan.methods.chains import dt_fm, full, full_matched, round_robin
from skein.plan.methods.method import Method
from skein.plan.methods.skippipe import skip_blind, skippipe

METHODS: Mapping[str, Method] = {
    "round-robin": round_robin,
    "full": full,
    "full-matched": full_matched,
    "dt-fm": dt_fm,
    "skip-blind": skip_blind,
    "skippipe": skippipe,
}
