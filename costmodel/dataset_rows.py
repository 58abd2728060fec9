"""A data set's file -> the text of each sample: chats, prompts, instructions or plain text.

JSONL, JSON, CSV, TSV and parquet. Rows stream: only a JSON file that is one array is held whole. Nothing is
run, and no column but those of the format is kept.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from costmodel.errors import CostModelError, MissingExtraError

SUFFIXES: Final = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
MAX_LINE_BYTES: Final = 256 * 2**20
MAX_JSON_BYTES: Final = 2 * 2**30
_ROWS_AT_ONCE: Final = 1_000

# Columns that hold a prompt and its completion as two texts (or, in TRL's form, as two lists of messages).
_PAIRS: Final = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("prompt", "chosen"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("input", "output"),
    ("input", "target"),
    ("source", "target"),
)
_TEXTS: Final = ("text", "content", "document", "body")
_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "system",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sample before tokenisation: messages, or plain text, or the counts of one that is tokenised already."""

    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: Any = None
    text: str = ""
    completion: str | None = None  # the part of ``text`` that is supervised; None: not told apart
    num_tokens: int | None = None
    num_supervised_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """How a row holds its sample. ``read`` answers ``None`` for a row that does not fit."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Sample | None]


def read_rows(path: str, progress: Callable[[float], None] | None = None) -> Iterator[Mapping[str, Any]]:
    """Each row as a mapping of columns. ``progress`` is told the share of the file that is read, 0 to 1.

    Raises :class:`CostModelError` for a file that cannot be read, with the line where that is known.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in SUFFIXES:
        raise CostModelError(f"{path}: a data set is {', '.join(SUFFIXES)}, not {suffix or 'a file without a suffix'}")
    try:
        num_bytes = os.path.getsize(path)
        if os.path.isdir(path):
            raise CostModelError(f"{path} is a folder; give one file of the data set")
        if suffix == ".parquet":
            yield from _parquet_rows(path, progress)
        elif suffix in (".csv", ".tsv"):
            yield from _csv_rows(path, "\t" if suffix == ".tsv" else ",", num_bytes, progress)
        elif suffix == ".json" and not _holds_lines(path):
            yield from _json_rows(path, num_bytes)
        else:
            yield from _json_line_rows(path, num_bytes, progress)
    except FileNotFoundError:
        raise CostModelError(f"no such file: {path}") from None
    except OSError as error:
        raise CostModelError(f"cannot read {path}: {error.strerror or error}") from None


