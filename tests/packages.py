"""Packages that are installed for a test: modules in a folder, with the metadata that pip would write."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from tests.pages import DOCS, blocks


def install(
    folder: Path,
    package: str,
    entry_points: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
    extras: tuple[str, ...] = (),
) -> None:
    """Write a package's modules, by their names, and its entry points of the group `relay.sinks` into a folder."""
    for name, source in (modules or {}).items():
        (folder / f"{name}.py").write_text(source)
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[relay.sinks]", *lines, ""]))
    of_extras = "".join(f"Provides-Extra: {each}\n" for each in extras)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n{of_extras}"
    )


def install_guides(folder: Path) -> None:
    """Install the package of the page "Write a sink", with the files of the page beside it."""
    for block in blocks((DOCS / "how-to" / "write-sink.md").read_text()):
        if block.file is not None:
            (folder / block.file).write_text(block.text)
    # The project's own file would be taken for the configuration of pytest.
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    (folder / "pyproject.toml").unlink()
    install(folder, project["name"], project["entry-points"]["relay.sinks"])
