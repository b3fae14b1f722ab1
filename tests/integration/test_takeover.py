"""The first edition of 0.1.0, from the history of the repository, is taken over while publishers go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import psycopg
import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import Jsonb

from tests.outbox import event, host, wait_until
from tests.process import ROOT

pytestmark = [pytest.mark.rare, pytest.mark.slow]

FORMER = "7878c26"


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program of that commit. Its packages are those of this environment."""
    folder = tmp_path_factory.mktemp("former")
    packed = subprocess.run(
        ["git", "archive", FORMER, "relay", "sql", "config"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if packed.returncode:
        pytest.skip(f"the repository has no commit {FORMER}, as an archive of the source has none")
    subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
    return folder


class Program:
    """`relay` of a folder, for one database."""

    def __init__(self, folder: Path, config: Path) -> None:
        self._command = [sys.executable, "-m", "relay"]
        self._place = folder
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("RELAY_")},
            "PYTHONPATH": str(folder),
            "RELAY_CONFIG": str(config),
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *arguments],
            cwd=self._place,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    @contextmanager
    def running(self, log: Path) -> Iterator[subprocess.Popen[str]]:
        """The service; SIGTERM ends it, with status 0."""
        with log.open("w") as written:
            process = subprocess.Popen(
                [*self._command, "run"],
                cwd=self._place,
                env=self._environment,
                text=True,
                stdout=written,
                stderr=subprocess.STDOUT,
            )
            try:
                yield process
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0, log.read_text()
            finally:
                process.kill()
                process.wait()


@contextmanager
def publishing(dsn: str) -> Iterator[None]:
    """Publish events of four hosts, one commit after another, until the block ends; none may fail."""
    stopped, faults = Event(), []

    def publish() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            number = 0
            while not stopped.wait(0.002):
                number += 1
                try:
                    conn.execute(
                        "select relay.publish(%s, null, %s)",
                        (host(number % 4), Jsonb([event(number)])),
                    )
                except psycopg.Error as error:
                    faults.append(str(error))
                    return

    thread = Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
    assert not faults


def counts(conn: psycopg.Connection[Sequence[int]]) -> tuple[int, int, int]:
    """How many events were published, how many effects there are, and of how many events."""
    found = conn.execute(
        "select (select count(*) from outbox_message_t), count(*), count(distinct id) from effects"
    ).fetchone()
    assert found is not None
    return found[0], found[1], found[2]


def test_an_installation_of_then_is_taken_over(former: Path, database: str, tmp_path: Path) -> None:
    name = conninfo_to_dict(database)["dbname"]
    config = tmp_path / "relay.yaml"
    statement = "insert into effects values (%(id)s)"
    config.write_text(
        yaml.safe_dump(
            {
                "source": {"dsn": database, "slot": name, "publication": name},
                "batch": {"inline_max_events": 10_000},
                "handlers": {"effects": {"type": "sql", "each": "event", "statement": statement}},
                "routes": [{"handlers": ["effects"]}],
            }
        )
    )
    then, now = Program(former, config), Program(ROOT, config)
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("create table effects (id uuid)")
        made = then.run("init")
        assert made.returncode == 0, made.stderr
        with publishing(database):
            with then.running(tmp_path / "then.log"):
                wait_until(lambda: counts(conn)[1] > 50)
                # It moves positions to other tables, for which nobody may run.
                refused = now.run("init")
                assert refused.returncode != 0
                assert "stop every instance, then run `relay init`" in refused.stderr
                reached = counts(conn)[0]
                wait_until(lambda: counts(conn)[1] > reached)
            migrated = now.run("init")
            assert migrated.returncode == 0, migrated.stderr
            reached = counts(conn)[0]
            with now.running(tmp_path / "now.log"):
                wait_until(lambda: counts(conn)[1] > reached + 50)
        with now.running(tmp_path / "rest.log"):
            wait_until(lambda: counts(conn)[1] >= counts(conn)[0])
        published, effects, distinct = counts(conn)
        assert published == effects == distinct
        # There is no way back: the former program says what it does not know, and changes nothing.
        back = then.run("check")
        assert back.returncode == 2
        assert counts(conn) == (published, effects, distinct)
