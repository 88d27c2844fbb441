"""A verdict follows from its runs, and every edit of the file is noticed."""

import copy

import pytest

from runner.errors import ConfigError
from runner.lab.trial import Trial
from runner.lab.verdict import checks, judged, seeds_of, signed, trial_json

BUDGET = {
    "equal": "tokens", "steps_to": None, "margin": 0.0, "error_rate": 0.05,
    "steps": {"baseline": 4, "candidate": 4}, "tokens_per_step": 10,
}  # fmt: skip
KEY = b"a secret of sixteen"


def trial(seed, loss, **changed):
    fields = {"seed": seed, "steps": 4, "tokens": 40, "losses": {2: loss + 1, 4: loss}}
    fields |= {"cpu_seconds": 1.0, "seconds": 1.0, "weights": "ab", "batches": str(seed)}
    return Trial(**{**fields, **changed})


def verdict_of(losses, baseline, key=None, budget=BUDGET):
    fixed = {name: {} for name in ("task", "candidate", "code", "data")}
    content = {"format": 1, **fixed, "budget": dict(budget), "salt": ""}
    content["seeds"] = seeds = seeds_of(content, len(losses))
    arms = {"baseline": baseline, "candidate": losses}
    runs = {n: [trial(*e) for e in zip(seeds, found, strict=True)] for n, found in arms.items()}
    content["runs"] = {name: [trial_json(each) for each in found] for name, found in runs.items()}
    return signed(content | judged(runs["baseline"], runs["candidate"], content["budget"]), key)


def broken(content, key=None):
    return [check.statement for check in checks(content, key) if not check.holds]


@pytest.mark.parametrize(
    "losses, verdict",
    [
        ((3.0, 3.1, 2.9), "better"),
        ((5.0, 5.1, 4.9), "worse"),
        ((4.1, 3.9, 4.02), "inconclusive"),
        ((3.0, 3.1, float("nan")), "inconclusive"),
    ],
)
def test_the_verdict_is_that_of_the_paired_test(losses, verdict):
    found = verdict_of(losses, (4.0, 4.05, 3.95))
    assert found["verdict"] == verdict
    assert not broken(found)


def test_steps_to_a_loss_come_from_the_curve():
    assert trial(0, 3.0).steps_to(3.5) == 3.0  # halfway between 4.0 at step 2 and 3.0 at step 4
    assert trial(0, 3.0).steps_to(2.9) is None
    budget = {**BUDGET, "steps_to": 3.5}
    assert verdict_of((3.0, 2.9, 3.1), (3.4, 3.3, 3.45), budget=budget)["verdict"] == "better"
    unreached = verdict_of((3.0, 2.9, 3.1), (3.4, 3.3, 3.6), budget=budget)
    assert unreached["verdict"] == "inconclusive"


def edited(content, *path, value):
    changed = copy.deepcopy(content)
    at = changed
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return changed


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize(
    "path, value",
    [
        (("verdict",), "better"),
        (("runs", "candidate", 0, "losses", "4"), 1.0),
        (("budget", "margin"), 1.0),
        (("seeds", 0), 7),
        (("code", "sha256"), "00"),
    ],
)
def test_an_edited_file_has_no_signature(path, value, key):
    content = verdict_of((4.1, 3.9, 4.02), (4.0, 4.05, 3.95), key)
    assert "signature" in " ".join(broken(edited(content, *path, value=value), key))


@pytest.mark.parametrize(
    "path, value, noticed",
    [
        (("verdict",), "better", "the verdict follows from the runs"),
        (("runs", "candidate", 0, "losses", "4"), 1.0, "the verdict follows from the runs"),
        (("seeds", 0), 7, "the seeds follow from code, data and budget"),
        (("code", "sha256"), "00", "the seeds follow from code, data and budget"),
        (("budget", "steps", "candidate"), 8, "the runs of the candidate have these seeds"),
        (("runs", "candidate", 1, "tokens"), 80, "the runs of the candidate have these seeds"),
        (("runs", "candidate", 1, "batches"), "x", "both arms had the budget"),
    ],
)
def test_an_edit_that_is_signed_again_contradicts_the_rest(path, value, noticed):
    content = edited(verdict_of((4.1, 3.9, 4.02), (4.0, 4.05, 3.95)), *path, value=value)
    found = broken(signed(content, None))
    assert any(each.startswith(noticed) for each in found), found


def test_a_key_is_needed_to_sign():
    content = verdict_of((3.0, 3.1, 2.9), (4.0, 4.05, 3.95), KEY)
    assert broken(content, b"another secret of sixteen")
    with pytest.raises(ConfigError, match="give --key"):
        broken(content)
    with pytest.raises(ConfigError, match="leave --key out"):
        broken(signed(content, None), KEY)


def test_another_salt_gives_other_seeds():
    content = verdict_of((3.0, 3.1, 2.9), (4.0, 4.05, 3.95))
    assert set(seeds_of(content, 3)).isdisjoint(seeds_of({**content, "salt": "mine"}, 3))
