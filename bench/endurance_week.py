"""A week in an hour: restarts, lost sessions, lost slots, rotation and reloads, and what relay and its tables take."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import psycopg

from bench.backlog import STATEMENTS
from bench.case import MIB, Case, Instance
from bench.endurance_rows import Rows, Together, new_outbox
from bench.outbox import APPLICATION_NAME, wait_until
from bench.plan import Plan
from bench.receivers import Endpoint
from bench.results import Goal, Measurement, Workload
from relay.admin.retention import partition_new
from relay.config.settings import Settings

RATE = 50
RESTARTS, LOST_SESSIONS, LOST_SLOTS, RELOADS = 500, 200, 50, 400
FIRST, LAST = "after the beginning", "at the end"
_MOST_BEGINNING = 300.0
"""The beginning is as long, but at most two fifths of the time: by then the first partitions have been dropped."""
_WINDOW = 20.0
"""The seconds whose peaks count: at a single moment some sessions have just been lost."""
GROWTH = 1.1
JUDGED = ("RSS MiB", "descriptors", "threads", "connections", "files", "tables MiB", "indexes MiB")
_LONGEST_RESTART = 60.0

LOSE_SESSIONS = """
    select pg_terminate_backend(pid) from pg_stat_activity
     where datname = current_database() and pid <> pg_backend_pid() and application_name not like 'bench%'
       and backend_type in ('client backend', 'walsender')
"""
FORGET_RECREATIONS = "update relay.groups set slot_recreations = '{}' where group_id = %s"
SIZES = """
    select coalesce(sum(pg_table_size(oid)), 0), coalesce(sum(pg_indexes_size(oid)), 0) from pg_class
     where relkind = 'r' and (relnamespace = 'relay'::regnamespace or relname like 'outbox_message_t%')
"""
CONNECTIONS = """
    select count(*) from pg_stat_activity
     where datname = current_database() and application_name not like 'bench%'
       and backend_type in ('client backend', 'walsender')
