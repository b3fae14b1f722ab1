"""Runs a peer's process in the peers' environment: it gets JSON as its argument and answers in lines of JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, Self

from bench.environment import PYTHON, variables
from bench.outbox import TIMEOUT_SECONDS


class JobFailed(Exception):
    """The process ended without the expected answer."""


class Job:
    """`python -m module '{...}'`, or another command; the end of the context ends the process."""

    def __init__(
        self,
        module: str,
        arguments: Mapping[str, Any],
        folder: Path,
        command: Sequence[str] | None = None,
        seconds: float | None = TIMEOUT_SECONDS,
        **environment: str,
    ) -> None:
        """The process is killed after `seconds`; None lets it run until the context ends."""
        self._log = folder / f"{module}.log"
        # Not in the checkout: Debezium would add its `config` folder to the class path.
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*(command or [str(PYTHON), "-m", module]), json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env=variables(**environment),
            )
        self._watch = Timer(seconds or 0.0, self._process.kill)
        self._watch.daemon = True
        if seconds is not None:
            self._watch.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self, word: str) -> dict[str, Any]:
        """Wait for the answer whose field `said` is this word. Raises JobFailed."""
        for line in self._process.stdout or []:
            if not line.startswith('{"said": '):
                continue
            answer: dict[str, Any] = json.loads(line)
            if answer["said"] == word:
                return answer
        self._process.wait()
        raise JobFailed(
            f"{self._process.args!r} ended without {word!r}:\n{self._log.read_text()[-2000:]}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.cancel()
        self._process.terminate()
        try:
            self._process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
