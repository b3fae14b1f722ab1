"""Fixtures: one PostgreSQL server and one Spark session for the whole run, a new database for each test."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from itertools import count
from pathlib import Path

import httpx
import hypothesis
import psycopg
import pytest
from pyspark import SparkContext
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling, Scheduling

from bench.workers.spark_reader import JAR
from relay import logs
from relay.config.settings import SparkSettings
from relay.spark.session import Session
from tests import clients
from tests.outbox import Copied, Installing, Outbox
from tests.postgres import CARELESS, Server, start_server
from tests.roles import make_all
from tests.spark_cluster import StandaloneCluster

_numbers = count(1)

# How long an example takes says more about the machine than about the code. `make chaos` tries more of them.
hypothesis.settings.register_profile(
    "relay", deadline=None, max_examples=1_000 if "RELAY_CHAOS_ROUNDS" in os.environ else 20
)
hypothesis.settings.load_profile("relay")

# Five seconds, which a busy machine needs for an answer now and then. A test that waits for ever is ended by pytest.
_patience = signature(httpx.get).parameters["timeout"].default
_patience.connect = _patience.read = _patience.write = _patience.pool = None

SPARK_CONF = {"spark.relay.password": r" s3cret: 'é\n' = \"#\" "}


class _OneSpark(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Gives one process the tests that need the shared Spark session, and one those of the cluster.

    The marks `xdist_group` have no effect: xdist 3.8 writes them to an attribute that pytest 9.2 does not read.
    """

    def _split_scope(self, nodeid: str) -> str:
        if "/unit/" in nodeid:
            return nodeid
        if "spark_cluster" in nodeid:
            return "cluster"
        for module in _SHARE_MUCH:
            if module in nodeid:
                return module
        return "spark" if any(word in nodeid for word in _NEED_SPARK) else nodeid


