"""The summary line: sums of the batches since the last one, and silence while there are none."""

from __future__ import annotations

import logging
import time
from threading import Event

import numpy as np
import pytest

from relay.logs import BATCH, _Text
from relay.model.batch import Batch, DeadLetterReport, Outcome, TaskOutcome, Window
from relay.model.events import POSTGRES_EPOCH, Lsn
from relay.model.transactions import FACTS, Rows, Transactions
from relay.observe.batch_log import Summary
from relay.pipeline.apply import Handled


def batch(number: int, seconds_ago: float) -> Batch:
    """A batch of one transaction with three events."""
    committed = int((time.time() - seconds_ago - POSTGRES_EPOCH.timestamp()) * 1_000_000)
    facts = np.array([(1, 1, committed, 1, 0, 0, 3, 0, 0)], FACTS)
    transactions = Transactions(("host_id",), facts, [None], [("h",)], Rows.of([b""] * 3))
    return Batch(number, transactions, Lsn(1), events=3, size=0)


OUTCOME = Outcome(
    "inline",
    [TaskOutcome((0,), applied=1, dead=(DeadLetterReport(None, Lsn(1), 2, "h", "KeyError"),))],
)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [vars(record) for record in caplog.records if record.getMessage() == "relayed"]


def test_the_sums_of_all_batches_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "relay")
    summary = Summary()
    summary.start()
    summary.durable(batch(1, seconds_ago=90), OUTCOME, 0.1)
    summary.durable(batch(2, seconds_ago=60), OUTCOME, 0.1)
    summary.close()
    (line,) = lines(caplog)
    sums = {"batches": 2, "events": 6, "transactions": 2, "applied": 2, "deferred": 0, "dead": 4}
    assert {name: line[name] for name in sums} == sums
    assert line["lag_seconds"] == pytest.approx(60, abs=5)


def test_the_sums_do_not_name_the_batch_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "relay")
    summary = Summary()
    summary.durable(batch(1, seconds_ago=0), OUTCOME, 0.1)
    token = BATCH.set(2)
    try:
        summary.close()
        text = "\n".join(map(_Text().format, caplog.records))
    finally:
        BATCH.reset(token)
    assert " batches=1 " in text
    assert "batch=2" not in text


def test_polled_rows_tell_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "relay")
    summary = Summary()
    window = Window(snapshot_id=1, upto=9, shares=[], lower_bounds={}, left=70)
    summary.durable(Batch(1, Transactions.none(), Lsn(0), 9, 0, window=window), OUTCOME, 0.1)
    summary.close()
    (line,) = lines(caplog)
    assert (line["events"], line["lag_rows"], line["transactions"]) == (9, 70, None)


def test_redeliveries_are_summed_up_beside_no_batch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "relay")
    summary = Summary()
    summary.redelivered(Handled())
    summary.close()
    assert not lines(caplog)
    summary.redelivered(Handled(3, 3))
    summary.redelivered(Handled(4, 4))
    summary.close()
    (line,) = lines(caplog)
    assert (line["redelivered"], line.get("batches"), line.get("lag_seconds")) == (7, None, None)


def test_a_line_comes_by_itself_and_none_while_idle(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "relay")
    said = Event()
    watcher = logging.Handler()
    watcher.emit = lambda record: said.set()  # type: ignore[method-assign]
    logging.getLogger("relay.observe.batch_log").addHandler(watcher)
    try:
        summary = Summary(interval=0.01)
        summary.start()
        summary.durable(batch(1, seconds_ago=0), OUTCOME, 0.1)
        assert said.wait(30)
        summary.close()
    finally:
        logging.getLogger("relay.observe.batch_log").removeHandler(watcher)
    assert len(lines(caplog)) == 1
