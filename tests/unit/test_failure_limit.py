"""When a handler that lets one transaction after the other die is stopped."""

from __future__ import annotations

import psycopg

from relay.model.dispositions import DeadLetter, Dispositions, RetryLater
from relay.model.events import Commit, Lsn
from relay.model.transactions import Undecoded
from relay.pipeline.failure_limit import FailureLimit, FailureRun, run_of
from relay.store.brakes import Streak

BAD = ValueError("4111")


def test_so_many_in_a_row_die_and_no_more() -> None:
    limit = FailureLimit({"h": 2}, {})
    assert [limit.stops("h", BAD) for _ in range(4)] == [False, False, True, True]
    assert limit.stopped == {"h": "ValueError"}
    assert limit.streak("h") == Streak("ValueError", 2, True)
    failed = Undecoded(Commit(Lsn(1), Lsn(2), 0, 3), "t-1", ("host-1",), (), (), 0)
    output = str(limit.fault("h", BAD, failed, 3))
    assert output.startswith(
        "handlers.h: more than 2 transactions in a row failed with ValueError:"
    )
    assert "4111" not in output


def test_a_success_and_another_kind_of_fault_begin_again() -> None:
    limit = FailureLimit({"h": 2}, {})
    faults = [BAD, BAD, KeyError(), psycopg.errors.UniqueViolation(), BAD, BAD]
    assert not any(limit.stops("h", each) for each in faults)
    limit.succeeded(["h", "other"])
    assert not limit.stops("h", BAD)


def test_a_success_takes_only_a_part_from_a_gradual_count() -> None:
    limit = FailureLimit({"h": 10}, {}, gradual=True)
    stopped = 0
    for _ in range(200):
        limit.succeeded(["h"] * 7)
        stopped += limit.stops("h", BAD)
    assert stopped > 150
    # One in fifty is not stopped, and a dead letter of long ago is forgotten.
    limit = FailureLimit({"h": 10}, {"h": Streak("ValueError", 10, True)}, gradual=True)
    limit.succeeded(["h"] * 20)
    assert limit.streak("h") == Streak("ValueError", 9, False)
    for _ in range(200):
        limit.succeeded(["h"] * 49)
        assert not limit.stops("h", BAD)
    limit.succeeded(["h"] * 200)
    assert limit.streak("h") is None


def test_what_earlier_tasks_counted_goes_on_and_a_retry_counts_once() -> None:
    limit = FailureLimit({"h": 2}, {"h": Streak("ValueError", 1, False)})
    for _ in range(3):
        limit.begin()
        assert not limit.stops("h", BAD)
    assert limit.stops("h", BAD)


def test_without_a_limit_any_number_die() -> None:
    limit = FailureLimit({}, {"h": Streak("ValueError", 1_000, True)})
    assert not limit.stops("h", BAD)


def test_the_last_run_of_a_task_is_what_counts() -> None:
    dead, other, retried = DeadLetter("h", BAD), DeadLetter("g", BAD), RetryLater("h", BAD, 1.0)
    dispositions: Dispositions = {1: dead, 2: dead, 3: other, 4: retried, 5: dead}
    assert run_of("h", range(1, 6), dispositions) == FailureRun("ValueError", 3, False)
    assert run_of("h", range(6), dispositions) == FailureRun("ValueError", 3, True)
    assert run_of("h", range(7), dispositions) == FailureRun(None, 0, True)
    dispositions[5] = DeadLetter("h", KeyError())
    assert run_of("h", range(1, 6), dispositions) == FailureRun("KeyError", 1, True)
    assert run_of("h", [3, 4], dispositions) == FailureRun(None, 0, False)
