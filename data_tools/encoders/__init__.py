"""Fast encoding of text with exactly the ids of Hugging Face `tokenizers`."""

from data_tools.encoders.byte_level import ByteLevelEncoder
from data_tools.encoders.encoder import (
    Encoder,
    HuggingFaceEncoder,
    RawBytesEncoder,
    UnsuitableError,
)


def make_encoder(tokenizer_json: str | None) -> Encoder:
    """Returns the fastest encoder with provably the same ids as a tokenizer.json.

    None stands for raw bytes. Raises ValueError if the text describes no tokenizer.
    """
    if tokenizer_json is None:
        return RawBytesEncoder()
    try:
        return ByteLevelEncoder(tokenizer_json)
    except UnsuitableError:
        return HuggingFaceEncoder(tokenizer_json)
