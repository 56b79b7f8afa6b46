"""Runs the Python blocks of a Markdown page and puts what each prints into the text block behind it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("README.md")
PAGES = (PAGE, *(PAGE.with_name(f"{name}.md") for name in ("speculation", "rollbacks")))
"""In the order in which they are to be read."""

_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE)


def run_page(page: str, path: Path = PAGE) -> str:
    """The page with the outputs that its code gives now.

    All blocks share one namespace, from top to bottom. A block that prints nothing has no output. Raises whatever the
    code raises, with `path` as the file that it is in.
    """
    namespace: dict[str, Any] = {"__name__": "walkthrough"}

    def run(match: re.Match[str]) -> str:
        code = match["code"]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Line numbers of the page, so that a traceback leads there.
            exec(compile("\n" * page.count("\n", 0, match.start("code")) + code, str(path), "exec"), namespace)
        output = printed.getvalue().rstrip()
        return f"```python\n{code}```\n" + (f"\n```text\n{output}\n```\n" if output else "")

    return _BLOCK.sub(run, page)
