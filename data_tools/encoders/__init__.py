"""Text to token ids, as fast as possible, with exactly the ids of Hugging Face `tokenizers`."""

from data_tools.encoders.byte_level import ByteLevelEncoder
from data_tools.encoders.encoder import (
    Encoder,
    HuggingFaceEncoder,
    RawBytesEncoder,
    UnsuitableError,
)


def make_encoder(tokenizer_json: str | None) -> Encoder:
    """The fastest encoder that provably gives the ids of this tokenizer.json; None: raw bytes.

    Raises ValueError if the text describes no tokenizer.
    """
    if tokenizer_json is None:
        return RawBytesEncoder()
    try:
        return ByteLevelEncoder(tokenizer_json)
    except UnsuitableError:
        return HuggingFaceEncoder(tokenizer_json)
