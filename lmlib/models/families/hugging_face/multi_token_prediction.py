"""Tensors and the key of heads of multi-token prediction, in DeepSeek's form."""

from lmlib.models.families.hugging_face.family import Key, Tensor

HEADS = "num_nextn_predict_layers"
KEY = Key(
    HEADS, "multi_token_depths", lambda model: len(getattr(model, "predictors", ())), 0,
    zero=True, most=100, null=True,
)  # fmt: skip


def tensors(matrix: str, embedding_norm: str, features_norm: str, norm: str) -> tuple[Tensor, ...]:
    """Returns the tensors of a head outside its layer, by their names after the head's prefix."""
    return (
        Tensor(f"{matrix}.weight", {"combination.matrix": ("embed", "joined")}),
        Tensor(f"{embedding_norm}.weight", {"combination.embedding_norm.scale": ("embed",)}),
        Tensor(f"{features_norm}.weight", {"combination.features_norm.scale": ("embed",)}),
        Tensor(f"{norm}.weight", {"norm.scale": ("embed",)}),
    )
