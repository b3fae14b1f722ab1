"""What a Spark sink says of a batch that waits for its destination, and of a session that has died. Without Spark."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError, TransientFault
from relay.spark import sink_worker
from relay.spark.session import Session
from relay.spark.writers.files import FilesWriter, StagedFiles
from tests.unit.test_spark_sink_sessions import worker_of


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ((0, 0), "no Spark task runs, and nothing is written for 0 s: the destination does not"),
        ((2, 5), "no Spark task has ended for 0 s: 2 running, 3 without a slot"),
    ],
)
def test_a_batch_that_makes_no_progress_is_named(
    monkeypatch: pytest.MonkeyPatch, tasks: tuple[int, int], says: str
) -> None:
    """While the driver waits, for a lock or a store, no task runs, and `relay status` showed nothing."""
    monkeypatch.setattr(sink_worker, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(sink_worker, "STILL_SECONDS", 0.0)
    monkeypatch.setattr(sink_worker, "tasks_of", lambda *_: tasks)
    watching, ended, said = worker_of(), Event(), list[str]()

    def note(fault: str, over: Event) -> None:
        said.append(fault)
        over.set()

    monkeypatch.setattr(watching, "_note_still", note)
    session: Any = None
    batch: Any = SimpleNamespace(number=7)
    watching._watch(session, batch, ended)
    (fault,) = said
    assert fault.startswith(f"batch 7: {says}")


@pytest.mark.parametrize(("died", "kind"), [(True, TransientFault), (False, OSError)])
def test_a_session_that_has_died_is_called_so(
    monkeypatch: pytest.MonkeyPatch, died: bool, kind: type[Exception]
) -> None:
    """The fault was `Py4JNetworkError`."""

    def check(_: object) -> None:
        raise OSError("the gateway is away")

    writing = worker_of(remote="sc://spark:15002")
    monkeypatch.setattr(writing, "_ready_session", object)
    monkeypatch.setattr(writing._session, "replace_if_dead", lambda _: died)
    monkeypatch.setattr(sink_worker, "writer", lambda *_: SimpleNamespace(check=check))
    batch: Any = SimpleNamespace(files=None, partition_by=[], host_buckets=8)
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
