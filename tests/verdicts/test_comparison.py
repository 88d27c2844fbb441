"""Comparisons of folders of runs: which belong together, which may be compared, and the text."""

import json
import math
import re

import numpy as np
import pytest
from made_up_runs import BYTES_PER_TARGET, leave_run

from lmlib.runs import find_runs
from lmlib.verdicts import compare
from lmlib.verdicts.table import comparison_text

BASELINE = "peak_lr=1e-3"
HARD = np.linspace(-0.5, 0.5, 20)  # how much harder each batch is


def sweep(folder, losses, **more):
    """`losses` by rate: a loss for each seed, or by seed."""
    for rate, each in losses.items():
        for seed, loss in each.items() if isinstance(each, dict) else enumerate(each):
            settings = {"optimizer.peak_lr": rate, "seed": seed, **more}
            leave_run(folder / f"{rate}_{seed}", loss + HARD, settings)


def compared(folder, metric="validation_loss", baseline=BASELINE, **more):
    return compare(find_runs([folder]), metric, baseline, **more)


def judged(comparison, rate):
    (row,) = [r for r in comparison.rows if r.group.settings["optimizer.peak_lr"] == str(rate)]
    return row.judged


def test_settings_are_grouped_over_seeds_and_sorted_and_judged(tmp_path):
    losses = {0.001: (3.0, 3.1, 3.2), 0.003: (2.9, 3.0, 3.099), 0.01: (3.05, 3.2, 3.15)}
    sweep(tmp_path, losses)
    found = compared(tmp_path, margin=0.02)
    rates = [row.group.settings["optimizer.peak_lr"] for row in found.rows]
    assert rates == ["0.003", "0.001", "0.01"]
    assert found.settings == ["optimizer.peak_lr"]
    first = found.rows[0].group
    assert first.mean == pytest.approx(np.mean(losses[0.003]))
    expected = np.std(losses[0.003], ddof=1) / math.sqrt(3)
    assert first.standard_error == pytest.approx(expected)
    assert [row.is_baseline for row in found.rows] == [False, True, False]
    best, worst = judged(found, 0.003), judged(found, 0.01)
    assert best.verdict == "better" and best.difference.paired and best.difference.seeds == 3
    assert best.difference.mean == pytest.approx(-0.301 / 3)
    # Pairing removes batches' common difficulty: a single run's own batches would give 0.07.
    assert best.text.of_one_seed == pytest.approx(0.0, abs=1e-6)
    assert worst.verdict == "inconclusive" and worst.seeds_needed > 3
    content = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert content["groups"][0]["judged"]["verdict"] == "better"
    text = " ".join(comparison_text(found).split())
    assert "2.9997 ± 0.0574" in text
    assert re.search(r"lr = 0\.01: .* needs \d+ more seeds per setting for 80 % power", text)
    assert "A setting with no effect is called better at most 5 % of the time, and worse" in text
    assert "any false 'better' among 2 settings: up to 9.8 %. --error_rate=0.025" in text
    assert "Standard error from the validation text: " in text


def test_an_extended_run_of_a_sweep_is_compared_with_its_length(tmp_path):
    points = []
    for seed in range(3):
        for rate in ("0.001", "0.003"):
            settings = {"optimizer.peak_lr": rate, "seed": str(seed)}
            points.append({"name": f"{rate}_{seed}", "settings": settings})
            extended = (rate, seed) == ("0.003", 2)
            workdir = tmp_path / f"{rate}_{seed}"
            leave_run(workdir, 3.0, settings, steps=200 if extended else 100)
            first = workdir / "starts" / "00000"
            first.mkdir(parents=True)
            (first / "settings.json").write_text(json.dumps({**settings, "steps": "100"}))
    (tmp_path / "sweep.json").write_text(json.dumps({"points": points}))
    groups = {tuple(row.group.settings.items()): row.group for row in compared(tmp_path).rows}
    assert {key: len(group.runs) for key, group in groups.items()} == {
        (("optimizer.peak_lr", "0.001"), ("steps", "100")): 3,
        (("optimizer.peak_lr", "0.003"), ("steps", "100")): 2,
        (("optimizer.peak_lr", "0.003"), ("steps", "200")): 1,
    }
    two = [tmp_path / "0.001_0", tmp_path / "0.003_2"]
    assert compare(find_runs(two)).rows[0].group.settings.keys() == {"optimizer.peak_lr", "steps"}


