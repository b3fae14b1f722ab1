"""PgBouncer in front of a test's server, where the program is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from relay.demo.embedded import free_port
from tests.outbox import wait_until

PROGRAM = shutil.which("pgbouncer")


@contextmanager
def pooled(dsn: str, mode: str = "transaction", sessions: int = 4) -> Iterator[str]:
    """Run PgBouncer in front of a database; yields the DSN that leads to it. `sessions`: those of the server."""
    if PROGRAM is None:
        pytest.skip("pgbouncer is not installed")
    server, port = conninfo_to_dict(dsn), free_port()
    parts = ("host", "port", "dbname", "user", "password")
    route = " ".join(f"{key}={server[key]}" for key in parts if server.get(key))
    with TemporaryDirectory(prefix="relay-pgbouncer-") as folder:
        file = Path(folder) / "pgbouncer.ini"
        file.write_text(
            f"[databases]\n{server['dbname']} = {route}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
            f"auth_type = any\npool_mode = {mode}\ndefault_pool_size = {sessions}\nunix_socket_dir =\n"
            "ignore_startup_parameters = extra_float_digits,options\n"
        )
        command = [PROGRAM, "-q", str(file)]
        if os.getuid() == 0:
            # It refuses to run as root.
            Path(folder).chmod(0o755)
            command = [PROGRAM, "-q", "-u", "nobody", str(file)]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        through = make_conninfo(
            host="127.0.0.1", port=port, dbname=server["dbname"], user=server.get("user")
        )
        try:
            wait_until(lambda: _answers(through))
            yield through
        finally:
            process.kill()
            process.wait(10)


def _answers(dsn: str) -> bool:
    try:
        psycopg.connect(dsn, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True
