"""What a Spark sink says of a batch that waits for its destination, and of a session that has died. Without Spark."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, get_native_id
from types import SimpleNamespace
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError, TransientFault
from relay.runtime.threads import pool, processor_seconds
from relay.spark import batch_watch, sink_worker
from relay.spark.session import Session
from relay.spark.writers.files import FilesWriter, StagedFiles
from tests.unit.test_spark_sink_sessions import worker_of


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ((0, 0), "no Spark task runs, and relay's process has computed nothing for 0 s: the"),
        ((2, 5), "no Spark task has ended for 0 s: 2 running, 3 without a slot"),
    ],
)
def test_a_batch_that_makes_no_progress_is_named(
    monkeypatch: pytest.MonkeyPatch, tasks: tuple[int, int], says: str
) -> None:
    """While the driver waits, for a lock or a store, no task runs, and `relay status` showed nothing."""
    monkeypatch.setattr(batch_watch, "TASKS_SECONDS", 0.01)
    monkeypatch.setattr(batch_watch, "STILL_SECONDS", 0.0)
    monkeypatch.setattr(batch_watch, "tasks_of", lambda *_: tasks)
    monkeypatch.setattr(batch_watch, "processor_seconds", lambda _: 0.0)
    watching, ended, said = worker_of()._watch, Event(), list[str]()

    def note(fault: str, over: Event) -> None:
        said.append(fault)
        over.set()

    monkeypatch.setattr(watching, "_note_still", note)
    session: Any = None
    watching._watch(session, 7, ended, 1)
    (fault,) = said
    assert fault.startswith(f"batch 7: {says}")


@pytest.mark.parametrize(
    ("tasks", "computed", "said"),
    [
        # A merge of 20 minutes raised RelaySinkDown; it is named where it stands still in the end.
        ((0, 0), [0, 1, 2, 3, 3], ["no Spark task runs"]),
        # A destination that responds again is no fault any more.
        ((0, 0), [0, 0, 1, 1], ["no Spark task runs", None, "no Spark task runs"]),
        # What the process computes says nothing of an executor's task.
        ((1, 1), [0, 0, 1], ["no Spark task has"]),
    ],
)
def test_what_the_driver_computes_is_progress(
    monkeypatch: pytest.MonkeyPatch,
    tasks: tuple[int, int],
    computed: list[float],
    said: list[str | None],
) -> None:
    monkeypatch.setattr(batch_watch, "TASKS_SECONDS", 0.01)
    monkeypatch.setattr(batch_watch, "STILL_SECONDS", 0.0)
    monkeypatch.setattr(batch_watch, "tasks_of", lambda *_: tasks)
    watching, ended, notes = worker_of()._watch, Event(), list[str | None]()
    left = list(computed)

    def seconds(_: int) -> float:
        if len(left) == 1:
            ended.set()
        return left.pop(0)

    def note(fault: str | None, _: Event) -> None:
        notes.append(fault and fault.removeprefix("batch 7: ")[:18].strip())

    monkeypatch.setattr(batch_watch, "processor_seconds", seconds)
    monkeypatch.setattr(watching, "_note_still", note)
    session: Any = None
    watching._watch(session, 7, ended, 1)
    assert notes == said


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_the_threads_of_libraries_compute_for_the_thread_that_waits_for_them(
    tmp_path: Path,
) -> None:
    def compute() -> None:
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass

    def counted(workers: ThreadPoolExecutor) -> float:
        before = processor_seconds(get_native_id())
        with workers:
            workers.submit(compute).result()
            return processor_seconds(get_native_id()) - before

    assert counted(ThreadPoolExecutor(1)) >= 0.25
    # Of relay's own threads each works for another sink, or for the pipeline.
    assert counted(pool(1, "relay")) < 0.25
    schema = deltalake.Schema.from_arrow(pa.schema([("id", pa.int64())]))
    deltalake.DeltaTable.create(tmp_path, schema)
    names = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
    assert any(name.startswith("tokio") for name in names)


@pytest.mark.parametrize(("died", "kind"), [(True, TransientFault), (False, OSError)])
def test_a_session_that_has_died_is_called_so(
    monkeypatch: pytest.MonkeyPatch, died: bool, kind: type[Exception]
) -> None:
    """The fault was `Py4JNetworkError`."""

    def check(_: object) -> None:
        raise OSError("the gateway is away")

    writing = worker_of(remote="sc://spark:15002")
    monkeypatch.setattr(writing, "_ready_session", object)
    monkeypatch.setattr(writing, "_look", lambda *_: None)
    monkeypatch.setattr(writing._session, "replace_if_dead", lambda _: died)
    monkeypatch.setattr(sink_worker, "writer", lambda *_: SimpleNamespace(check=check))
    batch: Any = SimpleNamespace(number=7, epoch=0, files=None, partition_by=[], host_buckets=8)
    with pytest.raises(kind) as raised:
        writing._write(batch)
    writing._fail(raised.value)
    fault = writing.condition.fault
    assert fault is not None
    says = "the Spark session has died, and is built again" if died else "OSError"
    assert str(fault.fault).startswith(says)


def test_another_session_is_used_once_one_was_replaced() -> None:
    of_others: Any = object()
    assert Session(worker_of()._settings.spark).replace_if_dead(of_others)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_path_that_is_a_file(monkeypatch: pytest.MonkeyPatch, is_file: bool) -> None:
    status = SimpleNamespace(isDirectory=lambda: not is_file)
    system = SimpleNamespace(
        exists=lambda _: True, getFileStatus=lambda _: status, globStatus=lambda _: None
    )
    jvm: Any = SimpleNamespace()
    jvm.org = SimpleNamespace(
        apache=SimpleNamespace(hadoop=SimpleNamespace(fs=SimpleNamespace(Path=lambda *_: None)))
    )
    staged = StagedFiles(system, "/lake", jvm)
    monkeypatch.setattr(StagedFiles, "of", lambda *_: staged)
    handler = SparkHandler.model_validate({"type": "spark", "path": "/lake"})
    session: Any = None
    if not is_file:
        FilesWriter("lake", handler).check(session)
        return
    with pytest.raises(ConfigurationError, match=r"^handlers\.lake\.path: /lake is a file: name"):
        FilesWriter("lake", handler).check(session)