def test_settings_without_effect_make_no_group(tmp_path):
    for seed, (mesh, width) in enumerate([(1, 64), (8, 64), (1, 128), (8, 128)]):
        settings = {"mesh.fsdp": mesh, "data.seed": seed, "validation.path": f"'{seed}'"}
        settings |= {"model.embed": width, "model.mlp": 4 * width, "mine": seed % 2}
        leave_run(tmp_path / str(seed), 3.0, settings)
    found = compared(tmp_path, baseline=None, ignored=["mine"])
    assert [len(row.group.runs) for row in found.rows] == [2, 2]
    assert found.settings == ["model.embed"]
    assert set(found.rows[0].group.settings) == {"model.embed", "model.mlp"}
    assert len(compared(tmp_path, baseline=None).rows) == 4
    with pytest.raises(ValueError, match="--ignore=yours: no run has this setting"):
        compared(tmp_path, ignored=["yours"])


def test_runs_that_differ_in_a_setting_of_any_name_are_two_settings(tmp_path):
    names = [
        "web text",
        "it's",
        'a "b"',
        "v2.seed",
        "x[0]",
        "[",
        "a = b: c",
        "a,b",
        "line\n",
        "Ω",
        "",
    ]
    for number, name in enumerate(names):
        path = f"data.sources[{name!r}].weight"
        for weight, loss in (("0.5", 3.0), ("None", 2.0)):
            settings = {path: weight, f"sinks[{name!r}].project": f"'{loss}'"}
            leave_run(tmp_path / f"{number}/{weight}", loss, settings)
        found = compared(tmp_path / str(number), baseline=f"{path}=0.5", margin=0.1)
        assert [row.group.settings for row in found.rows] == [{path: "None"}, {path: "0.5"}]
        assert [row.judged is None for row in found.rows] == [False, True] and not found.left_out


def test_notes_name_settings_that_end_alike_by_their_whole_paths(tmp_path):
    for number, (web, code) in enumerate([(1, 1), (1, 2), (2, 1)]):
        settings = {"data.web.weight": web, "data.code.weight": code}
        leave_run(tmp_path / str(number), 3.0 + number, settings)
    text = " ".join(comparison_text(compared(tmp_path, baseline="0")).split())
    assert "data.web.weight = 1, data.code.weight = 2; data.web.weight = 2" in text


def test_a_callable_is_shown_and_named_by_its_name(tmp_path):
    for folder, optimizer, rate, loss in (("a", "adamw", 0.5, 3.0), ("b", "muon", 0.4, 3.1)):
        name = f"lmlib.optim.{optimizer}.{optimizer} (partial)"
        leave_run(tmp_path / folder, loss, {"optimizer": name, "optimizer.rate": rate})
    text = comparison_text(compared(tmp_path, baseline=None))
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["adamw", "muon"]
    judged = compared(tmp_path, baseline="optimizer=adamw")
    assert [row.judged is None for row in judged.rows] == [True, False]

    adamw = "lmlib.optim.adamw.adamw (partial)"
    leave_run(tmp_path / "another", 3.2, {"optimizer": adamw, "optimizer.rate": 0.1})
    with pytest.raises(ValueError, match=r"matches 2 groups: also name one of optimizer\.rate"):
        compared(tmp_path, baseline="optimizer=adamw")
    judged = compared(tmp_path, baseline="optimizer=adamw,rate=0.5")
    assert [row.judged is None for row in judged.rows] == [True, False, False]


