"""The unit of deploy/systemd: systemd understands it, and relay runs under its restrictions."""

from __future__ import annotations

import ctypes
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from relay.config.settings import Settings
from tests.outbox import Outbox
from tests.process import ROOT
from tests.shell import needs, parse

UNIT = ROOT / "deploy" / "systemd" / "relay.service"
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1
CONFINED = f"""
import ctypes, sys
from relay.__main__ import run
assert ctypes.CDLL(None).prctl({PR_SET_MDWE}, {PR_MDWE_REFUSE_EXEC_GAIN}, 0, 0, 0) == 0
run()
"""


def values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a command that is there."""
    file = tmp_path / "relay.service"
    file.write_text(UNIT.read_text().replace("/usr/local/bin/relay", sys.executable))
    return file


def test_it_checks_before_it_runs_and_waits_until_relay_has_ended() -> None:
    for name, expected in (("ExecStartPre", "check"), ("ExecStart", "run")):
        (command,) = values(name)
        program, *arguments = shlex.split(command)
        assert (Path(program).name, arguments) == ("relay", [expected])
        parse(arguments)
    (seconds,) = values("TimeoutStopSec")
    assert float(seconds) > Settings.model_fields["shutdown_timeout"].default


def test_systemd_finds_no_fault_and_little_that_it_may_do(unit: Path) -> None:
    """A service that may do everything has an exposure of 9.6; sockets and the files of the machine are left."""
    needs("systemd-analyze")
    found = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
    measured = ["systemd-analyze", "security", "--offline=true", "--threshold=15", str(unit)]
    asked = subprocess.run(measured, capture_output=True, text=True, timeout=60, check=False)
    assert asked.returncode == 0, asked.stdout + asked.stderr


def test_relay_needs_no_memory_that_is_written_and_run(outbox: Outbox, tmp_path: Path) -> None:
    """As with MemoryDenyWriteExecute, by the kernel's own switch for it, which Linux has since 6.3."""
    assert values("MemoryDenyWriteExecute") == ["yes"]
    if ctypes.CDLL(None).prctl(PR_SET_MDWE + 1, 0, 0, 0, 0) < 0:
        pytest.skip("this kernel has no PR_SET_MDWE")
    outbox.config_file(tmp_path / "relay.yaml")
    config = str(tmp_path / "relay.yaml")
    command = [sys.executable, "-c", CONFINED, "check", "-c", config]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
