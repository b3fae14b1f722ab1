"""The Spark session: how it is started."""

from __future__ import annotations

import os
from typing import Any

import psutil

from relay.spark.session import Session
from tests.conftest import SPARK_CONF


def test_the_configuration_reaches_spark_and_no_command_line(spark_session: Session) -> None:
    session = spark_session.get()
    assert session is not None
    assert session.conf.get("spark.relay.password") == SPARK_CONF["spark.relay.password"]
    assert session.conf.get("spark.master") == "local[2]"
    lines = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    assert any("--properties-file" in line for line in lines)
    assert not [line for line in lines if "s3cret:" in line]


def test_the_jvm_gets_no_signal_of_the_process_group(spark_session: Session) -> None:
    """It ended before the batch in flight, and a stopping relay rebuilt the session."""
    from pyspark import SparkContext

    assert spark_session.get(timeout=120) is not None
    gateway: Any = SparkContext._gateway
    assert os.getpgid(gateway.proc.pid) != os.getpgrp()