def test_the_baselines_of_a_sweep_of_two_settings_have_the_other_one_alike(tmp_path):
    for width in (64, 128):
        losses = [[3.0 - width / 100 + 0.01 * seed**2 for seed in range(3)]]
        losses.append([loss + 0.5 + 0.001 * seed for seed, loss in enumerate(losses[0])])
        rates = dict(zip((0.001, 0.003), losses, strict=True))
        sweep(tmp_path / str(width), rates, **{"model.embed": width})
    worse = [row for row in compared(tmp_path).rows if row.judged is not None]
    assert len(worse) == 2
    for row in worse:
        width = row.group.settings["model.embed"]
        assert row.judged.baseline.settings["model.embed"] == width
        assert row.judged.verdict == "worse"
    # A run's own group is the baseline of all.
    of_run = compared(tmp_path, baseline=str(tmp_path / "128/0.001_0"))
    assert [row.judged is None for row in of_run.rows] == [True, False, False, False]
    with pytest.raises(ValueError, match=r"=0\.001_0 names several runs: give the whole path"):
        compared(tmp_path, baseline="0.001_0")


def test_a_baseline_without_a_verdict_says_why(tmp_path):
    sweep(tmp_path / "one", {0.001: (3.0, 3.1)})
    assert "No verdict" not in comparison_text(compared(tmp_path, baseline=None))
    alone = comparison_text(compared(tmp_path, baseline="0.001_0"))
    assert "No verdict: all runs have the baseline's settings" in alone
    sweep(tmp_path / "two", {0.003: (2.9,)}, **{"model.embed": 128})
    told = comparison_text(compared(tmp_path))
    assert "No verdict: each other group differs from the baseline in more than" in told
    assert "No verdict" not in comparison_text(compared(tmp_path, baseline="0.001_0"))
    for named, told in {
        "peek_lr=1": "'peek_lr' is none of the settings.* differ: .*peak_lr.*; a run's workdir",
        "lr=1": "'lr' is none",
        "peak_lr=7": "no finished run has these settings",
        "elsewhere": "not a finished run .0.001_0, 0.001_1, 0.003_0",
    }.items():
        with pytest.raises(ValueError, match=told):
            compared(tmp_path, baseline=named)


def test_other_seeds_are_compared_unpaired_and_common_ones_alone_if_they_are_enough(tmp_path):
    sweep(tmp_path, {0.001: (3.0, 3.1, 3.2, 3.3)})
    sweep(tmp_path, {0.003: {seed: 2.0 + 0.1 * seed for seed in (3, 4, 5)}})
    found = judged(compared(tmp_path), 0.003)
    assert not found.difference.paired and found.text is None
    assert found.difference.mean == pytest.approx(2.4 - 3.15)
    sweep(tmp_path, {0.003: {seed: 2.0 + 0.11 * seed for seed in (1, 2)}})
    found = judged(compared(tmp_path), 0.003)
    assert found.difference.paired and found.difference.seeds == 3
    assert found.difference.mean == pytest.approx(np.mean([2.11, 2.22, 2.3]) - 3.2)


@pytest.mark.parametrize("metric", ["validation_loss", "validation_bits_per_byte"])
def test_the_text_is_of_all_sets_in_the_metrics_unit(tmp_path, metric):
    generator, batches = np.random.default_rng(0), 50
    differences = {"web": 0.1, "code": 0.3}
    of_both = {name: generator.normal(0, size, batches) for name, size in differences.items()}
    for rate in (0.001, 0.003):
        for seed in range(3):
            sets = {name: 3.0 + 0.01 * seed + each * (rate == 0.003)
                    for name, each in of_both.items()}  # fmt: skip
            settings = {"optimizer.peak_lr": rate, "seed": seed}
            leave_run(tmp_path / f"{rate}_{seed}", sets, settings)
    found = judged(compared(tmp_path, metric), 0.003)
    unit = 1.0 if metric == "validation_loss" else 1 / math.log(2) / BYTES_PER_TARGET
    errors = [np.std(each, ddof=1) / math.sqrt(batches) for each in of_both.values()]
    assert found.text.of_the_mean == pytest.approx(unit * math.hypot(*errors) / 2)
    one = judged(compared(tmp_path, f"{metric}/code"), 0.003)
    assert one.text.of_the_mean == pytest.approx(unit * errors[1])


