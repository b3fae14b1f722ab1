"""Reads the health and the metrics of a running relay at `observe.listen`."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

from tests.process import ROOT

DASHBOARD = ROOT / "config" / "grafana" / "relay.json"
RULES = ROOT / "config" / "prometheus" / "relay.rules.yaml"
NAME = re.compile(r"\brelay_[a-z_]+")
SUFFIXES = re.compile(r"_(bucket|sum|count)$")
LABELS = {"relay_build_info"}


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    status: int
    text: str
    headers: Mapping[str, str]


def ask(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    """Send a request, and return the answer."""
    request = Request(f"http://127.0.0.1:{port}{path}", headers=headers, method=method)
    try:
        with urlopen(request, timeout=60) as answer:
            return Answer(answer.status, answer.read().decode(), dict(answer.headers))
    except HTTPError as error:
        return Answer(error.code, error.read().decode(), dict(error.headers))


def is_good(port: int, path: str) -> bool:
    """Whether a health check passes; False if the port is not open."""
    try:
        return ask(port, path).status == 200
    except (OSError, HTTPException):
        return False


class Scrape:
    """The series of a scrape."""

    def __init__(self, port: int) -> None:
        answer = ask(port, "/metrics")
        assert answer.status == 200, answer.text
        self.families = list(text_string_to_metric_families(answer.text))

    @property
    def names(self) -> set[str]:
        """The names of the families as in expressions, without the suffixes of histograms."""
        return {
            f"{each.name}_total" if each.type == "counter" else each.name for each in self.families
        }

    def value(self, name: str, **labels: str) -> float | None:
        """The value of the series that has these labels; None if there is none."""
        values = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert len(values) < 2, values
        return values[0] if values else None


def used(text: str) -> set[str]:
    """The names of the series in some expressions."""
    return {SUFFIXES.sub("", name) for name in NAME.findall(text)}


class Poller:
    """Polls /livez and keeps the answers that fail. A closed port does not count as failure."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.good = 0
        self.bad: list[str] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(0.2):
            try:
                answer = ask(self.port, "/livez")
            except (OSError, HTTPException):
                continue
            if answer.status == 200:
                self.good += 1
            else:
                self.bad.append(answer.text)

    def close(self) -> None:
        """Stop polling."""
        self._closing.set()
        self._thread.join()
