"""On a real Ray of two workers on this machine."""

import importlib
from pathlib import Path

import pytest
import ray
from folder_contents import files_of

from data_tools.pretokenize.on_ray import pretokenize_on_ray
from data_tools.pretokenize.texts import pretokenize
from data_tools.rows.block import TextField
from data_tools.rows.files import Files
from data_tools.tokenizer import ByteTokenizer

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A Ray of two workers that also find the modules of the folder."""
    modules = tmp_path_factory.mktemp("modules")
    path = {"PYTHONPATH": f"{REPOSITORY}:{modules}"}
    for attempt in range(3):  # Ray gives itself 30 s to start, which a busy machine may exceed
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=80 * 2**20,
                runtime_env={"env_vars": path},
            )
            break
        except Exception as error:
            ray.shutdown()
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
    yield modules
    ray.shutdown()


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f'{{"text": "document {n}"}}\n' for n in range(2000)))
    return file


@pytest.mark.slow
def test_the_same_bytes_as_on_one_machine(cluster, tmp_path, lines):
    target = (Files([str(lines)]), ByteTokenizer())
    calls = []
    pretokenize(*target, tmp_path / "alone", "train", shards=5)
    metadata = pretokenize_on_ray(
        *target, tmp_path / "ray", "train", shards=5, progress=lambda *call: calls.append(call)
    )
    assert metadata.documents == 2000
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "ray")
    counts = {"documents": 2000, "bytes": metadata.bytes, "tokens": metadata.tokens}
    assert calls[-1] == (counts, 1.0)


@pytest.mark.slow
def test_a_lost_worker_is_replaced(cluster, tmp_path, lines, capfd):
    lost = tmp_path / "lost"
    (cluster / "losing.py").write_text(
        "import os\n"
        "def text(row):\n"
        f"    if row['text'] == 'document 1500' and not os.path.exists({str(lost)!r}):\n"
        f"        open({str(lost)!r}, 'w').close()\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return row['text']\n"
    )
    source = Files([str(lines)], field=TextField(function="losing:text"))
    metadata = pretokenize_on_ray(source, ByteTokenizer(), tmp_path / "out", "train", shards=3)
    assert lost.exists()
    assert metadata.documents == 2000
    assert "of 3 failed" in capfd.readouterr().err


@pytest.mark.slow
def test_permanent_failures_are_errors(cluster, tmp_path, lines):
    (cluster / "dying.py").write_text("import os\ndef text(row): os.kill(os.getpid(), 9)\n")
    importlib.invalidate_caches()
    source = Files([str(lines)], field=TextField(function="dying:text"))
    with pytest.raises(RuntimeError, match=r"shard \d of 2 failed .* 2 times"):
        pretokenize_on_ray(source, ByteTokenizer(), tmp_path / "dead", "train", shards=2, retries=1)

    with open(lines, "a") as file:
        file.write("not JSON\n")
    with pytest.raises(ValueError, match=r"lines\.jsonl, line 2001, is not JSON"):
        pretokenize_on_ray(
            Files([str(lines)]), ByteTokenizer(), tmp_path / "bad", "train", shards=2
        )
