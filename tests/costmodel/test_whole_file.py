from __future__ import annotations

import threading
from pathlib import Path

import pytest

from costmodel.whole_file import write_whole


def test_writers_at_the_same_time_break_neither_the_file_nor_each_other(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    texts = [str(number) * 200_000 for number in range(4)]
    faults: list[BaseException] = []

    def write(text: str) -> None:
        try:
            for _ in range(40):
                write_whole(str(path), text)
                if path.read_text() not in texts:
                    raise AssertionError("half a file")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_whole(str(path), "before\n")
    with pytest.raises(UnicodeEncodeError):
        write_whole(str(path), "\ud800")
    assert path.read_text() == "before\n"
    assert list(tmp_path.iterdir()) == [path]
