"""A module of users that configures logging does not silence relay, its workers or its readers.

`logging.config` disables all loggers that exist: dask/distributed#1381, sanic-org/sanic#805, eventbrite/pysoa#71,
camptocamp/tilecloud-chain#3730, python/cpython#90195. Migrations that are run later do that, too, or take the handlers
of the root: IBM/mcp-context-forge#4378, triangle-shows/triangle-shows#79, sqlalchemy/alembic#714, cgwire/zou#1167.
"""

from __future__ import annotations

import logging
import logging.config
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay import logs
from relay.client.worker import Message, Worker
from relay.config.imports import find
from relay.logs import LogFormat
from tests.integration.test_workers import fill, is_empty
from tests.outbox import Outbox, wait_until
from tests.workers import working

FORMS = {
    "dictConfig": "logging.config.dictConfig({'version': 1})",
    "dictConfig of the root": (
        "logging.config.dictConfig({'version': 1, 'handlers': {'out': {'class': 'logging.NullHandler'}},"
        " 'root': {'handlers': ['out'], 'level': 'ERROR'}})"
    ),
    "fileConfig": "logging.config.fileConfig(io.StringIO('''[loggers]\nkeys=root\n[handlers]\nkeys=out\n[formatters]\n"
    "keys=\n[logger_root]\nlevel=ERROR\nhandlers=out\n[handler_out]\nclass=NullHandler\nargs=()\n'''))",
    "basicConfig": "logging.basicConfig(force=True, level='ERROR', format='mine %(message)s')",
}


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    names = ("", "relay")
    loggers = [logging.getLogger(name) for name in names]
    former = [(each.level, list(each.handlers), each.propagate) for each in loggers]
    yield
    for logger, (level, handlers, propagate) in zip(loggers, former, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate
    for each in list(logging.root.manager.loggerDict.values()):
        if isinstance(each, logging.Logger):
            each.disabled = False


@pytest.mark.parametrize("form", FORMS)
def test_the_lines_of_relay_survive_the_import_of_a_module(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"users_{form.replace(' ', '_').lower()}"
    (tmp_path / f"{name}.py").write_text(
        f"import io, logging, logging.config\n{FORMS[form]}\ndef handle(delivery): pass\n"
    )
    log = logging.getLogger("relay.test_users_logging")
    logs.configure(LogFormat.JSON, "info")
    find("handlers.mail.callable", f"{name}:handle")
    log.info("still here")
    del sys.modules[name]
    lines = capsys.readouterr().err.splitlines()
    assert '"message": "still here"' in lines[-1]
    assert not any(each.startswith("mine") for each in lines)
    assert logs.is_json()


@pytest.mark.parametrize("form", FORMS)
def test_the_lines_of_relay_survive_a_call_that_configures_logging(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the import of a module was looked at: whatever its function did later silenced relay for good."""
    log = logging.getLogger("relay.test_users_logging")
    logs.configure(LogFormat.JSON, "info")
    exec(f"import io, logging, logging.config\n{FORMS[form]}", {})
    log.info("still here")
    lines = capsys.readouterr().err.splitlines()
    assert '"message": "still here"' in lines[-1]
    assert not any(each.startswith("mine") for each in lines)
    exec(f"import io, logging, logging.config\n{FORMS[form]}", {})
    log.info("and here")
    assert '"message": "and here"' in capsys.readouterr().err.splitlines()[-1]


def test_what_a_module_says_of_relay_itself_counts(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.TEXT, "info")
    logging.config.dictConfig(
        {
            "version": 1,
            "handlers": {"out": {"class": "logging.NullHandler"}},
            "root": {"handlers": ["out"]},
            "loggers": {"relay": {"handlers": ["out"], "propagate": False}},
        }
    )
    logging.getLogger("relay.test_users_logging").info("elsewhere")
    assert "elsewhere" not in capsys.readouterr().err


def test_a_worker_says_what_it_does_after_its_module_has_configured_logging(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    fill(outbox, 1)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, poll=0.05)

    @worker.handles()
    def handle(message: Message, conn: Any) -> None:
        pass

    # `caplog` has its handler on the root, which is not configured here.
    logging.config.dictConfig({"version": 1})
    caplog.set_level("INFO")
    with working(worker):
        wait_until(lambda: is_empty(outbox))
    assert "the worker is running" in caplog.text
