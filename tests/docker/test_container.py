"""The container for real: the image built from this checkout, alone and in docker-compose.yml."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from secrets import token_hex

import pytest

from relay.config.handlers import KINDS, DeliveryHandler
from relay.demo.embedded import free_port
from tests.outbox import wait_until

ROOT = Path(__file__).resolve().parents[2]
SECRETS = {name: token_hex(8) for name in ("POSTGRES_PASSWORD", "RELAY_PASSWORD", "SPARK_SECRET")}
ADMINISTRATOR = f"postgresql://postgres:{SECRETS['POSTGRES_PASSWORD']}@postgres:5432/app"

# Building the image fetches about 600 MB.
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1800)]


def command(
    *arguments: str, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, in the checkout."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RELAY_", "POSTGRES_", "COMPOSE_", "SPARK_"))
    }
    return subprocess.run(
        arguments,
        cwd=ROOT,
        env=kept | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def done(result: subprocess.CompletedProcess[str]) -> str:
    """The output of a program that has to succeed."""
    assert result.returncode == 0, f"{result.args}:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@cache
def why_not() -> str | None:
    """Why there is no container to be had, if so."""
    if shutil.which("docker") is None:
        return "there is no docker on PATH"
    try:
        answer = command("docker", "info", timeout=30)
    except subprocess.TimeoutExpired:
        return "the Docker engine did not answer in 30 s"
    return "the Docker engine does not answer" if answer.returncode else None


def builder() -> tuple[str, dict[str, str]]:
    """A client that has BuildKit, and how to ask for it; the builder before it takes several times as long."""
    for folder in os.get_exec_path():
        client = shutil.which("docker", path=folder)
        if client and _has_buildkit(client):
            return client, {"DOCKER_BUILDKIT": "1"}
    return "docker", {}


def _has_buildkit(client: str) -> bool:
    # Up to 20.10 it is part of the client, from 23 on it comes with the plugin buildx.
    version = command(client, "version", "--format", "{{.Client.Version}}").stdout
    return version.startswith("20.") or command(client, "buildx", "version").returncode == 0


@cache
def compose_program() -> Sequence[str] | None:
    """Compose 2, else 1.29."""
    for program in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(program[0]) and command(*program, "version").returncode == 0:
            return program
    return None


@dataclass(frozen=True)
class Stack:
    """The services of docker-compose.yml under a project name of their own."""

    program: Sequence[str]
    environment: dict[str, str]

    def compose(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        everything = self.environment | environment
        return command(
            *(*self.program, "--profile", "spark", *arguments), timeout=600, **everything
        )

    def up(self, *services: str, **environment: str) -> None:
        """Start services and what they depend on."""
        result = self.compose("up", "-d", "--no-build", *services, **environment)
        assert result.returncode == 0, result.stderr + self.logs()

    def logs(self, *services: str) -> str:
        return self.compose("logs", "--no-color", *services).stdout

    def inspect(self, service: str, field: str) -> str:
        """One field of a service's containers, as Go's template names it, a line each."""
        containers = done(self.compose("ps", "-a", "-q", service)).split()
        return done(
            command("docker", "inspect", "--format", f"{{{{{field}}}}}", *containers)
        ).strip()

    def wait_healthy(self, service: str, timeout: float = 180) -> None:
        wait_until(
            lambda: set(self.inspect(service, ".State.Health.Status").split()) == {"healthy"},
            timeout,
        )

    def publish(self, transactions: int) -> int:
        """Publish from inside relay's container, as the database's owner; returns how many events."""
        said = self.compose(
            *("exec", "-T", "-e", f"RELAY_SOURCE__DSN={ADMINISTRATOR}", "relay"),
            *("relay", "publish", "--generate", str(transactions), "--json"),
        )
        found = json.loads(done(said))
        assert found["transactions"] == transactions
        return int(found["events"])

    def query(self, statement: str) -> str:
        return done(
            self.compose(
                *("exec", "-T", "postgres", "psql", "-h", "/var/run/postgresql"),
                *("-U", "postgres", "-d", "app", "-X", "-A", "-t", "-c", statement),
            )
        ).strip()

    def count(self, relation: str) -> int:
        return int(self.query(f"select count(*) from {relation}"))

    def wait_relayed(self, timeout: float = 180) -> None:
        """Wait until every published event has had its effect."""
        wait_until(
            lambda: self.count("shop.order_history") == self.count("outbox_message_t"), timeout
        )


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """The image of this checkout."""
    if reason := why_not():
        pytest.skip(reason)
    with built(f"relay-test:{os.getpid()}") as name:
        yield name


@pytest.fixture(scope="module")
def slim() -> Iterator[str]:
    """The image of this checkout without Spark."""
    if reason := why_not():
        pytest.skip(reason)
    with built(f"relay-test:{os.getpid()}-slim", "--target", "slim") as name:
        yield name


@contextmanager
def built(name: str, *options: str) -> Iterator[str]:
    client, environment = builder()
    # The host's network serves engines without NAT too.
    build = (client, "build", "--network", "host", "--tag", name, *options, ".")
    done(command(*build, timeout=1500, **environment))
    yield name
    done(command("docker", "image", "rm", "--force", name))


@pytest.fixture(params=["image", "slim"])
def either(request: pytest.FixtureRequest) -> str:
    """Each of the two images."""
    name: str = request.getfixturevalue(request.param)
    return name


@pytest.fixture(scope="module")
def stack(image: str) -> Iterator[Stack]:
    """docker-compose.yml, running with this image; gone afterwards with its volumes."""
    program = compose_program()
    if program is None:
        pytest.skip("there is neither `docker compose` nor docker-compose")
    environment = {
        "COMPOSE_PROJECT_NAME": f"relay-test-{os.getpid()}",
        # An engine that copies the image for each container is slow to answer.
        "COMPOSE_HTTP_TIMEOUT": "600",
        "RELAY_IMAGE": image,
        "POSTGRES_PORT": str(free_port()),
        **SECRETS,
    }
    running = Stack(program, environment)
    try:
        running.up()
        yield running
    finally:
        done(running.compose("down", "--volumes", "--remove-orphans", "--timeout", "30"))


def run(
    image: str, *arguments: str, entrypoint: str | None = None
) -> subprocess.CompletedProcess[str]:
    options = ["--entrypoint", entrypoint] if entrypoint else []
    return command("docker", "run", "--rm", *options, image, *arguments)


def test_help_is_what_the_image_answers(either: str) -> None:
    said = done(run(either, "--help"))
    assert "Usage: relay" in said
    for name in ("init", "check", "run", "status", "publish", "sink", "deferred", "dlq"):
        assert name in said


@pytest.mark.parametrize(
    "kind", [kind for kind, each in KINDS.items() if issubclass(each, DeliveryHandler)]
)
def test_the_client_of_a_handler_is_in_the_image(either: str, kind: str) -> None:
    done(run(either, "-c", f"import relay.sinks.{kind}", entrypoint="python"))


def test_it_runs_as_an_ordinary_user_who_cannot_change_the_program(either: str) -> None:
    look = "id && find /opt/relay -writable -not -type l"
    assert done(run(either, "-c", look, entrypoint="sh")).splitlines() == [
        "uid=10001(relay) gid=10001(relay) groups=10001(relay)"
    ]


def test_a_missing_configuration_is_one_clear_line(either: str) -> None:
    result = run(either)
    assert result.returncode == 2
    assert result.stderr.startswith("relay: /etc/relay/relay.yaml: cannot be read")
    assert len(result.stderr.splitlines()) == 1


def test_the_slim_image_has_no_spark(slim: str) -> None:
    look = "from relay.config.settings import has_spark; print(has_spark())"
    assert done(run(slim, "-c", look, entrypoint="python")).strip() == "False"


def test_published_events_arrive_in_the_tables(stack: Stack) -> None:
    before = stack.count("outbox_message_t")
    events = stack.publish(500)
    stack.wait_relayed()
    assert stack.count("outbox_message_t") == before + events
    assert stack.query("select sum(orders) from shop.order_totals") == stack.query(
        "select count(*) from outbox_message_t where event_type = 'order.placed'"
    )
    assert stack.count("relay.dead_letter_queue") == 0


def test_the_service_has_no_more_rights_than_it_needs(stack: Stack) -> None:
    role = "select rolsuper, rolcreaterole, rolcreatedb, rolreplication from pg_roles where rolname = 'relay'"
    assert stack.query(role) == "f|f|f|t"
    assert (
        stack.query("select usename from pg_stat_activity where backend_type = 'walsender'")
        == "relay"
    )


@pytest.mark.parametrize("service", ["postgres", "relay"])
def test_a_service_is_confined(stack: Stack, service: str) -> None:
    facts = "json .HostConfig"
    found = json.loads(stack.inspect(service, facts))
    assert found["ReadonlyRootfs"]
    assert found["Init"]
    assert found["CapDrop"] == ["ALL"]
    assert found["SecurityOpt"] == ["no-new-privileges:true"]
    assert found["Memory"] > 0
    assert found["PidsLimit"] > 0
    written = stack.compose("exec", "-T", "-u", "0", service, "touch", "/written")
    assert "Read-only file system" in written.stderr + written.stdout


def test_without_passwords_nothing_starts(stack: Stack) -> None:
    result = stack.compose("config", RELAY_PASSWORD="")
    assert result.returncode
    assert "make secrets" in result.stderr


def test_what_the_image_ships_is_named_in_it(either: str) -> None:
    look = run(either, "-c", "cat /usr/share/doc/relay/NOTICE", entrypoint="sh")
    assert done(look) == (ROOT / "NOTICE").read_text()


def test_it_is_healthy_while_it_reads_the_slot(stack: Stack) -> None:
    stack.wait_healthy("relay")
    status = json.loads(
        done(stack.compose("exec", "-T", "relay", "relay", "status", "--json", "--check"))
    )
    assert status["slot"]["active"]


def test_it_stops_cleanly_and_catches_up(stack: Stack) -> None:
    done(stack.compose("stop", "relay"))
    assert stack.inspect("relay", ".State.ExitCode") == "0"
    check = stack.compose("run", "--rm", "-T", "--no-deps", "relay", "status", "--check")
    assert check.returncode == 1, check.stderr
    stack.query(
        "select relay.publish(gen_random_uuid(), null, jsonb_build_array(jsonb_build_object("
        "'event_type', 'order.shipped', 'aggregate_type', 'Order', 'aggregate_id', 'while-stopped',"
        " 'payload', jsonb_build_object('n', n)))) from generate_series(1, 50) n"
    )
    assert stack.count("shop.order_history where order_id = 'while-stopped'") == 0
    done(stack.compose("start", "relay"))
    stack.wait_relayed()
    assert stack.count("shop.order_history where order_id = 'while-stopped'") == 50
    stack.wait_healthy("relay")


def test_a_spark_cluster_of_the_same_image_does_the_work(stack: Stack) -> None:
    cluster = {
        "RELAY_SPARK__MASTER": "spark://spark-master:7077",
        "RELAY_BATCH__INLINE_MAX_EVENTS": "0",
    }
    stack.up("spark-master", "spark-worker", "relay", **cluster)
    for service in ("spark-master", "spark-worker", "relay"):
        stack.wait_healthy(service)
    stack.publish(500)
    stack.wait_relayed()
    assert stack.count("relay.dead_letter_queue") == 0
    for worker in ("1", "2"):
        executors = ("spark-worker", "sh", "-c", "ls -d /tmp/spark/app-*/*")
        assert done(stack.compose("exec", "-T", "--index", worker, *executors)).strip()
