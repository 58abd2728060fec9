"""Lengths of a data set's samples, where they can be read cheaply and without running anybody's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Final

MAX_ROWS: Final = 20_000
MAX_ROWS_FOR_ORDER: Final = 200_000
_ROWS_AT_ONCE: Final = 1_000
_IGNORED_LABEL: Final = -100


@dataclass(frozen=True, slots=True)
class DatasetLengths:
    """What the rows read say about all. ``num_samples`` counts documents: a packed row holds several."""

    histogram: dict[int, int]  # tokens -> samples, among the rows read
    num_samples: int
    longest_tokens: int  # among the rows read
    supervised_fraction: float | None  # of the tokens; None: no labels column


@dataclass
class _Tally:
    histogram: dict[int, int] = field(default_factory=dict)
    num_labelled: int = 0
    num_supervised: int = 0

    def add(self, length: int) -> None:
        if length > 0:
            self.histogram[length] = self.histogram.get(length, 0) + 1


def dataset_lengths(dataset: Any, *, max_rows: int = MAX_ROWS) -> DatasetLengths | None:
    """Lengths by ``input_ids`` (by ``seq_lengths`` where rows are packed), from at most ``max_rows`` evenly spaced rows.

    Only a ``datasets.Dataset`` without an on-the-fly transform, and a plain list of plain dicts, are read. ``None`` for all
    else, subclasses too: a ``__getitem__`` of the user's may be slow, random or have effects. No random state is touched.
    """
    if type(dataset) in (list, tuple):
        return _from_list(dataset, max_rows)
    return _from_arrow(dataset, max_rows) if _is_plain_arrow(dataset) else None


def _is_plain_arrow(dataset: Any) -> bool:
    """A ``datasets.Dataset`` with token ids that no transform of the user's makes on the fly."""
    is_arrow = type(dataset).__module__.startswith("datasets.") and type(dataset).__name__ == "Dataset"
    return is_arrow and "input_ids" in dataset.column_names and dataset.format["type"] != "custom"


def row_lengths(dataset: Any, *, max_rows: int = MAX_ROWS_FOR_ORDER) -> dict[int, int] | None:
    """Row -> its tokens, of at most ``max_rows`` evenly spaced rows; a packed row counts whole. ``None`` as above."""
    if type(dataset) in (list, tuple):
        of_rows: dict[int, int] = {}
        for place in _evenly_spaced(len(dataset), max_rows):
            if (length := _list_row_length(dataset[place])) is None:
                return None
            of_rows[place] = length
        return of_rows
    if not _is_plain_arrow(dataset):
        return None
    from pyarrow import compute  # type: ignore[import-untyped]

    chosen = _evenly_spaced(len(dataset), max_rows)
    plain = dataset.with_format("arrow").select_columns(["input_ids"])
    lengths: dict[int, int] = {}
    for start in range(0, len(chosen), _ROWS_AT_ONCE):
        rows = chosen[start : start + _ROWS_AT_ONCE]
        counts = compute.list_value_length(plain[rows].column("input_ids")).to_pylist()
        lengths.update(zip(rows, (count or 0 for count in counts), strict=True))
    return lengths


def num_documents(dataset: Any) -> int | None:
    """Samples of a data set, summed over a mapping of data sets: its rows, or where they are packed, what they hold.

    ``None`` for a data set without a length.
    """
    if dataset is None:
        return None
    if isinstance(dataset, Mapping):
        counts = [num_documents(each) for each in dataset.values()]
        return None if any(count is None for count in counts) else sum(count or 0 for count in counts)
    if _is_plain_arrow(dataset) and "seq_lengths" in dataset.column_names and (found := dataset_lengths(dataset)):
        return found.num_samples
    return num_rows(dataset)


def num_rows(dataset: Any) -> int | None:
    """``len(dataset)``; ``None`` for one without a length."""
    if dataset is None:
        return None
    try:
        return len(dataset)
    except TypeError:
        return None


def _evenly_spaced(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return [index * count // most for index in range(most)]


def _list_row_length(row: Any) -> int | None:
    ids = row.get("input_ids") if type(row) is dict else None
    return len(ids) if isinstance(ids, Sized) else None


def _from_list(rows: Sequence[Any], max_rows: int) -> DatasetLengths | None:
    tally = _Tally()
    chosen = _evenly_spaced(len(rows), max_rows)
    for index in chosen:
        row = rows[index]
        length = _list_row_length(row)
        if length is None:
            return None
        tally.add(length)
        labels = row.get("labels")
        if type(labels) in (list, tuple):
            tally.num_labelled += len(labels)
            tally.num_supervised += sum(label != _IGNORED_LABEL for label in labels)
    return _summed(tally, len(chosen), len(rows))


def _from_arrow(dataset: Any, max_rows: int) -> DatasetLengths | None:
    from pyarrow import compute

    columns = dataset.column_names
    length_column = "seq_lengths" if "seq_lengths" in columns else "input_ids"
    # Labels, or TRL's masks before its collator makes labels of them.
    label_column = next((name for name in ("labels", "completion_mask", "assistant_masks") if name in columns), None)
    wanted = [length_column] if label_column is None else [length_column, label_column]
    chosen = _evenly_spaced(len(dataset), max_rows)
    plain = dataset.with_format("arrow").select_columns(wanted)
    tally = _Tally()
    for start in range(0, len(chosen), _ROWS_AT_ONCE):
        table = plain[chosen[start : start + _ROWS_AT_ONCE]]
        lists = table.column(length_column)
        lengths_of = compute.list_flatten if length_column == "seq_lengths" else compute.list_value_length
        lengths = lengths_of(lists)
        for length in lengths.to_pylist():
            tally.add(length or 0)
        if label_column is not None:
            labels = compute.list_flatten(table.column(label_column))
            unsupervised = _IGNORED_LABEL if label_column == "labels" else 0
            tally.num_labelled += len(labels)
            supervised = compute.sum(compute.not_equal(labels, unsupervised)).as_py()
            tally.num_supervised += int(supervised or 0)
    return _summed(tally, len(chosen), len(dataset))


def _summed(tally: _Tally, num_read: int, num_all: int) -> DatasetLengths | None:
    if not tally.histogram:
        return None
    supervised = tally.num_supervised / tally.num_labelled if tally.num_labelled and tally.num_supervised else None
    documents_per_row = sum(tally.histogram.values()) / num_read
    return DatasetLengths(
        histogram=dict(sorted(tally.histogram.items())),
        num_samples=max(1, round(documents_per_row * num_all)),
        longest_tokens=max(tally.histogram),
        supervised_fraction=supervised,
    )
