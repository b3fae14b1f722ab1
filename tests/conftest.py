"""Fixtures: one PostgreSQL server and one Spark session for the whole run, a new database for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from pyspark import SparkContext

from relay.config.settings import SparkSettings
from relay.spark.session import Session
from tests.outbox import Outbox
from tests.postgres import Server, start_server

_numbers = count(1)

SPARK_CONF = {"spark.relay.password": r" s3cret: 'é\n' = \"#\" "}


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The PostgreSQL server that all tests share; no test may stop it."""
    with start_server() as running:
        yield running


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


@pytest.fixture
def outbox(database: str) -> Iterator[Outbox]:
    """An installed outbox with a projection table in a new database."""
    with Outbox(database) as installed:
        installed.install()
        yield installed


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
    session = Session(
        SparkSettings.model_validate({"master": "local[2]", "conf": SPARK_CONF | logging})
    )
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


@pytest.fixture(params=["inline", "spark"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine: a test with this fixture runs on both."""
    return str(request.param)


@pytest.fixture
def session(request: pytest.FixtureRequest, engine: str) -> Session | None:
    """The shared Spark session for the engine `spark`, None for `inline`."""
    return request.getfixturevalue("spark_session") if engine == "spark" else None
