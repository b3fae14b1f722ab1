"""The kinds of consumers of the log, each as what the consumers' contract needs of one: a new consumer is one class.

What a consumer has is in the database, as `read` returns it. An owner is a process, or a thread that stands for one;
when it is killed, what it has not committed is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar, Protocol

import psycopg
import pytest
import yaml
from pyspark.sql.streaming.datasource import ReadMaxRows

from relay.admin import offsets, sinks
from relay.api.positions import parse as position_of
from relay.client.reader import ReaderError, ReaderMoved, subscribe
from relay.config.settings import Settings
from relay.faults import RelayError, first_line
from relay.spark.data_source import DifferenceReader, StreamReader
from relay.spark.data_source_options import parse
from relay.spark.session import Session
from tests import api
from tests.log_histories import Order, number_of
from tests.outbox import Outbox, relaying, run_until_fault, wait_until
from tests.process import Running, running

PORTION = 40
"""How many events a consumer that reads in portions asks for."""
EFFECTS = """
    create table effects (seq bigserial, id uuid, host_id uuid, c_offset bigint, attempt int);
    create table places (of text primary key, place text)
"""
EFFECT = "insert into effects (id) values (%s)"
TOKENS = "select 1 from relay.api_tokens"
PLACE = """
    insert into places (of, place) values ('', %s) on conflict (of) do update set place = excluded.place
"""


class Owner(Protocol):
    """A process that works for a consumer."""

    def kill(self) -> None:
        """End it at once."""


@dataclass
class Places:
    """The databases of a test, and its folder. Effects of consumers in the source are there, others in the target."""

    outbox: Outbox
    target: Outbox
    folder: Path
    session: Callable[[], Session]


class Consumer(ABC):
    """A kind of consumer. It begins at the beginning of the log when it is prepared."""

    order: ClassVar[Order] = "log"
    owners: ClassVar[int] = 2
    """How many owners there are at once."""
    appends: ClassVar[bool] = True
    """Whether what comes again comes after what it has."""
    is_noted_at_once: ClassVar[bool] = True
    """Whether retention knows what it has read at once: a group notes it every five seconds."""
    steps: ClassVar[int] = 500
    """How many steps of a history it reads in the contract."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.outbox = places.outbox
        self.cleanup = ExitStack()

    @abstractmethod
    def prepare(self) -> None:
        """Declare it."""

    @abstractmethod
    def start(self) -> Owner:
        """Start an owner."""

    @abstractmethod
    def refusal(self) -> str:
        """What it says when it is started where it may not go on; it ends by itself then."""

    @abstractmethod
    def seek(self) -> None:
        """Move it to the beginning of the log, while no owner runs."""

    def read(self) -> list[int]:
        """The numbers of the events that it has had, in its order."""
        return [
            number_of(each) for each in self.outbox.column("select id from effects order by seq")
        ]

    def cut(self) -> None:  # noqa: B027  # of the others, a lost connection is the end of an owner
        """End the connections on which it reads, where it opens them again by itself."""

    def close(self) -> None:
        """Release what `prepare` has opened."""
        self.cleanup.close()


# Threads that stand for processes


class Killed(Exception):
    """Ends a thread that stands for a process, in the middle of what it does."""


