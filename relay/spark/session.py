"""The Spark session: it is built in the background, rebuilt when it dies, and stopped with its JVM.

While it cannot be built, each attempt is reported to its `condition`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread, Timer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from relay.config.settings import Settings, SparkSettings
from relay.faults import ConfigurationError, first_line
from relay.runtime.memory import return_arrow_blocks
from relay.runtime.parts import Condition
from relay.runtime.retry import RetryUntilSuccess
from relay.spark.jvm import java_home, require_spark, start_gateway
from relay.waits import Backoff

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_UTC = {
    # Times without a zone, and dates of times, are those of UTC on every machine, as everywhere in relay.
    "spark.sql.session.timeZone": "UTC",
}
_DEFAULTS = {
    "spark.app.name": "relay",
    # Without it every Python task waits 40 ms for a delayed TCP acknowledgement on the loopback interface.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.adaptive.enabled": "false",
    # What the status tracker says of tasks is then what has happened last.
    "spark.ui.liveUpdate.period": "0",
    # Else the tasks of a sink's large job, which was submitted first, would all go before the pipeline's.
    "spark.scheduler.mode": "FAIR",
    "spark.scheduler.allocation.file": Path(__file__).with_name("fairscheduler.xml").as_uri(),
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
    **_UTC,
    # The type that every reader of Parquet knows; Spark's default is INT96.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Arrow batches go to the executors as they are, each a partition; the driver's JVM does not convert them to rows.
    "spark.sql.execution.arrow.localRelationThreshold": "0",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # The defaults keep 1,000 jobs and stages in the driver's memory.
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
    "spark.ui.retainedTasks": "100",
    "spark.sql.ui.retainedExecutions": "10",
}
_LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    # Only here: on a cluster the workers write to the executors' logs, not to relay's.
    "spark.python.daemon.module": "relay.spark.daemon",
}
_PROTECTION = {
    # Tasks carry events and the target's password. YARN and Kubernetes make the secret, a standalone cluster has one.
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.io.encryption.enabled": "true",
}

_CLASSES = (
    "PythonSQLUtils",
    "PythonUtils",
    "SimplePythonFunction",
    "org.apache.spark.sql.classic.SparkSession",
    "org.apache.spark.sql.execution.python.UserDefinedPythonFunction",
)
"""The classes of the JVM that PySpark looks up by name in each job."""

_STOPPED = "Cannot call methods on a stopped SparkContext"
"""What Java says of a context that Spark itself has stopped while it was being built."""

_WARM_UP = bytes(100_000)
_WARM_UP_JOBS = 10
_COUNT_SECONDS = 1.0
"""The least seconds between two counts of the Spark slots."""
_PROBE_SECONDS = 10.0
"""How long to wait for a task after a failed job: others may have all slots, a frozen master replaces no executor."""
_LATE_SECONDS = 60.0
"""How long Spark may start, and how long its first jobs may take, until that is reported."""
_CONNECT_SECONDS = 3.0
"""How long an address of Spark may take to accept a connection that asks whether anybody is there."""
_CONNECT_PORT = 15002
_MASTER_PORTS = {"spark": 7077, "http": 80, "https": 443}
_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 30.0
"""How long to wait after the first attempt to build the session that fails, and after later ones at most."""


class Session:
    """The Spark session of this process, built in a thread so that batches do not wait for the JVM."""

    def __init__(self, settings: SparkSettings, tasks: Settings | None = None) -> None:
        """`tasks` is the configuration of the tasks for which executors connect in advance."""
        self._settings = settings
        self._tasks = tasks
        self._connecting = tasks.partitions if tasks else 0
        self._session: SparkSession | None = None
        self._slots: int | None = None
        self._counted = 0.0
        self._attempted = Event()
        self._closing = Event()
        self._ending = Event()
        self._builder: Thread | None = None
        self._starting = Lock()
        self._replacing = Lock()
        self._probe: _Probe | None = None
        self._error: ConfigurationError | None = None
        self._is_late = False
        self.condition = Condition(
            "spark",
            log,
            "the Spark session cannot be built yet",
            "the Spark session could be built again",
        )
        """Whether there can be a session; it fails from the first attempt that fails or is late until there is one."""

    @property
    def slots(self) -> int | None:
        """How many tasks the session runs at once, counted at most once a second; None on Spark Connect.

        With dynamic allocation, the cores of one more executor are added, so that Spark has a reason to start it.
        """
        session = self._session
        if session is None or self._settings.remote:
            return self._slots
        now = time.monotonic()
        if now - self._counted >= _COUNT_SECONDS:
            self._counted = now
            # Its next job reports a session that has died.
            with suppress(Exception):
                self._slots = _slots(session)
        return self._slots

    @property
    def is_ready(self) -> bool:
        """Whether there is a session. It may have died since its last job."""
        return self._session is not None

    @property
    def is_late(self) -> bool:
        """Whether the attempt in progress takes longer than `_LATE_SECONDS`: it waits for Spark."""
        return self._is_late

    @property
    def counted_slots(self) -> int | None:
        """The last count of `slots`, without a call to the JVM; None while there is no session."""
        return self._slots if self._session is not None else None

    def start(self) -> None:
        """Begin to build the session, unless it exists or is being built; returns at once."""
        with self._starting:
            if self._session or (self._builder is not None and self._builder.is_alive()):
                return
            self._attempted.clear()
            self._builder = Thread(target=self._retry_build, name="spark-start", daemon=True)
            self._builder.start()

    def get(self, timeout: float = 0.0) -> SparkSession | None:
        """The session; None if it is still being built after `timeout` seconds.

        Raises ConfigurationError if it can never be built.
        """
        self._attempted.wait(timeout)
        if self._error is not None:
            raise self._error
        return self._session

    def replace_if_dead(self, session: SparkSession) -> bool:
        """Check a session after a failed job; if it has died, discard it and begin to build another.

        One whose check still waits for a slot after `_PROBE_SECONDS` counts as alive, but for Spark Connect. Returns
        whether another one is used from now on.
        """
        with self._replacing:
            if self._session is not session:
                # Another thread, whose job failed too, has replaced it.
                return True
            if self._ending.is_set():
                return False
            # One that still waits for a slot is waited for again.
            if self._probe is None or not self._probe.is_alive():
                self._probe = _Probe(session)
            self._probe.join(None if self._settings.remote else _PROBE_SECONDS)
            if not self._probe.failed:
                return False
            log.warning("the Spark session died; rebuilding it")
            self._discard()
            self.start()
            return True

    def end(self) -> None:
        """Rebuild the session no more: relay stops, and a signal to all its processes ends the JVM before it."""
        self._ending.set()

    def close(self) -> None:
        """Stop the session and its JVM."""
        self._closing.set()
        if self._builder is not None:
            # A JVM that is still starting ends when this process closes its standard input.
            self._builder.join(1)
        self._discard()

    def _retry_build(self) -> None:
        waits = Backoff(_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS)
        retrying = RetryUntilSuccess(
            self._closing,
            self.condition,
            lambda error: self.condition.fails(_why_not_built(error)),
            lambda error: not isinstance(error, ConfigurationError),
            lambda error: waits.take(),
        )
        try:
            retrying(self._build)
        except ConfigurationError as error:
            self._error = error
            self._attempted.set()
        except Exception as error:
            log.debug(
                "stopped building the Spark session", extra={"fault": kind_and_first_line(error)}
            )

    def _build(self) -> None:
        if self._closing.is_set():
            return
        require_spark(self._settings)
        return_arrow_blocks()
        _clear_remains()
        settings = self._settings
        with self._reported_if_late("Spark has not started", lambda: _awaited(settings)):
            session = _open(settings)
        try:
            what = "no executor has run the first tasks"
            with self._reported_if_late(what, lambda: _lacking(settings, session)):
                self._prepare(session)
        except BaseException:
            if self._settings.remote:
                close_client(session)
            raise
        self._session = session
        self._attempted.set()
        log.info("the Spark session is ready", extra={"spark": session.version})

    @contextmanager
    def _reported_if_late(self, what: str, cause: Callable[[], str]) -> Iterator[None]:
        """Report a step that waits for Spark, which may take minutes, or for ever where a master is frozen.

        `cause` returns what it waits for.
        """
        timer = Timer(_LATE_SECONDS, self._report_late, (what, cause))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            self._is_late = False

    def _report_late(self, what: str, cause: Callable[[], str]) -> None:
        self._is_late = True
        self.condition.fails(f"{what} for {_LATE_SECONDS:.0f} s: {cause()}")

    def _prepare(self, session: SparkSession) -> None:
        """Detect executors that lack relay, start the Python workers, and warm up the JVM."""
        import pyarrow as pa

        from relay.spark.executor import PackedSettings, warm_up

        if not self._settings.remote:
            self._slots = _slots(session)
            _remember_classes(session)
            _silence(session)
        # A batch has no more tasks than partitions, so no more workers need a connection.
        parts = [
            pa.record_batch({"connects": [number < self._connecting], "work": [_WARM_UP]})
            for number in range(self._slots or 1)
        ]
        rows = session.createDataFrame(pa.Table.from_batches(parts))
        # Only the last job connects: each may run on other workers.
        connecting = PackedSettings.of(self._tasks) if self._tasks else None
        for configuration in (*[None] * (_WARM_UP_JOBS - 1), connecting):
            rows.mapInArrow(partial(warm_up, configuration), "version string").collect()

    def _discard(self) -> None:
        session, self._session = self._session, None
        self._attempted.clear()
        if session is None:
            return
        try:
            session.stop()
        except Exception as error:
            log.debug("the Spark session did not stop", extra={"fault": kind_and_first_line(error)})
        if self._settings.remote:
            close_client(session)
        _clear_remains()


def own_session(session: SparkSession, remote: bool) -> SparkSession:
    """Return another session on the same Spark: its views and its settings are its own.

    On Spark Connect (`remote`) it has a channel of its own, which `close_client` closes.
    """
    if not remote:
        return session.newSession()
    connected: Any = session
    own: SparkSession = connected.cloneSession()
    return own


def close_client(session: Any) -> None:
    """Close the channel of a Connect session whose server may be gone, while the channel's threads run.

    Left to the finalizer at the end of the process, it would wait for threads that have ended, for ever.
    """
    with suppress(Exception):
        session.client.close()


def _open(spark: SparkSettings) -> SparkSession:
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    if spark.remote:
        conf = _UTC | spark.plain_conf
        builder = builder.remote(spark.remote.get_secret_value())
    else:
        conf = _classic_conf(spark) | spark.plain_conf | {"spark.master": spark.master}
        start_gateway(conf)
    for key, value in conf.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    return session


def _awaited(spark: SparkSettings) -> str:
    """What a session that does not come waits for."""
    addresses = _addresses(spark)
    if not addresses:
        is_local = spark.remote is None and spark.master.startswith("local")
        return (
            "its JVM does not answer" if is_local else "the cluster has not begun the application"
        )
    found = [(each, _refusal(*each)) for each in addresses]
    shown = [
        f"{host}:{port} {'accepts connections and does not answer' if why is None else why}"
        for (host, port), why in found
    ]
    return ", ".join(shown)


def _addresses(spark: SparkSettings) -> list[tuple[str, int]]:
    """Where the masters of a standalone cluster, Kubernetes or Spark Connect are asked; none of YARN, or of relay's."""
    if spark.remote is not None:
        parts = urlsplit(spark.remote.get_secret_value())
        return [(parts.hostname, parts.port or _CONNECT_PORT)] if parts.hostname else []
    scheme, _, rest = spark.master.removeprefix("k8s://").partition("://")
    if scheme not in ("spark", "http", "https"):
        return []
    named = [urlsplit(f"//{each}") for each in rest.split(",")]
    port = _MASTER_PORTS[scheme]
    return [(each.hostname, each.port or port) for each in named if each.hostname]


