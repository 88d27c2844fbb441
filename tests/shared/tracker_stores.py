"""Settings and (step, name, value) of runs in real trackers' stores, by their own means."""

import html
import json
import re
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def in_trackio(workdir, project):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = (each for each in trackio.Api().runs(project) if each.name.startswith(workdir.name))
    rows = [
        (row["step"], name, value)
        for row in SQLiteStorage.get_logs(project, run.name, run_id=run.id)
        for name, value in row.items()
        if name not in ("step", "timestamp")
    ]
    texts = [  # Markdown, in which four spaces begin code
        (step, name, re.sub("^    ", "", value["_value"]) + "\n" if name == "samples" else value)
        for step, name, value in rows
    ]
    return run.config, texts


def in_mlflow(workdir, experiment, uri=None):
    import mlflow

    client = mlflow.MlflowClient(uri)
    place = [client.get_experiment_by_name(experiment).experiment_id]
    (run,) = client.search_runs(place, f"run_name = '{workdir.name}'")
    assert run.info.status == "FINISHED" and run.info.run_name == workdir.name
    found = [
        (each.step, name, each.value)
        for name in run.data.metrics
        if name != "step"
        for each in client.get_metric_history(run.info.run_id, name)
    ]
    for file in client.list_artifacts(run.info.run_id, "samples"):
        with tempfile.TemporaryDirectory() as folder:
            text = Path(client.download_artifacts(run.info.run_id, file.path, folder)).read_text()
        found.append((int(Path(file.path).stem), "samples", text))
    return run.data.params, found


def in_wandb(workdir, project):
    """Reads the records of the newest start, which `wandb sync` would send."""
    file = sorted((workdir / "wandb").glob("offline-run-*/*.wandb"))[-1]
    found, config = [], {}
    for record in records(file):
        if record.HasField("run"):
            config |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
            assert record.run.project == project and record.run.display_name == workdir.name
        row = {
            tuple(item.nested_key) or (item.key,): json.loads(item.value_json)
            for item in record.history.item
        }
        for name, value in row.items():
            if name == ("samples", "path"):
                page = (file.parent / "files" / value).read_text()
                value = html.unescape(page.removeprefix("<pre>").removesuffix("</pre>"))
            elif len(name) > 1 or name[0].startswith("_"):
                continue
            found.append((row[("_step",)], name[0], float(value) if value == "NaN" else value))
    return config, found


def records(file: Path) -> Iterator[Any]:
    """Yields the records in a file of W&B's, in the format of LevelDB's log.

    Blocks of 32 KiB have pieces with a header of seven bytes: checksum, length, kind (whole, first,
    middle, last).
    """
    from wandb.proto import wandb_internal_pb2

    data, at, piece = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(piece)
            yield record
            piece = b""
