"""The folder of large commits cannot be written, or its disk is full.

boettiger-lab/mcp-data-server#423, kurrent-io/KurrentDB#3452: a full emptyDir ends the process, and each start after it.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.model import spool
from tests.outbox import Outbox, event, host, relaying, wait_until

LARGE = [event(payload={"amount": n, "note": "x" * 1000}) for n in range(300)]


class FullDisk:
    """Temporary files that cannot be written while the disk is full."""

    def __init__(self) -> None:
        self.full = True
        self.refused = 0

    def TemporaryFile(self, **arguments: Any) -> Any:  # noqa: N802 the name of tempfile's
        file = tempfile.TemporaryFile(**arguments)  # noqa: SIM115
        disk = self

        class File:
            def write(self, data: bytes) -> int:
                if disk.full:
                    disk.refused += 1
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return int(file.write(data))

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return File()

    def gettempdir(self) -> str:
        return tempfile.gettempdir()


@pytest.mark.parametrize("mode", ["auto", "wal"])
def test_relay_waits_for_a_full_disk(
    outbox: Outbox, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = outbox.config()["source"] | {"mode": mode}
    settings = outbox.settings(source=source, batch={"max_bytes": 10_000})
    outbox.install_again(settings)
    disk = FullDisk()
    monkeypatch.setattr(spool, "tempfile", disk)
    with caplog.at_level(logging.WARNING), relaying(settings) as service:
        outbox.publish(host(1), event())
        outbox.wait_handled()
        outbox.publish(host(1), *LARGE)
        outbox.publish(host(2), event())
        wait_until(lambda: disk.refused > 2)
        assert outbox.handled() == 1
        assert "batch.spool_directory" in str(service._source.state().reason)
        disk.full = False
        outbox.wait_handled()
        outbox.assert_exact()
        outbox.wait_drained()
    told = [line for line in caplog.messages if "cannot be received yet" in line]
    assert len(told) == 1


def test_a_folder_that_cannot_be_written_is_refused(outbox: Outbox, tmp_path: Path) -> None:
    """Before the first large commit, by `relay check` and at the start of `relay run`."""
    for folder in (tmp_path / "missing", tmp_path / "file"):
        (tmp_path / "file").touch()
        settings = outbox.settings(batch={"spool_directory": folder})
        refused = [each.text for each in examine(settings) if each.level is Severity.ERROR]
        assert len(refused) == 1
        assert refused[0].startswith(f"batch.spool_directory: {folder}: ")