def _refusal(host: str, port: int) -> str | None:
    """Why nothing connects to an address; None: it does."""
    try:
        with socket.create_connection((host, port), _CONNECT_SECONDS):
            return None
    except TimeoutError:
        return "does not answer"
    except OSError as error:
        return f"cannot be reached ({error.strerror or type(error).__name__})"


def _lacking(spark: SparkSettings, session: SparkSession) -> str:
    """What a session lacks whose first tasks do not run."""
    if spark.remote is not None:
        return "the server of Spark Connect may have no free cores"
    try:
        tracker: Any = session.sparkContext._jsc.sc().statusTracker()
        # One of them is the driver.
        executors = len(tracker.getExecutorInfos()) - (not spark.master.startswith("local"))
    except Exception:
        return "how many there are is unknown"
    if executors <= 0:
        return "the cluster has given it none: its workers are away, or their cores and memory are in use"
    return f"the cluster has given it {executors}, which cannot be reached or have other tasks"


def _slots(session: SparkSession) -> int:
    context = session.sparkContext
    slots = int(context.defaultParallelism)
    conf = context.getConf()
    if conf.get("spark.dynamicAllocation.enabled") != "true":
        return slots
    cores = int(conf.get("spark.executor.cores") or 1)
    most = conf.get("spark.dynamicAllocation.maxExecutors")
    more = slots + cores
    return more if most is None else min(more, int(most) * cores)