_SHARE_MUCH = tuple(
    f"test_{name}.py"
    for name in ("bench_publish", "connect", "demo", "embedded", "release", "runbooks")
)
"""Modules whose tests share what takes long to set up."""
_NEED_SPARK = (
    "spark",
    "bad_rows",
    "frozen_executors",
    "frozen_sinks",
    "lake_values",
    "late_writers",
    "lost_destinations",
    "test_checkpoints",
    "test_completeness",
    "test_examples",
    "test_restoration",
    "test_verify",
)
"""What the names of tests that need the shared Spark session have."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector off what is imported and collected: a million objects each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests marked `server(major)` their fixture; refuse one that would start another JVM in another process."""
    for item in items:
        if item.get_closest_marker("server"):
            item.fixturenames.insert(0, "server_new_enough")  # type: ignore[attr-defined]
    strangers = [
        item.nodeid
        for item in items
        if "spark_session" in getattr(item, "fixturenames", ())
        and not any(word in item.nodeid for word in _NEED_SPARK)
    ]
    if strangers:
        raise pytest.UsageError(f"add to _NEED_SPARK what names {', '.join(strangers)}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Schedule the tests of `--dist loadgroup`."""
    return _OneSpark(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget the handler of a command that ran in this process: what this test imports would bring it back."""
    logs._own = None


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The PostgreSQL server that all tests share; no test may stop it."""
    with start_server(CARELESS, own_identifier=True) as running:
        with psycopg.connect(running.dsn(), autocommit=True) as conn:
            make_all(conn)
        with running.keeping_session():
            yield running


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    """Close the HTTP clients of a test at its end."""
    with clients.opened:
        yield


@pytest.fixture
def server_new_enough(request: pytest.FixtureRequest) -> None:
    """Skip a test that is marked `server(major)`, and has this fixture for that, on an older server."""
    for mark in request.node.iter_markers("server"):
        (major,) = mark.args
        if request.getfixturevalue("server").major < major:
            pytest.skip(f"needs PostgreSQL {major}")


@pytest.fixture
def killable_server() -> Iterator[Server]:
    """A server for one test, which may stop and kill it."""
    with start_server() as running:
        yield running


@pytest.fixture
def database(server: Server) -> Iterator[str]:
    """The DSN of a new database, which is dropped with its slots."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    dsn = server.create_database(name)
    yield dsn
    server.drop_database(name)


@pytest.fixture(scope="session")
def templates(server: Server) -> Callable[[str, Installing], str]:
    """Gives the name of a database that new ones copy: an outbox as a function installs it, whose slot is dropped."""

    @cache
    def template(name: str, install: Installing) -> str:
        database = f"{name}_{os.getpid()}"
        with Outbox(server.create_database(database)) as outbox:
            install(outbox)
            outbox.conn.execute("select pg_drop_replication_slot(%s)", (outbox.slot,))
        return database

    return template


@pytest.fixture(scope="session")
def installed(templates: Callable[[str, Installing], str]) -> str:
    """The template of an outbox with a projection table."""
    return templates("installed", Outbox.install)


@pytest.fixture(scope="session")
def copied(server: Server, templates: Callable[[str, Installing], str]) -> Copied:
    """Makes outboxes in new databases: as a function installs them, which is called once."""

    @contextmanager
    def copy(name: str, install: Installing) -> Iterator[Outbox]:
        template = templates(name, install)
        database = f"test_{os.getpid()}_{next(_numbers)}"
        dsn = server.create_database(database, "owner app_owner", template=template)
        with Outbox(dsn, is_prepared=True) as outbox:
            outbox.adopt(template)
            yield outbox
        server.drop_database(database)

    return copy


@pytest.fixture
def outbox(copied: Copied) -> Iterator[Outbox]:
    """An installed outbox with a projection table in a new database."""
    with copied("installed", Outbox.install) as outbox:
        yield outbox


@pytest.fixture
def narrow(server: Server, outbox: Outbox) -> Iterator[str]:
    """The DSN of a target whose encoding lacks most characters."""
    name = f"{outbox.slot}_narrow"
    options = "encoding 'LATIN1' lc_collate 'C' lc_ctype 'C' template template0"
    yield server.create_database(name, options)
    server.drop_database(name)


@pytest.fixture(scope="session")
def event_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the event log of the Spark session that all tests share."""
    return tmp_path_factory.mktemp("spark-events")


@pytest.fixture(scope="session")
def shared_spark_session(event_log: Path) -> Iterator[Session]:
    """The local Spark session that all tests share."""
    logging = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.dir": event_log.as_uri(),
    }
    # The default is 200 tasks for each exchange, of a few rows here.
    small = {"spark.sql.shuffle.partitions": "2"}
    workers = {"spark.python.daemon.module": "tests.spark_daemon"}
    driver = {"spark.jars": JAR} if JAR else {}
    conf = SPARK_CONF | logging | small | workers | driver
    session = Session(SparkSettings.model_validate({"master": "local[2]", "conf": conf}))
    session.start()
    assert session.get(timeout=120) is not None
    yield session
    session.close()


@pytest.fixture
def spark_session(shared_spark_session: Session) -> Session:
    """The shared session, rebuilt after a test with another session: a process has one at a time."""
    session = shared_spark_session.get(timeout=120)
    assert session is not None
    if SparkContext._active_spark_context is not session.sparkContext:
        shared_spark_session.replace_if_dead(session)
        assert shared_spark_session.get(timeout=120) is not None
    return shared_spark_session


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """A Spark cluster of three workers; a test that ends a part of it starts it again."""
    with StandaloneCluster(tmp_path_factory.mktemp("cluster"), 3) as found:
        yield found


@pytest.fixture(params=["inline", "spark"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine: a test with this fixture runs on both."""
    return str(request.param)


@pytest.fixture
def session(request: pytest.FixtureRequest, engine: str) -> Session | None:
    """The shared Spark session for the engine `spark`, None for `inline`."""
    return request.getfixturevalue("spark_session") if engine == "spark" else None