class Life:
    """A thread that works until it is killed. Its effects are made in `conn`, which its end closes."""

    def __init__(self, work: Callable[[Life], None], dsn: str) -> None:
        self.dead = Event()
        self.conn = psycopg.connect(dsn, autocommit=True)
        self.error: BaseException | None = None
        self._on_kill: Callable[[], None] = lambda: None
        self._work = work
        self._thread = Thread(target=self._live, daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Wait for a moment, since nothing is new. Raises Killed."""
        if self.dead.wait(0.01):
            raise Killed

    def ends_by(self, stop: Callable[[], None]) -> None:
        """Say what ends a wait of its work. Raises Killed."""
        self._on_kill = stop
        if self.dead.is_set():
            raise Killed

    def interrupt(self) -> None:
        """End its wait."""
        self._on_kill()

    def kill(self) -> None:
        self.dead.set()
        # In the middle of a statement or a transaction.
        self.conn.cancel()
        self.interrupt()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.conn.close()

    def wait_refused(self) -> str:
        """Wait until it has ended by itself; returns why."""
        self._thread.join(60)
        assert self.error is not None
        self.conn.close()
        return first_line(self.error)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction of effects, which is lost where the owner is killed meanwhile."""
        with self.conn.transaction():
            yield
            if self.dead.is_set():
                raise Killed

    def _live(self) -> None:
        with suppress(Killed):
            try:
                self._work(self)
            except (psycopg.Error, RelayError, ReaderError, api.Refused) as error:
                if not self.dead.is_set():
                    self.error = error


class Threaded(Consumer):
    """A consumer whose owners are threads."""

    @property
    def dsn(self) -> str:
        """Where effects are made."""
        return self.outbox.reader_dsn

    @abstractmethod
    def work(self, life: Life) -> None:
        """Read the log, from where it is on, until the owner is killed."""

    def prepare(self) -> None:
        self.outbox.conn.execute(EFFECTS)
        self._lives: list[Life] = []
        self._origin = self.outbox.value("select relay.log_origin(relay.history())")

    def start(self) -> Life:
        self._lives.append(Life(self.work, self.dsn))
        return self._lives[-1]

    def refusal(self) -> str:
        return Life(self.work, self.dsn).wait_refused()

    def read(self) -> list[int]:
        for each in self._lives:
            if each.error is not None:
                raise each.error
        return super().read()

    def place(self, life: Life) -> str:
        """Where it is, as it has stored it with its effects; empty at the beginning."""
        row = life.conn.execute("select place from places").fetchone()
        return row[0] if row else ""

    def keep(self, life: Life, snapshot: str) -> None:
        """Let retention keep what it has not read: the place of a reader of its own."""
        life.conn.execute("select relay.seek('r', %s)", (f"0/{snapshot}@{self._origin}",))


class SqlReader(Threaded):
    """A named reader, by relay.read and relay.advance in the transaction of the effects."""

    steps = 1200

    def prepare(self) -> None:
        super().prepare()
        self.outbox.reader.execute("select relay.declare_reader('r', start => 'beginning')")

    def work(self, life: Life) -> None:
        while True:
            found = False
            try:
                with life.transaction():
                    rows = life.conn.execute(
                        "select position, id from relay.read('r', %s)", (PORTION,)
                    ).fetchall()
                    for _, event_id in rows:
                        life.conn.execute(EFFECT, (event_id,))
                    if rows:
                        found = True
                        life.conn.execute("select relay.advance('r', %s)", (rows[0][0],))
            except psycopg.errors.ObjectNotInPrerequisiteState as error:
                if error.diag.constraint_name != "relay_reader_moved":
                    raise
                found = True
            if not found:
                life.pause()

    def seek(self) -> None:
        self.outbox.reader.execute("select relay.seek('r', 'beginning')")


class PythonReader(Threaded):
    """A named reader, by `subscribe`: each transaction is committed with its effects."""

    options: ClassVar[dict[str, Any]] = {}

    def prepare(self) -> None:
        super().prepare()
        lanes = self.options.get("lanes")
        self.outbox.reader.execute(
            "select relay.declare_reader('r', start => 'beginning', lanes => %s::int)", (lanes,)
        )

    def work(self, life: Life) -> None:
        reader = subscribe(
            self.outbox.reader_dsn, "r", start=None, page=PORTION, poll=0.02, **self.options
        )
        life.ends_by(reader.stop)
        with closing(iter(reader)) as transactions:  # type: ignore[type-var]
            for transaction in transactions:
                with suppress(ReaderMoved), life.transaction(), transaction.commit(life.conn):
                    for each in transaction.events:
                        life.conn.execute(EFFECT, (each.id,))

    def seek(self) -> None:
        self.outbox.reader.execute("select relay.seek('r', 'beginning')")

    def cut(self) -> None:
        self.outbox.conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and application_name like 'relay reader r%'"
        )