"""


class _Week:
    """Two groups on one outbox: one whose process stays and loses sessions and slots, and one that is restarted."""

    def __init__(self, plan: Plan, seconds: float) -> None:
        self._seconds = seconds
        self._beginning = min(_MOST_BEGINNING, seconds * 0.4)
        self._folder = plan.folder
        # A quick run does as much in a minute as a whole one.
        share = 1 / 30 if plan.quick else 1.0
        self._counts = {
            "restarts": max(4, int(RESTARTS * share)),
            "lost sessions": max(4, int(LOST_SESSIONS * share)),
            "lost slots": max(2, int(LOST_SLOTS * share)),
            "reloads": max(4, int(RELOADS * share)),
        }
        self.done = dict.fromkeys(self._counts, 0)
        self._ended = Event()
        self._outbox = new_outbox(plan, "endurance-week")
        self._secret = plan.folder / "secret"
        self._write_secret()
        self._stays, self._restarted = self._case(plan, "stays"), self._case(plan, "restarted")
        partition_new(Settings(**self._stays.config), "1m")
        self._faults: list[BaseException] = []

    def _case(self, plan: Plan, name: str) -> Case:
        endpoint = Endpoint(plan.folder, plan.folder / f"{self._outbox.name}.{name}")
        handlers = {
            "projection": STATEMENTS["each: event"],
            "sink": {
                **endpoint.handler_of("sink"),
                "headers": {"authorization": {"file": str(self._secret)}},
            },
        }
        case = Case(
            *(self._outbox, plan.folder, handlers, {"sink": endpoint}, ["sink"]),
            retention={"keep": "2m", "ahead": "10m"},
            observe={"listen": "127.0.0.1:0"},
        )
        temporary = plan.folder / f"{self._outbox.name}.{name}.tmp"
        temporary.mkdir()
        case.instances[0].environment = {"TMPDIR": str(temporary)}
        return case

    def run(self) -> Rows:
        """Do harm for the given time; returns what was used after a twelfth of it, and at the end."""
        jobs = {
            "restarts": self._restart,
            "lost sessions": self._lose_sessions,
            "lost slots": self._lose_slot,
            "reloads": self._write_secret,
        }
        threads = [
            Thread(target=self._repeat, args=(name, act), daemon=True) for name, act in jobs.items()
        ]
        with (
            self._stays.running(samples=False),
            self._restarted.running(samples=False),
            self._stays.publishing(RATE, self._seconds * 2) as publishing,
        ):
            began = time.monotonic()
            for thread in threads:
                thread.start()
            window = min(_WINDOW, self._seconds / 10)
            first = self._peaks(began + self._beginning - window, began + self._beginning)
            last = self._peaks(began + self._seconds - window, began + self._seconds)
            self._ended.set()
            for thread in threads:
                thread.join(_LONGEST_RESTART)
            published = publishing.end()
            for case in (self._stays, self._restarted):
                wait_until(lambda of=case: self._arrived(of) >= len(published), "all", 120)  # type: ignore[misc]
        if self._faults:
            raise self._faults[0]
        last |= {name: float(count) for name, count in self.done.items()}
        return {FIRST: first, LAST: last}

    @staticmethod
    def _arrived(case: Case) -> int:
        return len({number for number, _ in case.arrivals("sink")})

    def _peaks(self, since: float, until: float) -> Measurement:
        """The most that was used between two moments. Raises the fault of what does harm."""
        most: Measurement = {}
        while time.monotonic() < until:
            if self._faults:
                raise self._faults[0]
            if self._stays.instances[0].usage is None:
                raise RuntimeError("the process that stays has ended")
            if time.monotonic() >= since:
                used = self._used()
                most = {name: max(value, most.get(name, 0.0)) for name, value in used.items()}
            time.sleep(0.5)
        return most

    def _repeat(self, name: str, act: Callable[[], None]) -> None:
        """Do something as often as the week has it, spread over the time."""
        began, count = time.monotonic(), self._counts[name]
        try:
            for number in range(count):
                due = began + self._seconds * (number + 0.5) / count
                if self._ended.wait(max(0.0, due - time.monotonic())):
                    return
                act()
                self.done[name] += 1
        except Exception as error:
            self._faults.append(error)

    def _restart(self) -> None:
        """End the process of the second group, by turns with SIGTERM and SIGKILL, and start another one."""
        instance, slot = self._restarted.instances[0], self._restarted.group
        with self._connected() as conn:
            # The server notices the end of a killed process only when it writes to it.
            former = _reader(conn, slot)
            if self.done["restarts"] % 2:
                instance.kill()
            else:
                instance.stop()
            instance.start()
            wait_until(
                lambda: self._ended.is_set() or _reader(conn, slot) not in (None, former),
                "the restarted relay streams",
                _LONGEST_RESTART,
                instance.process,
            )

    def _lose_sessions(self) -> None:
        with self._connected() as conn:
            conn.execute(LOSE_SESSIONS)

    def _lose_slot(self) -> None:
        """Drop the slot of the first group, as an administrator may; relay makes another one."""
        slot = self._stays.group
        with self._connected() as conn:
            # relay stops after the third slot that is lost within an hour.
            conn.execute(FORGET_RECREATIONS, (slot,))
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and not self._ended.is_set():
                conn.execute(
                    "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s",
                    (slot,),
                )
                with suppress(psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
                    conn.execute("select pg_drop_replication_slot(%s)", (slot,))
                    return
                time.sleep(0.05)

    def _write_secret(self) -> None:
        """Give the sink another token, as a secret store does."""
        new = self._secret.with_suffix(".new")
        new.write_text(f"Bearer {secrets.token_hex(16)}")
        new.rename(self._secret)

    def _connected(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self._outbox.dsn, autocommit=True, application_name=APPLICATION_NAME)

    def _used(self) -> Measurement:
        """What the process that stays takes, the connections and files of both, and the sizes of relay's tables."""
        instance = self._stays.instances[0]
        process = instance.usage
        assert process is not None
        folders = [each.instances[0] for each in (self._stays, self._restarted)]
        with self._connected() as conn:
            tables, indexes = conn.execute(SIZES).fetchone() or (0, 0)
            (connections,) = conn.execute(CONNECTIONS).fetchone() or (0,)
        return {
            "RSS MiB": process.memory_info().rss / MIB,
            "descriptors": float(process.num_fds()),
            "threads": float(process.num_threads()),
            "connections": float(str(connections)),
            "files": float(sum(map(_files, folders))),
            "tables MiB": float(str(tables)) / MIB,
            "indexes MiB": float(str(indexes)) / MIB,
        }


def _files(instance: Instance) -> int:
    folder = Path(instance.environment["TMPDIR"])
    return sum(len(files) + len(folders) for _, folders, files in os.walk(folder))


def _reader(conn: psycopg.Connection[tuple[object, ...]], slot: str) -> object:
    """The process of the server that sends a slot's changes; None if nobody reads it."""
    row = conn.execute(
        "select active_pid from pg_replication_slots where slot_name = %s", (slot,)
    ).fetchone()
    return row[0] if row else None


def week(plan: Plan) -> Iterator[Workload]:
    """What happens to relay in a week, in less time."""
    minutes = plan.minutes or (1.0 if plan.quick else 12.0)

    def measure() -> Rows:
        return _Week(plan, minutes * 60).run()

    together = Together(measure)
    beginning = min(_MOST_BEGINNING, minutes * 60 * 0.4)
    size = (
        f"{RATE} transactions/s, and within {minutes:g} minutes, as often as the table says, one group's process is "
        "restarted, the other's slot is dropped, all sessions are ended, a secret changes; the beginning is "
        f"{beginning:.0f} s"
    )
    yield Workload(
        "endurance-week",
        size,
        [together.contender(FIRST, FIRST), together.contender(LAST, FIRST)],
        [Goal(LAST, figure, GROWTH, FIRST) for figure in JUDGED],
    )
