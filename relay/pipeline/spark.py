"""Runs a batch's tasks on Spark executors, through the DataFrame API only, so that Spark Connect serves as well.

The plan already knows every task, so a batch becomes a DataFrame with one row for each task and no shuffle: `mapInArrow`
applies the rows where they lie. A row carries its task pickled, as Spark carries the function itself.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_when_event_set, wait_exponential_jitter

from relay.config import Settings
from relay.events import Task
from relay.faults import Action, ConfigurationError, TaskFault
from relay.java import java_home
from relay.pipeline.apply import Applier
from relay.pipeline.inline import Result, attempt

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_SCHEMA = "task int, result binary"
_ARROW_RESULT = pa.schema([("task", pa.int32()), ("result", pa.binary())])

_DEFAULTS = {
    "spark.app.name": "relay",
    # Without it every Python task waits 40 ms for a delayed TCP acknowledgement on the loopback interface.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # What the driver remembers of past jobs would grow with every batch.
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
    "spark.ui.retainedTasks": "100",
    "spark.sql.ui.retainedExecutions": "10",
}
_LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
}


class SparkEngine:
    """A Spark session that starts in the background and is built again when it dies."""

    name = "spark"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._configuration = pickle.dumps(settings)
        self._session: SparkSession | None = None
        self._ready = Event()
        self._closing = Event()
        self._starter: Thread | None = None
        self._error: ConfigurationError | None = None

    def start(self) -> None:
        """Begin to build a session; returns at once."""
        if self._starter is not None and self._starter.is_alive():
            return
        self._ready.clear()
        self._starter = Thread(target=self._build_until_it_works, name="spark-start", daemon=True)
        self._starter.start()

    @property
    def ready(self) -> bool:
        """Whether a session is there. Raises ConfigurationError if there can never be one."""
        if self._error is not None:
            raise self._error
        return self._ready.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait for the session, at most so many seconds; returns whether it is there."""
        self._ready.wait(timeout)
        return self.ready

    def run(self, tasks: Sequence[Task]) -> list[Result]:
        """Apply the tasks on the executors; results are in the order of the tasks.

        If the session dies, every task without a result is a fault to try again, and a new session is being built.
        """
        session = self._session
        if session is None:
            return [TaskFault(Action.RETRY, "the Spark session is being built")] * len(tasks)
        try:
            return self._run_job(session, tasks)
        except Exception as error:
            fault = TaskFault(Action.RETRY, f"the Spark job failed: {_first_line(error)}")
            if not _alive(session):
                log.warning("the Spark session died; building it again")
                self._discard()
                self.start()
            return [fault] * len(tasks)

    def close(self) -> None:
        """Stop the session and its JVM."""
        self._closing.set()
        if self._starter is not None:
            self._starter.join(30)
        self._discard()

    def _run_job(self, session: SparkSession, tasks: Sequence[Task]) -> list[Result]:
        table = pa.table(
            {
                "task": pa.array(range(len(tasks)), pa.int32()),
                "work": pa.array([pickle.dumps(task) for task in tasks], pa.binary()),
            }
        )
        frame = session.createDataFrame(table)
        rows = frame.mapInArrow(partial(apply_rows, self._configuration), _SCHEMA).collect()
        found: dict[int, Result] = {row.task: pickle.loads(row.result) for row in rows}  # noqa: S301
        return [found[number] for number in range(len(tasks))]

    def _build_until_it_works(self) -> None:
        retrying = Retrying(
            retry=retry_if_exception_type(Exception),
            wait=wait_exponential_jitter(initial=1.0, max=30.0),
            stop=stop_when_event_set(self._closing),
            sleep=self._closing.wait,
            before_sleep=_say,
            reraise=True,
        )
        try:
            retrying(self._build)
        except ConfigurationError as error:
            self._error = error
            self._ready.set()
        except Exception as error:
            log.debug("gave up building the Spark session", extra={"fault": _first_line(error)})

    def _build(self) -> None:
        if self._closing.is_set():
            return
        _clear_remains()
        session = _session(self._settings)
        rows = session.createDataFrame(pa.table({"task": pa.array([0], pa.int32())}))
        # One job before the first batch: it finds executors that lack relay, and it warms a Python worker.
        rows.mapInArrow(partial(warm_up, self._configuration), _SCHEMA).collect()
        self._session = session
        self._ready.set()
        log.info("the Spark session is ready", extra={"spark": session.version})

    def _discard(self) -> None:
        session, self._session = self._session, None
        self._ready.clear()
        if session is not None:
            try:
                session.stop()
            except Exception as error:
                log.debug("the Spark session did not stop", extra={"fault": _first_line(error)})
        _clear_remains()


def _session(settings: Settings) -> SparkSession:
    from pyspark.sql import SparkSession

    spark = settings.spark
    builder: Any = SparkSession.builder
    if spark.remote:
        conf = dict(spark.conf)
        builder = builder.remote(spark.remote)
    else:
        conf = _classic_conf(spark.master) | spark.conf
        builder = builder.master(spark.master)
    for key, value in conf.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    return session


def _classic_conf(master: str) -> dict[str, str]:
    home = java_home()
    if home is not None:
        os.environ["JAVA_HOME"] = str(home)
    logging_file = Path(__file__).with_name("log4j2.properties")
    conf = _DEFAULTS | {
        "spark.pyspark.python": sys.executable,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={logging_file.as_uri()}",
    }
    return conf | _LOCAL if master.startswith("local") else conf


def _alive(session: SparkSession) -> bool:
    try:
        return session.range(1).count() == 1
    except Exception:
        return False


def _clear_remains() -> None:
    """End the JVM of this process, if any, and make PySpark forget it: it keeps a dead gateway for ever."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway: Any = SparkContext._gateway
    if gateway is None:
        return
    try:
        gateway.shutdown()
    except Exception as error:
        log.debug("the Spark gateway did not shut down", extra={"fault": _first_line(error)})
    process = getattr(gateway, "proc", None)
    if process is not None:
        process.stdin.close()  # the JVM ends with its standard input
        try:
            process.wait(10)
        except Exception:
            process.kill()
    SparkContext._gateway = None
    SparkContext._jvm = None
    SparkContext._active_spark_context = None
    forgetful: Any = SparkSession
    forgetful._instantiatedSession = None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _say(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    if error is not None:
        log.warning("the Spark session cannot be built yet", extra={"fault": _first_line(error)})


# On the executors.

_appliers: dict[bytes, Applier] = {}


def _applier(configuration: bytes) -> Applier:
    """This worker's applier, with its connection, kept from task to task."""
    applier = _appliers.get(configuration)
    if applier is None:
        settings: Settings = pickle.loads(configuration)  # noqa: S301
        applier = _appliers[configuration] = Applier(settings, connections=1)
    return applier


def apply_rows(configuration: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Apply the tasks of a DataFrame partition, one target transaction for each."""
    for batch in batches:
        for number, work in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
            result = attempt(_applier(configuration), pickle.loads(work.as_buffer()))  # noqa: S301
            yield _row(number, result)


def warm_up(configuration: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Build this worker's applier, so that a handler that cannot be imported here is found at the start."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            _applier(configuration)
            yield _row(number, None)


def _row(number: int, result: Result | None) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([number], pa.int32()), pa.array([pickle.dumps(result)], pa.binary())], schema=_ARROW_RESULT
    )
