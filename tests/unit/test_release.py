"""What names the version agrees with relay's own, and what checks a change is the same everywhere."""

from __future__ import annotations

import re

import yaml

import relay
from tests.process import ROOT


def test_what_names_the_version_agrees() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", relay.__version__)
    changes = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+)\](?: - \d{4}-\d\d-\d\d)?$", changes, re.MULTILINE)
    assert versions[:2] == ["Unreleased", relay.__version__]
    label = f'org.opencontainers.image.version="{relay.__version__}"'
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert label in dockerfile
    # The images say of which commit they are, each in the last lines of its stage: what is above stays cached.
    assert dockerfile.count('LABEL org.opencontainers.image.revision="$REVISION"\nUSER') == 2
    install = (ROOT / "docs/how-to/install.md").read_text()
    assert f"relay_outbox-{relay.__version__}-py3" in install
    assert f"`relay:{relay.__version__}-slim`" in install
    minor = relay.__version__.rpartition(".")[0]
    assert f"| {minor}.x | yes |" in (ROOT / "SECURITY.md").read_text()


def test_the_hooks_run_what_lint_runs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"].split() for repo in config["repos"] for hook in repo["hooks"]]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint is not None
    steps = [line.split() for line in lint[1].splitlines()]
    assert [words[0].removeprefix(".venv/bin/") for words in hooks] == [
        words[0].removeprefix("$(BIN)/") for words in steps
    ]
