"""A file that is written whole or not at all, also where several processes write it."""

from __future__ import annotations

import contextlib
import os
import uuid


def write_whole(path: str, text: str) -> None:
    """Beside ``path`` under a name of this write alone, then in its place. Raises ``OSError``; the folder is made."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    unfinished = f"{path}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        with open(unfinished, "x", encoding="utf-8", newline="") as file:
            file.write(text)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