def _holds_lines(path: str) -> bool:
    """Many a ``.json`` holds one object a line."""
    with open(path, "rb") as file:
        first = file.readline(MAX_LINE_BYTES).lstrip(b"\xef\xbb\xbf").strip()
        has_more = bool(file.readline(MAX_LINE_BYTES))
    if not (has_more and first.startswith(b"{")):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def _json_line_rows(path: str, num_bytes: int, progress: Callable[[float], None] | None) -> Iterator[Mapping[str, Any]]:
    done = 0
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if len(line) > MAX_LINE_BYTES:
                raise CostModelError(f"{path}: line {number} is larger than {MAX_LINE_BYTES // 2**20} MiB")
            done += len(line)
            if progress is not None and number % _ROWS_AT_ONCE == 0:
                progress(done / max(1, num_bytes))
            line = line.lstrip(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield _row(_json(line, f"{path}: line {number}"), f"{path}: line {number}")


def _json_rows(path: str, num_bytes: int) -> Iterator[Mapping[str, Any]]:
    if num_bytes > MAX_JSON_BYTES:
        raise CostModelError(f"{path} is larger than {MAX_JSON_BYTES // 2**30} GiB; save it as .jsonl, one row a line")
    with open(path, "rb") as file:
        value = _json(file.read(), path)
    if isinstance(value, dict) and _is_sample(value):
        value = [value]
    elif isinstance(value, dict):
        lists = [rows for rows in value.values() if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
        if len(lists) != 1:
            raise CostModelError(f"{path} must hold a list of rows, or a mapping with one such list")
        value = lists[0]
    if not isinstance(value, list):
        raise CostModelError(f"{path} must hold a list of rows; it holds {type(value).__name__}")
    for number, row in enumerate(value, start=1):
        yield _row(row, f"{path}: row {number}")


def _is_sample(row: Mapping[str, Any]) -> bool:
    try:
        return format_of(row, "").read(row) is not None
    except CostModelError:
        return False


def _json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CostModelError(f"{where} is not valid JSON: {error}") from None


def _row(value: Any, where: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise CostModelError(f"{where} must be an object of columns, not {type(value).__name__}")


def _csv_rows(
    path: str, delimiter: str, num_bytes: int, progress: Callable[[float], None] | None
) -> Iterator[Mapping[str, Any]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with open(path, "rb") as binary:
        text = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
        try:
            for number, row in enumerate(csv.DictReader(text, delimiter=delimiter), start=1):
                if progress is not None and number % _ROWS_AT_ONCE == 0:
                    progress(binary.tell() / max(1, num_bytes))
                yield row
        except csv.Error as error:
            raise CostModelError(f"{path} is not valid CSV: {error}") from None
        except UnicodeDecodeError:
            raise CostModelError(f"{path} is not a text file in UTF-8") from None


def _parquet_rows(path: str, progress: Callable[[float], None] | None) -> Iterator[Mapping[str, Any]]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "data", "reading a parquet file") from None
    try:
        with parquet.ParquetFile(path) as file:
            total, done = max(1, file.metadata.num_rows), 0
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                done += batch.num_rows
                if progress is not None:
                    progress(done / total)
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise CostModelError(f"{path} is not a readable parquet file: {' '.join(str(error).split())}") from None


# --- formats ----------------------------------------------------------------------------------------------------------


def format_of(row: Mapping[str, Any], path: str) -> Format:
    """How this data set's rows hold a sample, by the columns of its first row. Raises :class:`CostModelError`."""
    columns = {str(name) for name in row}
    if isinstance(row.get("input_ids"), (list, tuple)):
        return Format("tokens", ("input_ids", "labels"), _tokens)
    for name in ("messages", "conversations", "conversation"):
        if isinstance(row.get(name), (list, tuple)):
            kind = "messages" if name == "messages" else "sharegpt"
            return Format(kind, (name,), lambda row, name=name: _chat(row, name))  # type: ignore[misc]
    if "instruction" in columns:
        output = next((name for name in ("output", "response", "completion", "answer") if name in columns), None)
        if output is not None:
            given = next((name for name in ("input", "context") if name in columns), None)
            read = lambda row: _alpaca(row, given, output)  # noqa: E731 - two names bound for this data set
            return Format("alpaca", ("instruction", *([given] if given else []), output), read)
    for prompt, completion in _PAIRS:
        if prompt in columns and completion in columns:
            kind = "prompt_completion"
            return Format(kind, (prompt, completion), lambda row, p=prompt, c=completion: _pair(row, p, c))  # type: ignore[misc]
    texts: list[str] = [name for name in _TEXTS if name in columns]
    if not texts:
        texts = [name for name, value in row.items() if isinstance(value, str)]
        texts = texts if len(texts) == 1 else []
    if texts:
        return Format("text", (texts[0],), lambda row, name=texts[0]: _text(row, name))  # type: ignore[misc]
    raise CostModelError(
        f"{path}: no known format has the columns {', '.join(sorted(columns)) or 'of an empty row'}; known are messages, "
        "conversations, instruction and output, prompt and completion, text, input_ids"
    )


def _tokens(row: Mapping[str, Any]) -> Sample | None:
    ids = row.get("input_ids")
    if not isinstance(ids, (list, tuple)) or not ids:
        return None
    labels = row.get("labels")
    supervised = sum(label != -100 for label in labels) if isinstance(labels, (list, tuple)) else None
    return Sample(num_tokens=len(ids), num_supervised_tokens=supervised)


def _chat(row: Mapping[str, Any], column: str) -> Sample | None:
    messages = _messages(row.get(column))
    system = row.get("system")
    if messages and isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system}, *messages)
    return Sample(messages=messages, tools=_tools(row.get("tools"))) if messages else None


def _messages(value: Any) -> tuple[dict[str, Any], ...] | None:
    """``{"from", "value"}`` or ``{"role", "content"}`` turns, as the second; ``None`` where one is neither."""
    if not isinstance(value, (list, tuple)):
        return None
    messages = []
    for turn in value:
        if not isinstance(turn, Mapping):
            return None
        role = turn.get("role", turn.get("from"))
        content = turn.get("content", turn.get("value"))
        if not isinstance(role, str):
            return None
        message: dict[str, Any] = {"role": _ROLES.get(role.lower(), role), "content": content_text(content)}
        if turn.get("tool_calls"):
            message["tool_calls"] = turn["tool_calls"]
        messages.append(message)
    return tuple(messages) or None


def content_text(content: Any) -> str:
    """A turn's text: as it is, or the text parts of a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return "" if content is None else json.dumps(content, ensure_ascii=False, default=str)


def _tools(value: Any) -> Any:
    if isinstance(value, str) and value.strip():
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value or None


def _alpaca(row: Mapping[str, Any], given: str | None, output: str) -> Sample | None:
    instruction, context, answer = row.get("instruction"), row.get(given) if given else None, row.get(output)
    if not isinstance(instruction, str) or not isinstance(answer, str):
        return None
    messages: list[Mapping[str, Any]] = []
    if isinstance(row.get("system"), str) and row["system"]:
        messages.append({"role": "system", "content": row["system"]})
    history = row.get("history")
    for turn in history if isinstance(history, (list, tuple)) else ():
        if isinstance(turn, (list, tuple)) and len(turn) == 2:
            messages.append({"role": "user", "content": content_text(turn[0])})
            messages.append({"role": "assistant", "content": content_text(turn[1])})
    prompt = f"{instruction}\n{context}" if isinstance(context, str) and context else instruction
    messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Sample(messages=tuple(messages))


def _pair(row: Mapping[str, Any], prompt: str, completion: str) -> Sample | None:
    asked, answered = row.get(prompt), row.get(completion)
    if isinstance(asked, str) and isinstance(answered, str):
        return Sample(text=asked + answered, completion=answered)
    before, after = _messages(asked), _messages(answered)
    return Sample(messages=(*before, *after), tools=_tools(row.get("tools"))) if before and after else None


def _text(row: Mapping[str, Any], column: str) -> Sample | None:
    text = row.get(column)
    return Sample(text=text) if isinstance(text, str) and text else None