def _remember_classes(session: SparkSession) -> None:
    """Look up classes once: py4j searches every jar for a name without a package, 8 ms a job."""
    jvm: Any = session._jvm
    for name in _CLASSES:
        vars(jvm)[name] = getattr(jvm, name)


def _silence(session: SparkSession) -> None:
    """Keep PySpark from writing tracebacks to standard error when the JVM dies: the job that fails reports it."""
    server: Any = getattr(session.sparkContext, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: None
    logging.getLogger().addFilter(_not_of_py4j)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    # py4j logs a lost connection by the root logger, whatever the level of its own, and raises it too.
    return record.name != "root" or f"{os.sep}py4j{os.sep}" not in record.pathname


def _classic_conf(spark: SparkSettings) -> dict[str, str]:
    master = spark.master
    os.environ["JAVA_HOME"] = str(java_home())
    # PySpark reads this variable; only spark-submit reads the configuration's key.
    python = spark.plain_conf.get("spark.pyspark.python", sys.executable)
    os.environ.setdefault("PYSPARK_PYTHON", python)
    if master.startswith("local"):
        # A local driver needs no address that other machines reach.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    logging_file = Path(__file__).with_name("log4j2.properties")
    options = f"-Dlog4j2.configurationFile={logging_file.as_uri()}"
    if not master.startswith("local"):
        protection = _PROTECTION if spark.authenticates else {}
        return _DEFAULTS | protection | {"spark.driver.extraJavaOptions": options}
    # This JVM does little more than pass bytes on, for which the second compiler and the parallel collector cost more
    # than they gain. Measured on 2 cores: half the CPU time, 1.4 times the rate. G1 does not move arrays of megabytes;
    # the serial collector copies them, and spends half of the time in full collections. By default G1 marks the heap
    # whenever the arrays of two batches fill 45 % of it, although they are freed without: 0.19 of the CPU time.
    options += " -XX:TieredStopAtLevel=1 -XX:+UseG1GC"
    options += " -XX:-G1UseAdaptiveIHOP -XX:InitiatingHeapOccupancyPercent=70"
    return _DEFAULTS | _LOCAL | {"spark.driver.extraJavaOptions": options}


class _Probe(Thread):
    """Runs a small job, which fails if the session has died."""

    def __init__(self, session: SparkSession) -> None:
        super().__init__(name="spark-probe", daemon=True)
        self._session = session
        self.failed = False
        self.start()

    def run(self) -> None:
        try:
            self._session.range(1).count()
        except Exception:
            self.failed = True


def _clear_remains() -> None:
    """End the JVM of this process, if any, and clear PySpark's references to it, which it does not clear itself."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway: Any = SparkContext._gateway
    if gateway is None:
        return
    try:
        gateway.shutdown()
    except Exception as error:
        log.debug(
            "the Spark gateway did not shut down", extra={"fault": kind_and_first_line(error)}
        )
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
    untyped: Any = SparkSession
    untyped._instantiatedSession = None


def kind_and_first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message; Spark's messages continue with Java's stack."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line[:300]}"


def _why_not_built(error: BaseException) -> str:
    """The cause of a failed build, with Java's message where Java raised it: before a first batch it holds no event."""
    thrown = getattr(error, "java_exception", None)
    if thrown is None:
        return kind_and_first_line(error)
    kind, _, text = str(thrown.toString()).partition("\n")[0].partition(": ")
    if text.startswith(_STOPPED):
        return "no master of the cluster answers, or it has removed the application"
    return f"{kind.rpartition('.')[2]}: {text[:300]}"