def test_incomparable_runs_are_left_out_by_name(tmp_path):
    sweep(tmp_path, {0.001: (3.0,), 0.003: (2.9,)})
    names = {
        "unfinished": "has not finished: it has no result.json",
        "longer": "was extended to 200 steps, but its result is from step 100",
        "cut": "result.json is damaged",
        "odd": "is damaged",
        "old": "delete its result.json and give its command again",
        "torn": "validation.json is damaged",
    }
    for name in names:
        leave_run(tmp_path / name, 3.0, finished=name != "unfinished")
    config = tmp_path / "longer/settings.json"
    config.write_text(config.read_text().replace('"steps": "100"', '"steps": "200"'))
    (tmp_path / "cut/result.json").write_text('{"steps"')
    (tmp_path / "odd/result.json").write_text('{"steps": []}')
    (tmp_path / "old/validation.json").unlink()
    (tmp_path / "torn/validation.json").write_text("{")
    leave_run(tmp_path / "again", 3.0, {"optimizer.peak_lr": 0.001})
    found = compared(tmp_path)
    assert len(found.rows) == 2 and all(len(row.group.runs) == 1 for row in found.rows)
    for name, why in {**names, "again": "has the settings and the seed of"}.items():
        assert any(str(tmp_path / name) in line and why in line for line in found.left_out), name
    assert judged(found, 0.003).verdict == "inconclusive"
    assert "A verdict needs 3 seeds: add 2 or more." in comparison_text(found)


def test_a_run_that_diverged_is_no_reason_to_call_a_setting_better(tmp_path):
    sweep(tmp_path, {0.001: (3.0, 3.1, 3.2), 0.003: (2.0, 2.11, math.nan)})
    found = compared(tmp_path)
    assert judged(found, 0.003).verdict == "inconclusive"
    assert found.rows[-1].group.settings["optimizer.peak_lr"] == "0.003"
    assert "3 pairs; one loss is not finite" in comparison_text(found)
    json.dumps(found.as_json(), allow_nan=False)


def test_numbers_of_other_texts_units_and_tokenizers_are_refused(tmp_path):
    leave_run(tmp_path / "a", 3.0, {"seed": 1})
    leave_run(tmp_path / "b", 3.0, {"seed": 2}, digest="2e")
    refusals = [("validation_loss", r"the batches of 'validation' differ\. .*bits_per_byte")]
    # Text of as many bytes, in other tokens.
    per_byte = "validation_bits_per_byte"
    assert len(compared(tmp_path, per_byte, None).rows[0].group.runs) == 2
    leave_run(tmp_path / "c", np.full(3, 3.0), digest="3d")
    refusals += [(per_byte, r"bytes of 'validation' differ \(400 and 1,200\); ")]
    refusals += [("accuracy", "has no accuracy, only validation_loss")]
    for metric, told in refusals:
        with pytest.raises(ValueError, match=told):
            compared(tmp_path, metric)
    file = tmp_path / "b/result.json"
    file.write_text(file.read_text().replace("nats per token", "nats per pair"))
    with pytest.raises(ValueError, match=r"loss in nats per token, the second .* per pair"):
        compare(find_runs([tmp_path / "a", tmp_path / "b"]))


def test_more_may_be_better(tmp_path):
    sweep(tmp_path, {0.001: (0.5, 0.51, 0.53), 0.003: (0.7, 0.72, 0.73)})
    found = compared(tmp_path, margin=0.1, highest_is_best=True)
    assert found.rows[0].group.settings["optimizer.peak_lr"] == "0.003"
    assert judged(found, 0.003).verdict == "better" and judged(found, 0.003).speedup is None
    assert "+0.2033 ± " in comparison_text(found)