class Lanes(PythonReader):
    """A reader with lanes, which its processes share."""

    order: ClassVar[Order] = "host"
    options: ClassVar[dict[str, Any]] = {"lanes": 3}


class HttpStream(Threaded):
    """A client of the server-sent events, which stores its last id with the effects."""

    owners = 1

    def prepare(self) -> None:
        super().prepare()
        self.outbox.reader.execute("select relay.declare_reader('r', start => 'beginning')")
        self._serve()

    def _serve(self) -> None:
        settings = api.settings_of(self.outbox)
        self._address = self.cleanup.enter_context(api.served(settings))
        self._token = api.new_token(settings, name=f"program {len(self.outbox.column(TOKENS))}")

    def work(self, life: Life) -> None:
        while not life.dead.is_set():
            with suppress(OSError, EOFError, HTTPException):
                self._stream(life)

    def _stream(self, life: Life) -> None:
        last = self.place(life)
        start = {} if last else {"after": "beginning"}
        with api.Source(self._address, self._token, last, **start) as source:
            source.require()
            life.ends_by(source.cut)
            while True:
                source.take(len(source.events) + 1)
                with life.transaction():
                    life.conn.execute(EFFECT, (source.events[-1]["id"],))
                    life.conn.execute(PLACE, (source.last,))
                    position = position_of(source.last)
                    if position is not None:
                        self.keep(life, str(position.before))

    def cut(self) -> None:
        for each in self._lives:
            each.interrupt()

    def refusal(self) -> str:
        # A server remembers which witnesses the database has: it is another one after a failover.
        self.cleanup.close()
        self._serve()
        return super().refusal()

    def seek(self) -> None:
        self.outbox.conn.execute("delete from places")
        self.outbox.reader.execute("select relay.seek('r', 'beginning')")


def _ids(reader: StreamReader | DifferenceReader, parts: Any) -> list[str]:
    return [
        each
        for part in parts
        for batch in reader.read(part)
        for each in batch.column("id").to_pylist()
    ]


class SourceBatches(Threaded):
    """Batches of the data source, from one position to the next, which is stored with the effects."""

    order: ClassVar[Order] = "none"
    owners = 1

    def prepare(self) -> None:
        super().prepare()
        self.outbox.reader.execute("select relay.declare_reader('r', start => 'beginning')")

    @property
    def dsn(self) -> str:
        return self.outbox.relay_dsn

    def work(self, life: Life) -> None:
        while True:
            before = self.place(life)
            now = self._position(life)
            given = {"fromSnapshot": before} if before else {}
            options = {"dsn": self.outbox.relay_dsn, "toSnapshot": now, "partitions": "2", **given}
            reader = DifferenceReader(parse(options, "batch"))
            found = [] if now == before else _ids(reader, reader.partitions())
            with life.transaction():
                life.conn.cursor().executemany(EFFECT, [(each,) for each in found])
                life.conn.execute(PLACE, (now,))
                self.keep(life, now.partition("@")[0])
            if not found:
                life.pause()

    def _position(self, life: Life) -> str:
        """The newest position of the log."""
        ((position,),) = life.conn.execute(
            "select concat(snapshot, '@', witness) from relay.recent_witness()"
        )
        return str(position)

    def seek(self) -> None:
        self.outbox.conn.execute("delete from places")
        self.outbox.reader.execute("select relay.seek('r', 'beginning')")


@dataclass
class Checkpoint:
    """What Spark has of a query: the offset up to which batches are done, and the end of one that may not be."""

    done: dict[str, str] = field(default_factory=dict)
    begun: dict[str, str] | None = None
    number: int = 0


