"""Runs `relay demo` and draws its output: `python -m bench.demo_picture docs/images/demo.svg`."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

from relay.demo import run_demo, screen

WIDTH = 118
# Without web fonts: a picture must not fetch anything.
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def main(picture: Path) -> bool:
    """Run the demo, write its output as an SVG, and return whether it kept every promise."""
    # No lines of progress: a terminal shows a bar, and removes it at the end.
    screen.LINE_SECONDS = math.inf
    console = Console(record=True, width=WIDTH, force_terminal=False)
    kept = run_demo(console, None)
    picture.write_text(console.export_svg(title="make demo", theme=MONOKAI, code_format=_FORMAT))
    return kept


if __name__ == "__main__":
    sys.exit(not main(Path(sys.argv[1])))
