"""Devices that share each block: what is said where a worker has more of them than are used."""

import pytest

from skein.config.mesh.tensor import TensorSpec
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.families.mixtral import MixtralModel
from skein.model.families.mlp import MlpModel
from skein.model.layers import AnyModel
from skein.model.sparse.experts import ExpertPlacement

LLAMA = LlamaModel(shape=LlamaShape(num_attention_heads=4, num_key_value_heads=2, intermediate_size=704))
SPARSE = MixtralModel(preset="mixtral-1m")
SPREAD = MixtralModel(preset="mixtral-1m", placement=ExpertPlacement.MESH)


@pytest.mark.parametrize(
    ("model", "tensor", "num_devices", "told"),
    [
        (LLAMA, TensorSpec(size=2), 4, "parallel.tensor.size is 2"),
        (LLAMA, TensorSpec(), 3, "key_value_heads (2), intermediate_size (704) divide into 1, 2"),
        (LLAMA, TensorSpec(form="2d"), 3, "form 2d takes q x q devices where q divides num_attention_heads (4)"),
        (SPREAD, TensorSpec(), 3, "key_value_heads (2), with one of 4 experts for each device"),
        (SPARSE, TensorSpec(), 2, "on one device; model.placement: mesh would share them"),
        (MlpModel(family="mlp", widths=(4,)), TensorSpec(), 2, "blocks of family mlp are computed on one device"),
    ],
)  # fmt: skip
def test_a_worker_says_why_devices_of_its_rest(
    model: AnyModel, tensor: TensorSpec, num_devices: int, told: str
) -> None:
    forms = list(tensor.forms_on(num_devices, model, 4))
    assert all(form.size < num_devices for form in forms)
    assert all(told in tensor.why_fewer(model, form) for form in forms)
