"""What a batch in flight remembers, and how its job is named. No database."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from relay.faults import FaultAction, TaskFault
from relay.model.batch import Batch, JobName, Range, Task, TaskOutcome, Window
from relay.model.events import Lsn
from relay.model.transactions import FACTS, Rows, Transactions
from relay.pipeline.in_flight import BatchInFlight, ends, following
from relay.pipeline.inline import Result

HOSTS = [("a",), ("b",), ("a", "b")]
TOUCHED = [(1,), (2,), (1, 2)]


def task(*commits: tuple[int, int]) -> Task:
    """A task of transactions of one event, each with its end and which of HOSTS it touches."""
    rows = [(end, end, 0, 1, 1, 1, 1, 0, hosts) for end, hosts in commits]
    facts = np.array(rows, FACTS)
    transactions = Transactions(
        ("host_id",), facts, [None] * len(rows), HOSTS, Rows.of([b""] * len(rows))
    )
    partitions = tuple(sorted({p for _, hosts in commits for p in TOUCHED[hosts]}))
    return Task(partitions, transactions, TOUCHED)


def test_a_task_waits_for_where_the_batch_before_leaves_its_own_partitions() -> None:
    before = ends([task((10, 0), (30, 0)), task((20, 1))])
    assert before == {1: 30, 2: 20}
    one, both = following([task((40, 0)), task((50, 2))], before)
    assert isinstance(one, Task)
    assert isinstance(both, Task)
    assert one.after == {1: 30}
    assert both.after == {1: 30, 2: 20}
    assert ends([task((10, 2), (20, 0))]) == {1: 20, 2: 10}


def test_what_is_not_committed_runs_again_without_a_predecessor() -> None:
    tasks = following([task((40, 0)), task((50, 1)), task((60, 2))], {1: Lsn(30), 2: Lsn(20)})
    results: Future[list[Result]] = Future()
    committed = TaskOutcome((1,), applied=1)
    fault = TaskFault(FaultAction.STOP, "no such table")
    results.set_result([committed, TaskOutcome((2,), busy=True), fault])
    flight = BatchInFlight(Batch(2, task((40, 0)).transactions, Lsn(60), 3, 0), tasks, results)
    done, again = flight.ended()
    assert done == [committed]
    assert flight.faults == [fault]
    assert [replace(each, after={}).partitions for each in again if isinstance(each, Task)] == [
        (2,),
        (1, 2),
    ]
    assert not any(each.after for each in again if isinstance(each, Task))


def test_a_job_is_named_after_its_batch_and_attempt() -> None:
    commits = task((0x16B3748, 0), (0x16B9000, 1)).transactions
    name = JobName.of("orders", Batch(17, commits, Lsn(0x16B9000), 12_345, 0), 1)
    assert name.group == "relay orders batch 17"
    assert name.description == "batch 17: 12,345 events, 0/16B3748–0/16B9000, attempt 1"
    window = Window(3, 9_000, [], {})
    polled = Batch(18, Transactions.none(), Lsn(0), 500, 0, window=window)
    assert (
        JobName.of("orders", polled, 2).description
        == "batch 18: 500 events, c_offset up to 9000, attempt 2"
    )


def test_a_range_has_no_predecessor() -> None:
    window = Range((1,), 1, 10, [], {1: 0}, 5)
    assert following([window], {1: Lsn(30)}) == [window]
    assert ends([window]) == {}