class SourceStream(Threaded):
    """A stream of the data source, as Spark drives it: it repeats a batch that was begun, whose number tells that."""

    order: ClassVar[Order] = "none"
    owners = 1

    def prepare(self) -> None:
        super().prepare()
        self._checkpoint = Checkpoint()
        # From its first trigger on, retention keeps what it has not read.
        reader = self._reader()
        reader.latestOffset(reader.initialOffset(), ReadMaxRows(PORTION))
        reader.stop()

    @property
    def dsn(self) -> str:
        return self.outbox.relay_dsn

    def _reader(self) -> StreamReader:
        given = {"dsn": self.outbox.relay_dsn, "partitions": "2", "reader": "r"}
        return StreamReader(parse(given, "stream"))

    def work(self, life: Life) -> None:
        reader = self._reader()
        kept = self._checkpoint
        with closing(_Stopped(reader)):
            kept.done = kept.done or reader.initialOffset()
            while True:
                if kept.begun is None:
                    end = reader.latestOffset(kept.done, ReadMaxRows(PORTION))
                    if end == kept.done:
                        life.pause()
                        continue
                    kept.begun, kept.number = end, kept.number + 1
                found = _ids(reader, reader.partitions(kept.done, kept.begun))
                if self.place(life) != str(kept.number):
                    with life.transaction():
                        life.conn.cursor().executemany(EFFECT, [(each,) for each in found])
                        life.conn.execute(PLACE, (str(kept.number),))
                reader.commit(kept.begun)
                kept.done, kept.begun = kept.begun, None

    def seek(self) -> None:
        # A new checkpoint.
        self._checkpoint = Checkpoint(number=self._checkpoint.number)


@dataclass
class _Stopped:
    reader: StreamReader

    def close(self) -> None:
        self.reader.stop()


# relay's own


class OfGroup(Consumer):
    """A consumer that relay runs: its owners are processes of relay. The target is another database."""

    order: ClassVar[Order] = "host"
    is_noted_at_once = False
    mode: ClassVar[str] = "auto"
    handler: ClassVar[dict[str, Any]] = {}

    def prepare(self) -> None:
        self.places.target.conn.execute(EFFECTS)
        self.outbox.install_again(self.settings)
        self._started = 0

    @property
    def settings(self) -> Settings:
        """What its processes run with."""
        return Settings(**self._config())

    def _config(self) -> dict[str, Any]:
        name, handler = self.named_handler()
        return self.outbox.config(
            source={**self.outbox.config()["source"], "mode": self.mode},
            target={"dsn": self.places.target.relay_dsn},
            handlers={name: handler},
            routes=[{"handlers": [name]}],
            retention={"keep": "7d"},
            poll={"batch_size": PORTION, "wait_period_ms": 50},
        )

    @abstractmethod
    def named_handler(self) -> tuple[str, dict[str, Any]]:
        """The handler's name and its section."""

    def start(self) -> Owner:
        self._started += 1
        file = self.places.folder / f"relay{self._started}.yaml"
        file.write_text(yaml.safe_dump(self._config()))
        made: Running = self.cleanup.enter_context(running(file))
        return made

    def refusal(self) -> str:
        return run_until_fault(self.settings)

    def read(self) -> list[int]:
        found = self.places.target.column("select id from effects order by seq")
        return [number_of(each) for each in found]


class Target(OfGroup):
    """The target of a group, from the stream."""

    def named_handler(self) -> tuple[str, dict[str, Any]]:
        statement = "insert into effects (id, host_id) values (%(id)s, %(host_id)s)"
        return "effects", {"type": "sql", "statement": statement}

    def seek(self) -> None:
        offsets.seek(self.settings, offsets.plan_seek(self.settings, "beginning", None), None)


class PolledTarget(Target):
    """The target of a group that only polls."""

    mode = "poll"


