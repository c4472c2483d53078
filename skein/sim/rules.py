"""Aggregation rules by words, each with the optimizer that it is simulated with: so short that all their stages come.

`one_bit_lamb` in the words of a shape is a job that freezes its variance in the middle of the few steps that it has.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from skein.config.aggregation import AggregationSpec, AllReduce, DiLoCo, Gossip, Lsgd, OneBitAdam, OneBitLamb
from skein.config.optimizer import AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.config.robust import NormClip, TrimmedMean

_ADAMW = AdamWSpec(learning_rate=0.01, warmup_steps=2)
_SGD = SgdSpec(name="sgd", learning_rate=0.05, momentum=0.8, warmup_steps=2, weight_decay=0.0)
_LAMB = LambSpec(name="lamb", learning_rate=0.01, warmup_steps=2)
_ROBUST = NormClip(kind="median_norm_clip")

RULES: Final[Mapping[str, tuple[AggregationSpec, OptimizerSpec]]] = MappingProxyType(
    {
        "fp32": (AllReduce(), _ADAMW),
        "bf16": (AllReduce(wire="bf16"), _ADAMW),
        "int8": (AllReduce(wire="int8"), _ADAMW),
        "robust": (AllReduce(robust=_ROBUST), _ADAMW),
        "trimmed": (AllReduce(robust=TrimmedMean(kind="trimmed_mean")), _ADAMW),
        "one_bit_adam": (OneBitAdam(rule="one_bit_adam", warmup_steps=2), _ADAMW),
        "one_bit_lamb": (OneBitLamb(rule="one_bit_lamb", warmup_steps=2, ratio_beta=0.5), _LAMB),
        "diloco": (DiLoCo(rule="diloco", local_steps=3, wire="int4", fragments=2), _ADAMW),
        "overlapped": (
            DiLoCo(rule="diloco", local_steps=3, wire="int4", fragments=2, overlap_steps=2),
            _ADAMW,
        ),
        "decentlam": (Gossip(rule="gossip", method="decentlam", graph="ring"), _SGD),
        "qg_dmsgd": (Gossip(rule="gossip", method="qg_dmsgd", graph="one_peer_exponential"), _SGD),
        "lsgd": (Lsgd(rule="lsgd", local_every_steps=2, global_every_steps=4, probe_samples=2), _SGD),
        "lsgd_eager": (
            Lsgd(rule="lsgd", local_every_steps=4, global_every_steps=4, probe_samples=2, asynchronous=True),
            _SGD,
        ),
    }
)
