"""Spark's executors connect with the newest secrets, which they have neither files nor functions for.

Public reports: crystaldba/postgres-mcp#169, open-metadata/OpenMetadata#28822, sequelize/sequelize#13298.
"""

from __future__ import annotations

import pytest
from psycopg.conninfo import make_conninfo

from relay.spark.data_source import register
from relay.spark.session import Session
from tests import callables
from tests.field.test_rotated_secrets import Login, login
from tests.outbox import event, host, relaying

__all__ = ["login"]


@pytest.mark.parametrize("kind", ["file", "call"])
def test_executors_connect_with_a_rotated_password(
    login: Login, spark_session: Session, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = login.outbox
    monkeypatch.setattr(callables, "PASSWORDS", ["p"])
    secret = {"call": "tests.callables:rotated"} if kind == "call" else None
    settings = login.settings(secret, batch={"inline_max_events": 0})
    with relaying(settings, spark_session):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        callables.PASSWORDS.append("second")
        login.write("second")
        login.change("second")
        outbox.publish(host(1), event(2))
        outbox.publish(host(2), event(3))
        outbox.wait_handled()
    outbox.assert_exact()


@pytest.mark.rare
def test_a_stream_reads_with_a_rotated_password(login: Login, spark_session: Session) -> None:
    """Spark pickles the reader of a stream once."""
    session = spark_session.get(timeout=120)
    assert session is not None
    register(session)
    outbox = login.outbox
    file = login.file.with_name("dsn")
    file.write_text(make_conninfo(login.dsn, password="p"))
    outbox.publish(host(1), event(1))
    frame = session.readStream.format("outbox").option("dsn.file", str(file)).load()
    query = frame.writeStream.format("memory").queryName("rotated").start()
    try:
        query.processAllAvailable()
        # A query ends when the database refuses it, so the file is first.
        file.write_text(file.read_text().replace("password=p", "password=second"))
        login.change("second")
        outbox.publish(host(1), event(2))
        query.processAllAvailable()
        assert session.sql("select * from rotated").count() == 2
    finally:
        query.stop()
