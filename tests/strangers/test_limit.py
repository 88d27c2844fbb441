"""What the other tests here rely on: memory that a file claims counts, used or not."""

from pathlib import Path

import pytest
from strangers import outcomes


@pytest.mark.slow
def test_only_what_is_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    claims = {"within": 100, "beyond": 1000}
    found = outcomes("import numpy", "numpy.empty(arguments * 2**20, 'u1')", claims, tmp_path, 500)
    assert found["within"] == ("opened", "")
    assert "MemoryError" in found["beyond"][0]
