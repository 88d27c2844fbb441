"""The size of a text in UTF-8."""


def utf8_size(text: str, index: int) -> int:
    """Bytes of UTF-8 that `text`, number `index` of its batch, takes.

    Raises ValueError if it holds a lone surrogate, which UTF-8 cannot express.
    """
    if text.isascii():
        return len(text)
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text {index} holds the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}, which is no Unicode text: replace it"
        ) from None
