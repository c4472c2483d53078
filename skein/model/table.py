"""The families of models that a job may name. A family is one file in `skein.model.families` and a row here."""

from typing import Annotated

from pydantic import Field

from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.llama import LlamaModel
from skein.model.families.mistral import MistralModel
from skein.model.families.mixtral import MixtralModel
from skein.model.families.mlp import MlpModel
from skein.model.families.qwen2 import Qwen2Model
from skein.model.families.qwen3 import Qwen3Model
from skein.model.families.qwen3_moe import Qwen3MoeModel

ModelSpec = Annotated[
    LlamaModel
    | MistralModel
    | MixtralModel
    | Qwen2Model
    | Qwen3Model
    | Qwen3MoeModel
    | DigitsCnnModel
    | MlpModel,
    Field(discriminator="family"),
]
