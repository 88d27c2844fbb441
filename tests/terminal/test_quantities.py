"""Numbers as text: three digits and a unit of 1000s, two units of time."""

import pytest

from lmlib.terminal.quantities import bytes_text, count_text, duration_text

COUNTS = {
    0: "0", 999: "999", 3.274: "3.27", 999.7: "1.00 k", 1000: "1.00 k", 9_996: "10.0 k",
    99_960: "100 k", 999_999: "1.00 M", 4_214_000: "4.21 M", 8.03e9: "8.03 B", 1.5e12: "1.50 T",
    2e15: "2000 T",
}  # fmt: skip
SIZES = {
    0: "0 B", 999: "999 B", 1000: "1.00 KB", 1024: "1.02 KB", 16_400_000: "16.4 MB",
    999_999: "1.00 MB", 10**9: "1.00 GB", 1_252_000_000: "1.25 GB", 2**40: "1.10 TB",
}  # fmt: skip
DURATIONS = {
    0.414: "0.41 s", 0.999: "1.0 s", 8.24: "8.2 s", 59.96: "1 min 0 s", 192: "3 min 12 s",
    3599.7: "1 h 0 min", 7260: "2 h 1 min", 86_399: "1 d 0 h", 4 * 86_400 + 6 * 3600: "4 d 6 h",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text_of", "texts"),
    [(count_text, COUNTS), (bytes_text, SIZES), (duration_text, DURATIONS)],
)
def test_numbers_as_text(text_of, texts):
    assert {value: text_of(value) for value in texts} == texts
