"""relay spark package: what is in the archive, and executors that have nothing else."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import psycopg
import pytest
import yaml

from tests.outbox import Outbox
from tests.process import ROOT, relay, running
from tests.spark_cluster import StandaloneCluster

HANDLERS = """
import json

def count(transaction, cursor):
    for event in transaction.events:
        amount = json.loads(event.text("payload"))["amount"]
        cursor.execute("insert into counted values (%s, %s)", (event.text("id"), amount))
"""


def test_a_module_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "relay.yaml"
    config.write_text("handlers: {h: {type: python, callable: 'no_such.module:f'}}")
    found = relay("spark", "package", "--config", str(config), cwd=tmp_path)
    assert found.returncode == 2
    (line,) = found.stderr.splitlines()
    assert "handlers.h.callable: there is no module 'no_such'" in line
    assert not (tmp_path / "relay-executors.tar.gz").exists()


def test_an_archive_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    config, file = tmp_path / "relay.yaml", tmp_path / "none" / "executors.tar.gz"
    config.write_text("handlers: {}")
    found = relay("spark", "package", "--config", str(config), "--output", str(file), cwd=tmp_path)
    assert found.returncode == 2
    (line,) = found.stderr.splitlines()
    assert f"--output: {file} cannot be written: No such file or directory" in line


@pytest.mark.rare
@pytest.mark.timeout(600)
def test_executors_need_only_python_and_the_archive(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    (tmp_path / "shop_handlers.py").write_text(HANDLERS)
    outbox.conn.execute("create table counted (id uuid primary key, amount numeric)")
    handler = {"type": "python", "callable": "shop_handlers:count"}
    config = outbox.config(
        handlers={"count": handler},
        routes=[{"handlers": ["count"]}],
        batch={"inline_max_events": 0},
    )
    file = tmp_path / "relay.yaml"
    file.write_text(yaml.safe_dump(config))
    paths = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = ("spark", "package", "--config", str(file), "--json", "--output")
    archives = [tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"]
    built = [relay(*command, str(each), cwd=tmp_path, **paths) for each in archives]
    assert len({hashlib.sha256(each.read_bytes()).digest() for each in archives}) == 1
    output = json.loads(built[0].stdout)
    assert output["modules"] == ["relay", "shop_handlers"]
    assert not {"pyspark", "py4j"} & set(output["distributions"])
    with tarfile.open(archives[0]) as archive:
        assert {"shop_handlers.py", "relay/model/events.py"} <= set(archive.getnames())
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = str(bare / "bin" / "python")
    assert subprocess.run([python, "-c", "import psycopg"], capture_output=True).returncode
    with StandaloneCluster(tmp_path, 1, bare=True) as cluster:
        config["spark"] = cluster.conf()
        config["spark"]["conf"] |= output["conf"] | {"spark.pyspark.python": python}
        file.write_text(yaml.safe_dump(config))
        outbox.fill(200, events=5)
        with running(file, **paths) as service:
            outbox.wait_drained(240)
            assert service.terminate() == 0
    with psycopg.connect(outbox.relay_dsn) as conn:
        counted = conn.execute("select count(*), sum(amount) from counted").fetchone()
    assert counted == (1_000, 200 * 15)
