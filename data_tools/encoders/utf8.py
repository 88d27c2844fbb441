"""The size of a text in UTF-8."""


def utf8_size(text: str) -> int:
    """Bytes of UTF-8 that `text` takes.

    Raises ValueError if it holds a lone surrogate, which UTF-8 cannot express.
    """
    if text.isascii():
        return len(text)
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(
            f"holds a lone surrogate at character {error.start}, which UTF-8 cannot express"
        ) from None
