"""A file of answers that grows batch by batch and survives a kill."""

import fcntl
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from lmlib.generate import Generator
from lmlib.storage.atomic_file import sync, write_atomically
from lmlib.storage.stored_json import parse_json, read_json
from lmlib.terminal.quantities import duration_text
from runner.errors import ConfigError
from runner.inference.answer import Answer, DecodingOptions, acceptance_text
from runner.inference.prompts import AS_NUMBERS, Line
from runner.monitoring.progress_line import now_and_then

SETTINGS = ".settings.json"  # suffix of the file beside the answers
_SECONDS_BETWEEN_LINES = 5.0


class AnswerFile:
    """Answers to the lines of a file of prompts, one line for each sample.

    Batches always begin at the same lines, and a batch's answers are written together. A batch that
    a kill interrupted is generated again, so the final file is always the same.

    Attributes:
      begun: the time at which the first batch began.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        """Opens the answers at `path`.

        Raises ConfigError if the file was made with other settings, or by another program.

        Args:
          settings: all settings that affect the answers, as JSON.
        """
        self._path = path
        self._settings = json.loads(json.dumps(settings))
        self._beside = path.with_name(path.name + SETTINGS)
        self._is_new = not self._beside.exists()
        self.begun = datetime.now().astimezone()
        if not self._is_new:
            self.begun = self._begun_before()
        elif path.exists():
            raise ConfigError(f"{path} exists, but has no settings file: give another --out")

    def answer(
        self, lines: Sequence[Line], generator: Generator, manner: DecodingOptions, together: int
    ) -> None:
        """Appends the missing answers, and shows progress on stderr.

        Raises ConfigError if another process is writing the file, or it holds something else, and
        OSError if the file cannot be written.

        Args:
          together: lines per batch.
        """
        if self._is_new:
            stored = {**self._settings, "begun": self.begun.isoformat()}
            write_atomically(self._beside, json.dumps(stored, indent=2) + "\n")
        with open(self._path, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"another command is writing {self._path}") from error
            sync(self._path.absolute().parent)
            done = self._keep_whole_batches(file, lines, manner.samples, together)
            if done:
                _show(f"{done:,} of {len(lines):,} lines already have answers")
            tell, began = now_and_then(_show, _SECONDS_BETWEEN_LINES), time.monotonic()
            finished = drafted = accepted = 0  # tokens of finished batches

            def progress(answered: int, answers: Sequence[Answer]) -> str:
                seconds = time.monotonic() - began
                rate = (finished + sum(len(each.tokens) for each in answers)) / seconds
                line = f"{answered:,} of {len(lines):,} lines, {rate:,.0f} tokens/s"
                line += acceptance_text(drafted, accepted)
                if done < answered < len(lines):
                    left = seconds / (answered - done) * (len(lines) - answered)
                    line += f", {duration_text(left)} left"
                return line

            for first in range(done, len(lines), together):
                batch = lines[first : first + together]
                prompts, ids = [line.ids for line in batch], [line.number for line in batch]
                answers: list[Answer] = []
                for answers in manner.rounds(generator, prompts, ids):
                    tell(lambda: progress(first, answers))  # noqa: B023
                samples = itertools.product(batch, range(manner.samples))
                for (line, sample), answer in zip(samples, answers, strict=True):
                    file.write(_written(line, sample, answer, manner))
                file.flush()
                os.fsync(file.fileno())
                finished += sum(len(each.tokens) for each in answers)
                drafted += sum(each.drafted for each in answers)
                accepted += sum(each.accepted for each in answers)
            if done < len(lines):
                _show(progress(len(lines), ()))

    def _begun_before(self) -> datetime:
        try:
            stored = read_json(self._beside)
            begun = datetime.fromisoformat(stored.pop("begun"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self._beside} is damaged ({error!r:.80}): give another --out"
            ) from error
        differing = [
            f"{name} was {stored.get(name)!r:.60} and is {self._settings.get(name)!r:.60}"
            for name in sorted(stored | self._settings)
            if stored.get(name) != self._settings.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{self._path} was begun with other settings: {'; '.join(differing)}; give these "
                "again, or another --out"
            )
        return begun

    def _keep_whole_batches(
        self, file: BinaryIO, lines: Sequence[Line], samples: int, together: int
    ) -> int:
        """Truncates an interrupted batch; returns the number of answered lines."""
        expected = itertools.product(lines, range(samples))
        file.seek(0)
        size = kept = done = 0
        for answered, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                break
            line, sample = next(expected, (None, None))
            try:
                said = parse_json(text)
                known = line is not None and (said["line"], said["sample"]) == (line.number, sample)
            except (ValueError, KeyError, TypeError):
                known = False
            if not known:
                raise ConfigError(
                    f"{self._path} has something else in line {answered}: give another --out"
                )
            size += len(text)
            if answered % (together * samples) == 0 or answered == len(lines) * samples:
                kept, done = size, answered // samples
        file.truncate(kept)
        file.seek(kept)
        return done


def _written(line: Line, sample: int, answer: Answer, manner: DecodingOptions) -> bytes:
    said = {
        "line": line.number,
        "sample": sample,
        "text": None if manner.codec is AS_NUMBERS else answer.text,
        "ended": answer.ended,
        "tokens": answer.tokens,
        "logprobs": [each if math.isfinite(each) else None for each in answer.logprobs],
        "given": line.given,
    }
    return (json.dumps(said) + "\n").encode()


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
