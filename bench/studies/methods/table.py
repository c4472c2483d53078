"""All methods by name, the simplest first."""

from collections.abc import Mapping

from bench.studies.methods.chains import dt_fm, full, full_matched, round_robin
from bench.studies.methods.method import Method
from bench.studies.methods.skippipe import skip_blind, skippipe

METHODS: Mapping[str, Method] = {
    "round-robin": round_robin,
    "full": full,
    "full-matched": full_matched,
    "dt-fm": dt_fm,
    "skip-blind": skip_blind,
    "skippipe": skippipe,
}
