"""Several configurations for one process: which files, and which of them one process cannot relay."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relay.cli.app import app
from relay.config.files import Configuration, load, load_all, observed, require_apart, require_one
from relay.faults import ConfigurationError

ORDERS = """
group: orders
source: {dsn: "postgresql://localhost/app", table: public.orders_outbox, slot: orders, publication: orders}
target: {dsn: "postgresql://localhost/views"}
"""
PAYMENTS = ORDERS.replace("orders", "payments")


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.upper().startswith(("RELAY_", "PG")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def written(**texts: str) -> list[Path]:
    """Files with these texts."""
    for name, text in texts.items():
        Path(f"{name}.yaml").write_text(text)
    return [Path(f"{name}.yaml") for name in texts]


def refused(one: str, other: str) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        require_apart(load_all(written(one=one, other=other)))
    return str(raised.value).splitlines()


def test_files_are_read_in_the_order_in_which_they_are_given() -> None:
    found = load_all(written(payments=PAYMENTS, orders=ORDERS))
    assert [each.settings.group for each in found] == ["payments", "orders"]
    require_apart(found)


def test_a_folder_stands_for_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("conf.d").mkdir()
    (Path("conf.d") / "b.yaml").write_text(PAYMENTS)
    (Path("conf.d") / "a.yaml").write_text(ORDERS)
    (Path("conf.d") / "notes.txt").write_text("no configuration")
    monkeypatch.setenv("RELAY_CONFIG", "conf.d")
    assert [each.name for each in load_all(None)] == ["conf.d/a.yaml", "conf.d/b.yaml"]
    Path("empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"^empty: has no file \*.yaml"):
        load_all([Path("empty")])


def test_the_variable_names_several(monkeypatch: pytest.MonkeyPatch) -> None:
    files = written(orders=ORDERS, payments=PAYMENTS)
    monkeypatch.setenv("RELAY_CONFIG", os.pathsep.join(map(str, files)))
    assert [each.settings.group for each in load_all(None)] == ["orders", "payments"]
    with pytest.raises(ConfigurationError, match="takes one configuration, and 2 are given"):
        load(None)
    assert load(files[:1]).group == "orders"


@pytest.mark.parametrize("command", [["dlq", "list"], ["offsets", "show"], ["publish"]])
def test_a_command_for_one_group_refuses_several(command: list[str]) -> None:
    orders, payments = written(orders=ORDERS, payments=PAYMENTS)
    result = CliRunner().invoke(app, [*command, "-c", str(orders), "-c", str(payments)])
    assert str(result.exception).startswith("--config: this command takes one configuration")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"group: payments": "group: orders"}, "group: both have 'orders' in the same target"),
        (
            {"group: payments": "group: orders", "localhost/views": "127.0.0.1:5432/views"},
            "group: both have 'orders' in the same target",
        ),
        ({"slot: payments": "slot: orders"}, "source.slot: both have 'orders' on the same server"),
        (
            {"group: payments": "group: payments\nspark: {master: 'local[1]'}"},
            "spark.master: differs, and a process has one Spark session",
        ),
        (
            {"group: payments": "group: payments\nspark: {conf: {spark.executor.memory: 1g}}"},
            "spark.conf.spark.executor.memory: differs, and a process has one Spark session",
        ),
    ],
)
def test_what_one_process_cannot_relay_names_both_files(
    change: Mapping[str, str], fault: str
) -> None:
    other = PAYMENTS
    for before, after in change.items():
        other = other.replace(before, after)
    (line,) = refused(ORDERS, other)
    assert line.startswith(f"one.yaml and other.yaml: {fault}")


def test_groups_of_one_name_may_have_different_targets() -> None:
    other = PAYMENTS.replace("group: payments", "group: orders").replace("/views", "/other_views")
    require_apart(load_all(written(one=ORDERS, other=other)))


def test_groups_of_one_name_have_one_set_of_series() -> None:
    """They would be told twice, and a scrape with a series twice is not taken."""
    other = PAYMENTS.replace("group: payments", "group: orders").replace("/views", "/other_views")
    (line,) = refused(ORDERS + "\nobserve: {listen: '127.0.0.1:9464'}\n", other)
    assert "metrics, health and the console tell groups apart by name" in line


def test_spark_may_differ_where_it_is_not_needed() -> None:
    small = "\nspark: {master: 'local[1]'}\nbatch: {inline_max_events: 10000}\n"
    require_apart(load_all(written(one=ORDERS, other=PAYMENTS + small)))


def test_a_variable_for_all_files_can_make_them_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_GROUP", "all")
    assert refused(ORDERS, PAYMENTS)[0].startswith(
        "one.yaml and other.yaml: group: both have 'all'"
    )


def test_a_variable_that_one_file_takes_is_no_mistake_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RELAY_PAYMENTS_DSN", "postgresql://localhost/views")
    other = PAYMENTS.replace('"postgresql://localhost/views"', "{env: RELAY_PAYMENTS_DSN}")
    assert len(load_all(written(orders=ORDERS, payments=other))) == 2
    with pytest.raises(ConfigurationError, match="RELAY_PAYMENTS_DSN: sets no key"):
        load_all(written(orders=ORDERS))


def test_an_administrator_connects_to_one_database() -> None:
    found = load_all(written(one=ORDERS, other=PAYMENTS.replace("/app", "/billing")))
    require_one(found, "target", "--target-admin-dsn")
    with pytest.raises(ConfigurationError, match=r"^--admin-dsn: .* several sources"):
        require_one(found, "source", "--admin-dsn")


def test_the_process_shows_what_any_file_has() -> None:
    listening = "\nobserve: {listen: '127.0.0.1:9464'}\n"
    found = load_all(written(one=ORDERS + listening, other=PAYMENTS + "\nobserve: {traces: true}"))
    require_apart(found)
    shown = observed(found)
    assert shown.listen is not None
    assert (shown.listen.port, shown.traces, shown.console) == (9464, True, None)
    (line,) = refused(ORDERS + listening, PAYMENTS + listening.replace("9464", "9465"))
    assert "observe.listen: differs" in line


def test_a_configuration_without_a_file_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_SOURCE__DSN", "postgresql://localhost/app")
    assert [each.name for each in load_all(None)] == ["environment"]
    assert isinstance(load_all(None)[0], Configuration)
