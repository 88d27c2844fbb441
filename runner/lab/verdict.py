"""verdict.json: what was compared, and with which result; its signature, and its verification.

    {"format": 1, "task": {…}, "candidate": {…}, "code": {…}, "data": {…}, "budget": {…},
     "salt": "", "seeds": […], "runs": {"baseline": […], "candidate": […]},
     "measures": {"loss": {…}}, "verdict": "better", "signature": {"method": …, "value": …}}

The seeds are a function of everything before them. The signature is an HMAC-SHA-256 with the user's
key, or else a plain SHA-256, of the canonical text of all other members.
"""

import dataclasses
import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmlib.storage.stored_json import read_json
from lmlib.verdicts.seeds import (
    Difference,
    paired_difference,
    seeds_needed,
    smallest_effect,
)
from runner.errors import ConfigError
from runner.lab.trial import Trial

FORMAT = 1
_FIXED = ("format", "task", "candidate", "code", "data", "budget", "salt")
_LEAST_KEY_BYTES = 16


class Check(NamedTuple):
    """A statement that was checked."""

    statement: str
    holds: bool


def canonical(content: Mapping[str, Any]) -> bytes:
    """Returns the one text of `content` that is signed."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def seeds_of(content: Mapping[str, Any], count: int) -> list[int]:
    """Returns `count` seeds that follow from the code, the data, the budget and the salt."""
    fixed = canonical({name: content[name] for name in _FIXED})
    digests = (hashlib.sha256(fixed + number.to_bytes(4, "big")) for number in range(count))
    return [int.from_bytes(each.digest()[:4], "big") >> 1 for each in digests]


def judged(
    baseline: Sequence[Trial], candidate: Sequence[Trial], budget: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the measures, each with its difference over the pairs of seeds and its verdict."""
    margin, error_rate = budget["margin"], budget["error_rate"]
    pairs = list(zip(candidate, baseline, strict=True))
    differences = np.array([a.loss - b.loss for a, b in pairs])
    measures = {"loss": _measure(paired_difference(differences), margin, error_rate)}
    if (target := budget["steps_to"]) is not None:
        reached = [(a.steps_to(target), b.steps_to(target)) for a, b in pairs]
        found = [(a, b) for a, b in reached if a is not None and b is not None]
        if len(found) == len(pairs):
            change = paired_difference(np.array([a - b for a, b in found]))
            measures["steps_to"] = _measure(change, 0.0, error_rate)
        else:
            measures["steps_to"] = {"verdict": "inconclusive", "not_reached": True}
    headline = "loss" if budget["steps_to"] is None else "steps_to"
    return {"measures": measures, "verdict": measures[headline]["verdict"]}


def _measure(difference: Difference, margin: float, error_rate: float) -> dict[str, Any]:
    if not np.isfinite(difference.mean):
        return {"verdict": "inconclusive", "not_finite": True}
    return {
        **dataclasses.asdict(difference),
        "verdict": difference.verdict(margin, error_rate),
        "seeds_needed": seeds_needed(difference, margin, error_rate),
        "smallest_effect": smallest_effect(difference, margin, error_rate),
    }


def trial_json(trial: Trial) -> dict[str, Any]:
    """Returns the members of a run; a loss that is not finite is a string."""
    losses = {str(at): x if np.isfinite(x) else str(x) for at, x in trial.losses.items()}
    return {**dataclasses.asdict(trial), "losses": losses}


def trial_of(found: Mapping[str, Any]) -> Trial:
    """Returns the run that `trial_json` wrote."""
    losses = {int(at): float(x) for at, x in found["losses"].items()}
    return Trial(**{**found, "losses": losses})


def read_key(file: str | None) -> bytes | None:
    """Reads a key; raises ConfigError if it is short."""
    if file is None:
        return None
    key = Path(file).read_bytes()
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigError(
            f"--key={file} has {len(key)} bytes: at least {_LEAST_KEY_BYTES} are needed; "
            f"head -c 32 /dev/urandom > {file} makes one"
        )
    return key


def signed(content: Mapping[str, Any], key: bytes | None) -> dict[str, Any]:
    """Returns `content` with its signature."""
    return {**content, "signature": _signature(content, key)}


def _signature(content: Mapping[str, Any], key: bytes | None) -> dict[str, str]:
    text = canonical({name: each for name, each in content.items() if name != "signature"})
    if key is None:
        return {"method": "sha256", "value": hashlib.sha256(text).hexdigest()}
    return {"method": "hmac-sha256", "value": hmac.digest(key, text, "sha256").hex()}


def read_verdict(file: Path) -> dict[str, Any]:
    """Reads verdict.json; raises ConfigError if it is missing, damaged or of another format."""
    try:
        found = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a verdict: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{file} is not a verdict of format {FORMAT}")
    return found


def checks(content: Mapping[str, Any], key: bytes | None) -> Iterator[Check]:
    """Checks the signature, and that seeds, budgets and verdict follow from the rest.

    Raises ConfigError if members are missing or damaged, or a key is missing.
    """
    try:
        yield from _checks(content, key)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the verdict is damaged: {error!r:.100}") from error


def _checks(content: Mapping[str, Any], key: bytes | None) -> Iterator[Check]:
    signature = content["signature"]
    keyed = signature["method"] == "hmac-sha256"
    if keyed != (key is not None):
        raise ConfigError(
            "this verdict was signed with a key: give --key"
            if keyed
            else "this verdict was not signed with a key: leave --key out"
        )
    same = hmac.compare_digest(_signature(content, key)["value"], str(signature["value"]))
    yield Check(f"the content has its {signature['method']} signature", same)
    seeds = content["seeds"]
    yield Check(
        "the seeds follow from code, data and budget", seeds == seeds_of(content, len(seeds))
    )
    budget = content["budget"]
    runs = {arm: [trial_of(each) for each in content["runs"][arm]] for arm in budget["steps"]}
    for arm, trials in runs.items():
        fits = [each.seed for each in trials] == seeds and all(
            each.steps == budget["steps"][arm]
            and each.tokens <= each.steps * budget["tokens_per_step"]
            for each in trials
        )
        yield Check(f"the runs of the {arm} have these seeds, steps and tokens", fits)
    pairs = zip(runs["baseline"], runs["candidate"], strict=True)
    equal = budget["equal"] != "tokens" or all(
        (a.steps, a.tokens, a.batches) == (b.steps, b.tokens, b.batches) for a, b in pairs
    )
    yield Check("both arms had the budget that the verdict names", equal)
    again = judged(runs["baseline"], runs["candidate"], budget)
    stated = {name: content[name] for name in ("measures", "verdict")}
    yield Check("the verdict follows from the runs", canonical(again) == canonical(stated))
