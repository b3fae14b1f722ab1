"""The destinations of sinks: an HTTP endpoint and brokers, each in its own process on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.request import urlopen

import nats
import pika
import psutil
import redis

from bench.environment import no_venv
from bench.functions import COUNTER, WAIT
from bench.job import Job
from bench.outbox import wait_until
from bench.results import Measurement
from relay.demo.embedded import free_port

EVENT_TYPE = "order.placed"
TOPIC = "shop.{event_type}"
STREAM = f"shop.{EVENT_TYPE}"
READY_SECONDS = 60.0


@contextmanager
def delivering(events: int, pid: int) -> Iterator[Measurement]:
    """Measure a context in which a process delivers `events` events; it fills the figures at its end."""
    process = psutil.Process(pid)
    figures: Measurement = {}
    before, started = process.cpu_times(), time.monotonic()
    yield figures
    took, after = time.monotonic() - started, process.cpu_times()
    used = after.user + after.system - before.user - before.system
    figures |= {"events/s": events / took, "its CPU, µs/event": used / events * 1e6}


class Receiver(Protocol):
    """A destination of events. `handler` are the settings of relay's sink for it, `loop` those of a plain loop."""

    handler: dict[str, Any]
    loop: dict[str, Any]

    def unavailable(self) -> str | None:
        """The reason why it cannot run here, or None."""

    def received(self) -> int:
        """The number of events that it has received; an endpoint counts an event once."""

    def empty(self) -> None:
        """Remove all events."""


class Endpoint:
    """An HTTP endpoint of one sink or of many.

    It notes each event's aggregate and the time of its arrival in a file, also while it hangs.
    """

    def __init__(
        self,
        folder: Path,
        arrivals: Path | None = None,
        *,
        status: int = 204,
        delay: float = 0.0,
        hangs: bool = False,
    ) -> None:
        """The options are those of the first `start`."""
        self._folder = folder
        self._port = free_port()
        self._first = {"status": status, "delay": delay, "hangs": hangs}
        self._arrivals = arrivals
        self._job: Job | None = None
        self.url = f"http://127.0.0.1:{self._port}/events"
        self.handler: dict[str, Any] = {"type": "http", "url": self.url}
        self.loop: dict[str, Any] = {"kind": "http", "url": self.url, "concurrency": 16}

    def handler_of(self, sink: str) -> dict[str, Any]:
        """The settings of one of several sinks, whose arrivals are noted with its name."""
        return {**self.handler, "url": f"{self.url}/{sink}"}

    def arrived(self) -> list[tuple[str, int, int]]:
        """The sink, the number and the clock (ns) of each event of `handler_of`, in the order of arrival."""
        if self._arrivals is None or not self._arrivals.exists():
            return []
        lines = (line.partition(" ") for line in self._arrivals.read_text().splitlines())
        names = ((*name.partition(":"), clock) for name, _, clock in lines)
        return [(sink, int(number), int(clock)) for sink, _, number, clock in names]

    def __enter__(self) -> Self:
        self._start(self._first)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, status: int = 204, delay: float = 0.0, hangs: bool = False) -> None:
        """Listen, always on the same port; answer with this status after `delay` seconds, or never if it `hangs`."""
        self._start({"status": status, "delay": delay, "hangs": hangs})

    def _start(self, answers: Mapping[str, Any]) -> None:
        arrivals = str(self._arrivals) if self._arrivals else None
        job = {"port": self._port, "arrivals": arrivals, **answers}
        self._job = Job("bench.workers.endpoint", job, self._folder, seconds=None)
        self._job.answer("ready")

    def stop(self) -> None:
        """End the process, so that connections are refused."""
        if self._job is not None:
            self._job.__exit__(None, None, None)
            self._job = None

    def unavailable(self) -> str | None:
        return no_venv()

    def received(self) -> int:
        with urlopen(self.url) as response:
            return int(response.read())

    def empty(self) -> None:
        self.stop()
        self.start()


class Functions:
    """Functions of the process that delivers, which add to a counter in a file: they return at once, or wait."""

    def __init__(self, folder: Path, wait: float = 0.0, concurrency: int = 16) -> None:
        """A call waits `wait` seconds, in so many calls at once."""
        self._file = folder / "counter"
        self._wait = wait
        name = "waits" if wait else "returns"
        self.handler: dict[str, Any] = {
            "type": "function",
            "callable": f"bench.functions:{name}",
            "concurrency": concurrency,
            "order_by": "aggregate" if wait else "host",
        }
        self.loop: dict[str, Any] = {
            "kind": "function", "name": name, "concurrency": concurrency,
            "key": "aggregate_id" if wait else "host_id",
        }  # fmt: skip

    def __enter__(self) -> Self:
        os.environ[COUNTER] = str(self._file)
        os.environ[WAIT] = str(self._wait)
        self.empty()
        return self

    def __exit__(self, *_: object) -> None:
        del os.environ[COUNTER], os.environ[WAIT]

    def unavailable(self) -> str | None:
        return no_venv()

    def received(self) -> int:
        return int.from_bytes(self._file.read_bytes(), "little")

    def empty(self) -> None:
        self._file.write_bytes(bytes(8))


