"""`python -m hybrid_runtime.walkthrough`: prints the pages with fresh outputs, or with `--write` updates the files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hybrid_runtime.walkthrough.page import PAGES, run_page


def main(arguments: Sequence[str] | None = None) -> None:
    """`arguments`: those of the command line unless given."""
    parser = argparse.ArgumentParser(prog="python -m hybrid_runtime.walkthrough", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"update the pages in {PAGES[0].parent} in place")
    options = parser.parse_args(arguments)
    for path in PAGES:
        page = run_page(path.read_text(encoding="utf-8"), path)
        if options.write:
            path.write_text(page, encoding="utf-8")
        else:
            print(page, end="")


if __name__ == "__main__":
    main()
