"""Fixtures: one PostgreSQL server and one Spark session for the whole run, a fresh database for each test."""

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
    """A PostgreSQL server that all tests share; nobody may stop it."""
    with start_server() as running:
        yield running


@pytest.fixture
def mortal_server() -> Iterator[Server]:
    """A server of the test's own, to be stopped and killed."""
    with start_server() as running:
        yield running


@pytest.fixture
def database(server: Server) -> Iterator[str]:
    """The DSN of a fresh database; its slots go with it."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    dsn = server.create_database(name)
    yield dsn
    server.drop_database(name)


@pytest.fixture
def outbox(database: str) -> Iterator[Outbox]:
    """An installed outbox with a projection table in a fresh database."""
    with Outbox(database) as made:
        made.install()
        yield made


@pytest.fixture(scope="session")
def event_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the event log of the Spark session that all tests share."""
    return tmp_path_factory.mktemp("spark-events")


@pytest.fixture(scope="session")
def shared_spark_session(event_log: Path) -> Iterator[Session]:
    """A local Spark session that all tests share."""
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
    """The shared session, built again after a test with a session of its own: a process has one at a time."""
    session = shared_spark_session.get(timeout=120)
    assert session is not None
    if SparkContext._active_spark_context is not session.sparkContext:
        shared_spark_session.replace_if_dead(session)
        assert shared_spark_session.get(timeout=120) is not None
    return shared_spark_session


@pytest.fixture(params=["inline", "spark"])
def engine(request: pytest.FixtureRequest) -> str:
    """Every semantic test runs on both engines."""
    return str(request.param)


@pytest.fixture
def session(request: pytest.FixtureRequest, engine: str) -> Session | None:
    """The shared Spark session, for the engine that needs one."""
    return request.getfixturevalue("spark_session") if engine == "spark" else None