class Sink(OfGroup):
    """A sink: a function that completes each delivery in the transaction of its effects."""

    def named_handler(self) -> tuple[str, dict[str, Any]]:
        retry = {"wait": 0.05, "max_wait": 0.1, "jitter": 0.01, "attempts": 1000}
        function = {
            "type": "function",
            "callable": "tests.callables:complete",
            "start": "beginning",
        }
        return "mail", {**function, "retry": retry}

    def seek(self) -> None:
        _seek_sink(self.settings, "mail")


class Fill(Target):
    """A queue that is filled from the beginning of the log on, while relay goes on with what is new."""

    appends = False

    def _config(self) -> dict[str, Any]:
        return {**super()._config(), "queues": {"work": {"start": "beginning", "key": "host"}}}

    def read(self) -> list[int]:
        found = self.places.target.column("select event_id from relay.queue_messages order by id")
        return [number_of(each) for each in found]

    def seek(self) -> None:
        self.places.target.conn.execute("select relay.rebuild_queue('work', 'beginning')")


class Threads(OfGroup):
    """A consumer that relay runs in this process, with the tests' Spark session; killed, its sessions are cut."""

    def start(self) -> Owner:
        return _Cut(self)

    def refusal(self) -> str:
        return run_until_fault(self.settings, self.places.session())


class _Cut:
    def __init__(self, consumer: Threads) -> None:
        self._places = consumer.places
        self._running = ExitStack()
        self._running.enter_context(relaying(consumer.settings, consumer.places.session()))

    def kill(self) -> None:
        for each in (self._places.outbox, self._places.target):
            each.conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and application_name like 'relay%' and pid <> pg_backend_pid()"
            )
        self._running.close()


class SparkTarget(Target, Threads):
    """The target of a group whose tasks run on Spark."""

    def _config(self) -> dict[str, Any]:
        return {**super()._config(), "batch": {"inline_max_events": 0}}


class SparkSink(Threads):
    """A sink that writes a Delta table."""

    order: ClassVar[Order] = "none"

    @property
    def _table(self) -> Path:
        return self.places.folder / "lake"

    def named_handler(self) -> tuple[str, dict[str, Any]]:
        written = {"path": str(self._table), "format": "delta", "every": 0.2, "start": "beginning"}
        return "lake", {"type": "spark", **written}

    def read(self) -> list[int]:
        import deltalake

        if not deltalake.DeltaTable.is_deltatable(str(self._table)):
            return []
        found = deltalake.DeltaTable(self._table).to_pyarrow_table(columns=["id"])["id"]
        return [number_of(each) for each in found.to_pylist()]

    def seek(self) -> None:
        _seek_sink(self.settings, "lake")


def _seek_sink(settings: Settings, name: str) -> None:
    sinks.seek(settings, name, to="beginning")


LIGHT: tuple[type[Consumer], ...] = (
    *(Target, PolledTarget, Sink, Fill),
    *(SqlReader, PythonReader, Lanes, HttpStream, SourceBatches, SourceStream),
)
ON_SPARK: tuple[type[Consumer], ...] = (SparkTarget, SparkSink)
KINDS = [
    *(pytest.param(kind, id=kind.__name__) for kind in LIGHT),
    *(
        pytest.param(
            kind, id=f"spark-{kind.__name__}", marks=[pytest.mark.rare, pytest.mark.timeout(300)]
        )
        for kind in ON_SPARK
    ),
]


def wait_read(consumer: Consumer, numbers: set[int], times: int = 1) -> None:
    """Wait until a consumer has had some events, each so often at least."""
    wait_until(
        lambda: len([n for n in consumer.read() if n in numbers]) >= times * len(numbers), 90
    )


def wait_further(consumer: Consumer, had: int, numbers: set[int]) -> None:
    """Wait until a consumer has more events than it had, or all there are."""
    wait_until(lambda: len(read := consumer.read()) > had or numbers <= set(read), 90)
