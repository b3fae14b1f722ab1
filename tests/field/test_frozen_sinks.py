"""A process that works on a batch of a Spark sink is frozen: `relay status` names it, and each event is written once.

Nothing tells a frozen worker from a function that takes long, so relay ends neither. Reports of the kind: those of
test_frozen_executors.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from relay.spark import batch_watch
from relay.spark.session import Session
from tests.integration.test_spark_handler import assert_each_once, lake, relayed, written_all
from tests.outbox import Outbox, wait_until

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

HERE = "tests.field.test_frozen_sinks"
FOLDER = "RELAY_TEST_FOLDER"


def freeze_once(frame: DataFrame) -> DataFrame:
    """A `transform` of which the first Python worker stops itself."""
    folder = Path(os.environ[FOLDER])

    def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with suppress(FileExistsError):
                (folder / "frozen").touch(exist_ok=False)
                (folder / "pid").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            yield batch

    return frame.mapInArrow(passed_on, frame.schema)


@pytest.mark.parametrize(
    "then", [pytest.param(signal.SIGCONT, marks=pytest.mark.rare), signal.SIGKILL]
)
def test_a_frozen_worker_of_a_sink_is_named(
    outbox: Outbox,
    spark_session: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    then: signal.Signals,
) -> None:
    monkeypatch.setattr(batch_watch, "TASKS_SECONDS", 0.2)
    monkeypatch.setattr(batch_watch, "STILL_SECONDS", 2.0)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    outbox.fill(20)
    config = lake(tmp_path / "lake", transform=f"{HERE}:freeze_once")
    try:
        with relayed(outbox, "inline", spark_session, **config):
            wait_until((tmp_path / "pid").exists, 120)
            wait_until(lambda: "no Spark task has ended" in str(fault(outbox)))
            # Meanwhile the target goes on.
            outbox.fill(2)
            outbox.wait_handled()
            os.kill(int((tmp_path / "pid").read_text()), then)
            written_all(outbox)
            wait_until(lambda: fault(outbox) is None)
    finally:
        end(tmp_path)
    assert_each_once(outbox, tmp_path / "lake")


def fault(outbox: Outbox) -> Any:
    return outbox.value("select fault from relay.sinks where sink = 'lake'")


def end(folder: Path) -> None:
    with suppress(ProcessLookupError, FileNotFoundError):
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
