"""Activations of an mlp by their names in a config.json.

A family takes the table as an argument, so a caller can give it more names:
`lmlib.hf.families.gpt_neox.family(ACTIVATIONS | {"mine": my_function})`.
"""

from collections.abc import Mapping

from lmlib.hf.settings import Settings
from lmlib.models.parts.mlp import Activation, gelu, gelu_tanh, relu_squared, silu

Activations = Mapping[str, Activation]

# Of several names for a function, the first is written.
ACTIVATIONS: Activations = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": silu,
    "swish": silu,
    "relu2": relu_squared,
}


def read_activation(
    settings: Settings, key: str, default: str, known: Activations = ACTIVATIONS
) -> Activation:
    """The function that `key` names; `default`: where it does not say.

    Raises:
      FolderError: if the name is not known.
    """
    return known[settings.only(key, *known) or default]


def name_of(activation: Activation, known: Activations = ACTIVATIONS) -> str:
    """The name that `read_activation` reads.

    Raises:
      ValueError: if there is none.
    """
    for name, function in known.items():
        if function is activation:
            return name
    raise ValueError(f"the family has no name for the activation {activation!r}")
