"""The description of the archives on a package index: README.md without links to files that an index does not have."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = re.compile(r"^!\[[^\]]*\]\([^)]*\)\n+", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")


class Readme(MetadataHookInterface):
    """Each link of the README to a file of the repository gives way to its text, each picture to nothing."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text()
        without_links = LINK.sub(r"\1", IMAGE.sub("", text))
        metadata["readme"] = {"content-type": "text/markdown", "text": without_links}