class Broker:
    """A broker from a package of the system, with its own folder."""

    program = ""
    handler: dict[str, Any]
    loop: dict[str, Any]

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder / self.program
        self._folder.mkdir(exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    def unavailable(self) -> str | None:
        return None if _found(self.program) else f"{self.program} is not installed"

    def __enter__(self) -> Self:
        if self.unavailable():
            return self
        self._process = subprocess.Popen(
            [_found(self.program) or self.program, *self.options()],
            env={**os.environ, **self.environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(self._listens, self.program, READY_SECONDS, self._process)
        self.prepare()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            # The whole group: RabbitMQ's program is a script that starts the server.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def options(self) -> Sequence[str]:
        return ()

    def environment(self) -> Mapping[str, str]:
        return {}

    def prepare(self) -> None:
        """Create the stream or queue."""

    def received(self) -> int:
        raise NotImplementedError

    def empty(self) -> None:
        raise NotImplementedError

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Redis(Broker):
    """redis-server, which writes to disk before it confirms."""

    program = "redis-server"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._client: redis.Redis = redis.Redis(port=self.port)
        url = f"redis://127.0.0.1:{self.port}"
        self.handler: dict[str, Any] = {"type": "redis", "url": url, "topic": TOPIC}
        self.loop: dict[str, Any] = {"kind": "redis", "port": self.port, "batch": 1_000}

    def options(self) -> Sequence[str]:
        durable = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
        return ("--port", str(self.port), "--dir", str(self._folder), *durable)

    def received(self) -> int:
        length: Any = self._client.xlen(STREAM)
        return int(length)

    def empty(self) -> None:
        self._client.flushall()

    @contextmanager
    def noting(self, arrivals: Path, folder: Path) -> Iterator[None]:
        """Run a consumer that notes the time of each event's arrival."""
        job = {"port": self.port, "stream": STREAM, "arrivals": str(arrivals)}
        with Job("bench.workers.stream_reader", job, folder) as reader:
            reader.answer("ready")
            yield


class Nats(Broker):
    """nats-server with a JetStream stream on disk."""

    program = "nats-server"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._url = f"nats://127.0.0.1:{self.port}"
        self.handler: dict[str, Any] = {"type": "nats", "servers": [self._url], "topic": TOPIC}
        self.loop: dict[str, Any] = {"kind": "nats", "port": self.port}
        self._runner = asyncio.Runner()
        self._client: Any = None

    def options(self) -> Sequence[str]:
        return ("-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self._folder))

    def prepare(self) -> None:
        self._client = self._runner.run(nats.connect(self._url))
        stream = self._client.jetstream()
        self._runner.run(stream.add_stream(name="shop", subjects=["shop.>"]))

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._runner.run(self._client.close())
        self._runner.close()
        super().__exit__()

    def received(self) -> int:
        info = self._runner.run(self._client.jetstream().stream_info("shop"))
        return int(info.state.messages)

    def empty(self) -> None:
        # Recreated, not purged: a stream keeps the message ids that it has seen.
        stream = self._client.jetstream()
        self._runner.run(stream.delete_stream("shop"))
        self._runner.run(stream.add_stream(name="shop", subjects=["shop.>"]))


class Rabbitmq(Broker):
    """rabbitmq-server with a durable queue."""

    program = "rabbitmq-server"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        url = f"amqp://guest:guest@127.0.0.1:{self.port}"
        self.handler: dict[str, Any] = {"type": "rabbitmq", "url": url, "topic": TOPIC}
        self.loop: dict[str, Any] = {"kind": "rabbitmq", "port": self.port}
        self._parameters = pika.URLParameters(url)
        self._channel: Any = None

    def environment(self) -> Mapping[str, str]:
        folder = str(self._folder)
        return {
            "HOME": folder,
            "RABBITMQ_NODENAME": f"bench{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": folder,
            "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
        }

    def prepare(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                # No heartbeat: it may not be polled for minutes.
                self._parameters.heartbeat = 0
                self._channel = pika.BlockingConnection(self._parameters).channel()
                break
            except pika.exceptions.AMQPError:
                # A server that is still starting accepts connections and resets them.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        self._channel.queue_declare(STREAM, durable=True)

    def received(self) -> int:
        return int(self._channel.queue_declare(STREAM, passive=True).method.message_count)

    def empty(self) -> None:
        self._channel.queue_purge(STREAM)


def _found(program: str) -> str | None:
    # First RabbitMQ's own script: Debian's wrapper around it changes the user.
    folders = ("/usr/lib/rabbitmq/bin", os.environ.get("PATH", ""), "/usr/sbin")
    return shutil.which(program, path=os.pathsep.join(folders))
