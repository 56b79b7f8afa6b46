"""`python -m hybrid_runtime.walkthrough`: prints the page with fresh outputs, or with `--write` updates the file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hybrid_runtime.walkthrough.page import PAGE, run_page


def main(arguments: Sequence[str] | None = None) -> None:
    """`arguments`: those of the command line unless given."""
    parser = argparse.ArgumentParser(prog="python -m hybrid_runtime.walkthrough", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"update {PAGE} in place")
    options = parser.parse_args(arguments)
    page = run_page(PAGE.read_text(encoding="utf-8"))
    if options.write:
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
