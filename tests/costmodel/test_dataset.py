"""Lengths of a data set: every format and kind of file counts the same, by a real tokenizer whose words are its tokens."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import cli
from costmodel.dataset import (
    MAX_BINS,
    DatasetEffects,
    DatasetLengths,
    _binned,
    cache_folder,
    dataset_effects,
    dataset_fields,
    read_dataset,
)
from costmodel.defaults import resolve
from costmodel.errors import CostModelError, MissingExtraError
from costmodel.estimation import estimate
from costmodel.explain import length_picture
from costmodel.hf_config import model_spec_from_config
from costmodel.importers import import_mapping
from costmodel.specs import Job
from costmodel.tokenizing import TokenizerCounter, estimated_tokens

CHATML = "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTCOST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _tokenizer(folder: Path, chat_template: str | None = None) -> Path:
    """A saved tokenizer for which every word between blanks is one token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.enable_truncation(4)  # a saved tokenizer may cut: counting must not
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _json_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


CHAT = [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "four five"}]
SHARED = [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four five"}]

# --- formats. Counted by hand: a chat turn is start, role, words, end in the template; a text has its end token.
# (format, row, tokens with the template, supervised tokens of them)
FORMATS = [
    pytest.param("messages", {"messages": CHAT}, 11, 3, id="messages"),
    pytest.param("sharegpt", {"conversations": SHARED}, 11, 3, id="sharegpt"),
    pytest.param("sharegpt", {"conversations": SHARED, "system": "be kind"}, 16, 3, id="sharegpt-system"),
    pytest.param("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}]}, CHAT[1]]}, 10, 3),
    pytest.param("alpaca", {"instruction": "one two", "input": "three", "output": "four five"}, 11, 3, id="alpaca"),
    pytest.param(
        "alpaca", {"instruction": "one two three", "input": "", "output": "four five"}, 11, 3, id="alpaca-no-input"
    ),
    pytest.param("alpaca", {"instruction": "one two", "context": "three", "response": "four five"}, 11, 3, id="dolly"),
    pytest.param("alpaca", {"instruction": "c", "output": "d", "history": [["a", "b"]]}, 16, 4, id="alpaca-history"),
    pytest.param("prompt_completion", {"prompt": "one two ", "completion": "three"}, 4, 2, id="prompt-completion"),
    pytest.param("prompt_completion", {"question": "one two ", "answer": "three"}, 4, 2, id="question-answer"),
    pytest.param("prompt_completion", {"prompt": CHAT[:1], "completion": CHAT[1:]}, 11, 3, id="prompt-completion-chats"),
    pytest.param("text", {"text": "one two three"}, 4, None, id="text"),
    pytest.param("text", {"id": 7, "body": "one two three"}, 4, None, id="the-only-text-column"),
    pytest.param("tokens", {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, 3, 2, id="tokenised"),
    pytest.param("tokens", {"input_ids": [5, 6, 7]}, 3, None, id="tokenised-without-labels"),
]


@pytest.mark.parametrize(("name", "row", "num_tokens", "num_supervised"), FORMATS)
def test_formats(name: str, row: dict[str, Any], num_tokens: int, num_supervised: int | None, tmp_path: Path) -> None:
    path = _json_lines(tmp_path / "d.jsonl", [row, row])
    found = read_dataset(path, _tokenizer(tmp_path / "t", CHATML))
    assert (found.format, found.num_samples, found.histogram) == (name, 2, {num_tokens: 2})
    assert found.supervised_tokens == (None if num_supervised is None else {num_tokens: 2 * num_supervised})
    assert found.lengths_are_estimated is False
    assert found.warnings == ()


def test_chat_without_a_template_has_the_usual_frame(tmp_path: Path) -> None:
    found = read_dataset(_json_lines(tmp_path / "d.jsonl", [{"messages": CHAT}]), _tokenizer(tmp_path / "t"))
    assert found.histogram == {3 + 2 + 2 * 5: 1}
    assert found.supervised_fraction == 3 / 15
    (said,) = found.warnings
    assert "has no chat template: chats are counted turn by turn, with 5 tokens a turn" in said
    assert read_dataset(tmp_path / "d.jsonl", tmp_path / "t").warnings == (said,)  # from the cache
    assert read_dataset(_json_lines(tmp_path / "p.jsonl", ROWS), tmp_path / "t").warnings == ()


ROWS = [{"prompt": "a b ", "completion": "c"}, {"prompt": "a ", "completion": "b c d e"}]


@pytest.mark.parametrize("kind", ["jsonl", "json", "json-of-lines", "json-with-data", "csv", "tsv", "parquet", "bom"])
def test_kinds_of_files(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"d.{kind.split('-')[0].replace('bom', 'jsonl')}"
    if kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "json-with-data":
        path.write_text(json.dumps({"version": 1, "data": ROWS}))
    elif kind in ("csv", "tsv"):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(ROWS[0]), delimiter="\t" if kind == "tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)
        path.write_text(text.getvalue())
    elif kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        _json_lines(path, ROWS)
        if kind == "bom":
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found = read_dataset(path, _tokenizer(tmp_path / "t"))
    assert found.histogram == {4: 1, 6: 1}
    assert found.supervised_tokens == {4: 2, 6: 5}


def test_parquet_holds_chats_too(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([{"messages": CHAT}] * 3), tmp_path / "d.parquet")
    assert read_dataset(tmp_path / "d.parquet", _tokenizer(tmp_path / "t", CHATML)).histogram == {11: 3}


def test_many_rows_are_counted_in_batches(tmp_path: Path) -> None:
    rows = [{"text": " ".join("w" * (1 + i % 7))} for i in range(2_501)]
    shares: list[float] = []
    found = read_dataset(_json_lines(tmp_path / "d.jsonl", rows), _tokenizer(tmp_path / "t"), progress=shares.append)
    assert found.num_samples == 2_501
    assert found.histogram == {1 + n: len(range(n - 1, 2_501, 7)) for n in range(1, 8)}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) == 3


# --- estimates


def test_characters_are_an_estimate_and_say_so(tmp_path: Path) -> None:
    found = read_dataset(_json_lines(tmp_path / "d.jsonl", [{"text": "x" * 36}]))
    assert found.histogram == {10 + 1: 1}
    assert (found.lengths_are_estimated, found.tokenizer) == (True, None)
    assert found.warnings[0].startswith("lengths are estimated from characters (3.6 a token, which holds for English text)")


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("a", 1), ("x" * 18, 5), ("漢字", 2), ("漢字 ab", 3)])
def test_estimated_tokens(text: str, tokens: int) -> None:
    assert estimated_tokens(text) == tokens


# --- chat templates run in a sandbox


def _template_counts(tmp_path: Path, template: str) -> tuple[dict[int, int], int]:
    found = read_dataset(_json_lines(tmp_path / "d.jsonl", [{"messages": CHAT}]), _tokenizer(tmp_path / "t", template))
    return found.histogram, found.num_template_failures


def test_template_features_of_transformers(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }} {{ strftime_now('%d %b %Y') }} {% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %} {{ m.content }} {{ eos_token }}{% endgeneration %}{% else %}{{ m | tojson }}{% continue %}"
        "{% endif %}{% endfor %}"
    )
    # <s>, a date of three words, {"role": "user", "content": "one two three"} in six, "four five </s>"
    assert _template_counts(tmp_path, template) == ({1 + 3 + 6 + 3: 1}, 0)


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = _tokenizer(tmp_path / "t", CHATML)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    assert read_dataset(_json_lines(tmp_path / "d.jsonl", [{"messages": CHAT}]), folder).histogram == {5: 1}


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
    ids=["refuses", "reaches-for-python", "changes-its-input"],
)
def test_a_chat_that_the_template_cannot_render_is_counted_turn_by_turn(template: str, tmp_path: Path) -> None:
    assert _template_counts(tmp_path, template) == ({15: 1}, 1)


def test_broken_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match=r"the chat template in .* is not valid"):
        TokenizerCounter(str(_tokenizer(tmp_path / "t", "{% for %}")))


# --- what is wrong is said


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", '{"text": "a"}\n{"text": \n', r"d\.jsonl: line 2 is not valid JSON"),
        ("d.jsonl", "[1]\n", r"line 1 must be an object of columns, not list"),
        ("d.jsonl", "\n\n", "holds no samples"),
        ("d.jsonl", '{"text": ""}\n', "holds no samples of the format text"),
        ("d.jsonl", '{"chosen": [], "rejected": []}\n', "no known format has the columns chosen, rejected; known are"),
        ("d.json", '"words"', "must hold a list of rows; it holds str"),
        ("d.json", '{"a": 1,\n"b": 2}', "must hold a list of rows, or a mapping with one such list"),
        ("d.txt", "a", r"a data set is \.jsonl, .*, not \.txt"),
        ("d.parquet", "PAR1", "is not a readable parquet file"),
        ("d.csv", b"text\n\xff\xfe\n", "is not a text file in UTF-8"),
    ],
)
def test_damaged_data_sets(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CostModelError, match=message):
        read_dataset(path)


def test_missing_data_set_and_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match="no such file"):
        read_dataset(tmp_path / "none.jsonl")
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CostModelError, match=r"it holds a tokenizer\.model only: save it once with a fast tokenizer"):
        read_dataset(tmp_path / "none.jsonl", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CostModelError, match=r"is not a readable tokenizer\.json"):
        read_dataset(tmp_path / "none.jsonl", tmp_path)


def test_missing_packages_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _tokenizer(tmp_path / "t", CHATML)
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    for package, call in (
        ("pyarrow", lambda: read_dataset(tmp_path / "d.parquet")),
        ("tokenizers", lambda: TokenizerCounter(str(folder))),
        ("jinja2", lambda: TokenizerCounter(str(folder))),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(MissingExtraError, match=rf"needs {package}: pip install 'ftcost\[data\]'"):
                call()


def test_rows_that_do_not_fit_are_said(tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": CHAT}, {"messages": None}, {"other": 1}, {"messages": [{"role": 3}]}]
    found = read_dataset(_json_lines(tmp_path / "d.jsonl", rows), _tokenizer(tmp_path / "t", CHATML))
    assert (found.num_samples, found.num_skipped) == (1, 3)
    assert found.warnings == (f"3 rows of {tmp_path}/d.jsonl hold no messages sample and are not counted; mend them",)


def test_lone_surrogates_are_counted(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "a \\ud800 b"}\n')
    assert read_dataset(tmp_path / "d.jsonl", _tokenizer(tmp_path / "t")).histogram == {4: 1}


# --- cache


def test_second_reading_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tokenizer = _json_lines(tmp_path / "d.jsonl", ROWS), _tokenizer(tmp_path / "t")
    first = read_dataset(path, tokenizer)
    calls: list[int] = []
    original = TokenizerCounter.count
    monkeypatch.setattr(
        TokenizerCounter, "count", lambda self, samples: calls.append(len(samples)) or original(self, samples)
    )
    assert read_dataset(path, tokenizer) == first
    assert calls == []
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())  # the content counts, not the name
    assert read_dataset(copy, tokenizer).file == str(copy)
    assert calls == []
    _json_lines(path, [*ROWS, ROWS[0]])
    assert read_dataset(path, tokenizer).num_samples == 3
    read_dataset(path, _tokenizer(tmp_path / "t2", CHATML))  # another tokenizer
    assert calls == [3, 3]
    assert read_dataset(path, tokenizer, use_cache=False).num_samples == 3
    assert calls == [3, 3, 3]


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "{}", '{"histogram": {"4": "x"}}', "\x00\xff", '{"histogram": {"-1": 2}}', "truncated"]
)
def test_damaged_cache_is_ignored(damage: str, tmp_path: Path, own_cache: Path) -> None:
    path = _json_lines(tmp_path / "d.jsonl", ROWS)
    first = read_dataset(path)
    (cached,) = (own_cache / "dataset_lengths").iterdir()
    text = cached.read_text()
    cached.write_text(text[: len(text) // 2] if damage == "truncated" else damage, encoding="latin-1")
    assert read_dataset(path) == first
    assert json.loads(cached.read_text())["num_samples"] == 2  # and mended


def test_cache_with_a_wrong_sum_is_ignored(tmp_path: Path, own_cache: Path) -> None:
    path = _json_lines(tmp_path / "d.jsonl", ROWS)
    first = read_dataset(path)
    (cached,) = (own_cache / "dataset_lengths").iterdir()
    cached.write_text(json.dumps({**json.loads(cached.read_text()), "num_samples": 9}))
    assert read_dataset(path) == first


def test_cache_that_cannot_be_written_is_only_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FTCOST_CACHE_DIR", str(tmp_path / "file"))
    assert read_dataset(_json_lines(tmp_path / "d.jsonl", ROWS)).num_samples == 2


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FTCOST_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == "/caches/ftcost"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == os.path.join(os.path.expanduser("~"), ".cache", "ftcost")


# --- bins


@given(st.dictionaries(st.integers(1, 200_000), st.integers(1, 50), min_size=1, max_size=4_000))
def test_bins_keep_every_sample_and_only_lengthen(lengths: dict[int, int]) -> None:
    binned, _ = _binned(lengths, {})
    assert len(binned) <= MAX_BINS
    assert sum(binned.values()) == sum(lengths.values())
    total, rounded = (sum(length * count for length, count in each.items()) for each in (lengths, binned))
    assert total <= rounded <= 1.01 * total
    if len(lengths) <= 512:
        assert binned == lengths


def test_bins_of_every_length_to_sixty_thousand() -> None:
    lengths = dict.fromkeys(range(1, 60_001), 1)
    binned, supervised = _binned(lengths, lengths)
    assert 1_000 < len(binned) <= MAX_BINS
    assert sum(supervised.values()) == 60_000
    assert max(binned) == 60_160  # 60,000 rounded up to a multiple of 2^8 at 8 bits


# --- what it does to a job

DATASET = DatasetLengths(
    file="d.jsonl", format="alpaca", num_samples=100, histogram={10: 50, 30: 50}, supervised_tokens={10: 250, 30: 1000},
    lengths_are_estimated=False, tokenizer="t",
)  # fmt: skip


def test_summary_of_a_data_set() -> None:
    assert (DATASET.num_tokens, DATASET.mean_tokens, DATASET.longest_tokens) == (2000, 20.0, 30)
    assert DATASET.supervised_fraction == 1250 / 2000
    # Cut at 20 tokens: the longer half loses 10 of its 20 supervised tokens.
    assert DATASET.supervised_fraction_at(20) == (250 + 50 * 10) / (50 * 10 + 50 * 20)
    assert (DATASET.num_cut(20), DATASET.num_cut(30)) == (50, 0)
    assert DATASET.to_dict()["mean_tokens"] == 20.0


TINY = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "vocab_size": 1000,
}  # fmt: skip


def _effects(**fields: Any) -> DatasetEffects:
    job = Job(model=TINY, max_length=60, per_device_train_batch_size=2, **fields)
    return dataset_effects(DATASET, resolve(job, model_spec_from_config(TINY))[0])


def test_padding_and_what_would_save_it() -> None:
    """Two samples of 10 or 30: the longer is 30 in three of four batches, 25 on average, for 20 real tokens each."""
    effects = _effects()
    assert effects.share_of_padding == pytest.approx(1 - 20 / 25)
    assert effects.saved_by["padding_free"] == pytest.approx(1 - 20 / 25)
    assert effects.saved_by["packing"] == pytest.approx(1 - 20 / 25)
    # sorted megabatches of 24, 24, 24, 24, 4: in each, a row of 10 is padded to 30 where the rows of 30 are an odd number
    assert effects.saved_by["train_sampling_strategy group_by_length"] == pytest.approx(1 - 20.5 / 25, rel=0.01)
    assert effects.num_cut == 0


def test_nothing_is_left_to_save_in_a_packed_job() -> None:
    effects = _effects(packing=True)
    assert (effects.share_of_padding, effects.saved_by) == (0.0, {})


def test_padding_to_max_length() -> None:
    assert _effects(padding="max_length").share_of_padding == pytest.approx(1 - 20 / 60)


def test_fields_of_a_data_set() -> None:
    assert dataset_fields(DATASET, {"max_length": 512}) == {
        "lengths": {"histogram": {10: 50, 30: 50}},
        "num_samples": 100,
        "supervised_fraction": 0.625,
    }
    assert dataset_fields(DATASET, {"num_samples": 7})["max_length"] == 30  # nothing is cut where no limit is given
    assert "num_samples" not in dataset_fields(DATASET, {"num_samples": 7})


@pytest.mark.parametrize(
    ("framework", "limit"),
    [("trl", 1024), ("unsloth", 2048), ("llamafactory", 2048), ("axolotl", 512), ("transformers", 5000), (None, 5000)],
)
def test_a_framework_that_cuts_by_itself_cuts_a_counted_data_set_too(
    framework: str | None, limit: int, tmp_path: Path
) -> None:
    """TRL cuts at 1,024 where nothing is said: a sample of 5,000 tokens is no reason to need the memory for it."""
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"input_ids": [1] * n}) + "\n" for n in (100, 5000)))
    fields = {"framework": framework} if framework else {}
    fields = fields | dataset_fields(read_dataset(str(tmp_path / "long.jsonl")), fields)
    answer = estimate(model="meta-llama/Llama-3.2-1B", method="lora", **fields)
    assert answer.job["max_length"] == limit
    assert any("are cut there" in warning for warning in answer.warnings) is (limit < 5000)


def test_axolotl_drops_long_samples_and_holds_some_out() -> None:
    imported = import_mapping({"base_model": "m", "sequence_len": 20, "val_set_size": 0.1, "eval_steps": 5})
    assert dataset_fields(DATASET, imported.fields, imported) == {
        "lengths": {"histogram": {10: 50}},
        "num_samples": 45,
        "num_eval_samples": 5,
        "supervised_fraction": (250 + 500) / 1500,
    }


def test_llamafactory_keeps_max_samples() -> None:
    config = {"stage": "sft", "model_name_or_path": "m", "max_samples": 40, "val_size": 10, "eval_strategy": "steps"}
    imported = import_mapping(config)
    decided = dataset_fields(DATASET, imported.fields, imported)
    assert (decided["num_samples"], decided["num_eval_samples"]) == (30, 10)
    assert decided["lengths"] == {"histogram": {10: 50, 30: 50}}  # cut, not dropped


def test_llamafactory_keeps_max_samples_of_each_of_its_data_sets() -> None:
    config = {"stage": "sft", "model_name_or_path": "m", "dataset": "one,two", "max_samples": 40}
    imported = import_mapping(config)
    assert dataset_fields(DATASET, imported.fields, imported)["num_samples"] == 80


@pytest.mark.parametrize(
    ("config", "form", "fraction"),
    [
        ({"base_model": "m"}, "alpaca", 0.625),
        ({"base_model": "m", "train_on_inputs": True}, "alpaca", 1.0),
        ({"stage": "sft", "model_name_or_path": "m"}, "alpaca", 0.625),
        ({"stage": "sft", "model_name_or_path": "m", "train_on_prompt": True}, "alpaca", 1.0),
        ({"model_name_or_path": "m"}, "messages", 1.0),  # TRL: every token of a chat
        ({"model_name_or_path": "m", "assistant_only_loss": True}, "messages", 0.625),
        ({"model_name_or_path": "m"}, "prompt_completion", 0.625),
        ({"model_name_or_path": "m", "completion_only_loss": False}, "prompt_completion", 1.0),
    ],
)
def test_which_tokens_the_loss_is_on(config: dict[str, Any], form: str, fraction: float) -> None:
    from dataclasses import replace

    imported = import_mapping(config)
    fields = {**imported.fields, "max_length": 512}
    assert dataset_fields(replace(DATASET, format=form), fields, imported)["supervised_fraction"] == fraction


def test_picture_of_lengths() -> None:
    table = length_picture({10: 50, 35: 100, 900: 1}, num_bars=4)
    assert [row[:3] for row in table.rows] == [
        ("1 to 10", "50", "33.1 %"),
        ("11 to 20", "0", "0.0 %"),
        ("21 to 30", "0", "0.0 %"),
        ("31 or more", "101", "66.9 %"),
    ]
    assert [len(row[3]) for row in table.rows] == [20, 0, 0, 40]
    assert length_picture({1: 1}).rows == (("1 to 1", "1", "100.0 %", "#" * 40),)


# --- the command line


def test_estimate_with_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    _tokenizer(tmp_path / "t")
    _json_lines(tmp_path / "d.jsonl", [{"text": " ".join("w" * n)} for n in (9, 29)])
    line = "estimate -m meta-llama/Llama-2-7b-hf -g A40 --method lora --seq-len 20 -b 1 --dataset d.jsonl --json"
    assert cli.run([*line.split(), "--tokenizer", "t", "--explain"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert err == ""  # no bar where stderr is no terminal
    assert (answer["job"]["num_samples"], answer["num_steps"]) == (2, 6)
    assert answer["dataset"] == {
        "file": "d.jsonl", "format": "text", "tokenizer": "t", "lengths_are_estimated": False, "num_samples": 2,
        "num_skipped": 0, "num_tokens": 40, "mean_tokens": 20.0, "longest_tokens": 30, "supervised_fraction": None,
        "batch_size": 1, "max_length": 20, "share_of_padding": 0.0, "num_cut": 1, "saved_by": answer["dataset"]["saved_by"],
    }  # fmt: skip
    assert answer["explain"]["values"]["num_samples"] == {"value": 2, "from": "counted in d.jsonl"}
    assert cli.run(line.split()) == 0
    estimated = json.loads(capsys.readouterr().out)
    assert estimated["dataset"]["lengths_are_estimated"] is True
    assert estimated["warnings"][0].startswith("lengths are estimated from characters")


def test_a_counted_data_set_beats_what_a_job_file_says_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    _json_lines(tmp_path / "d.jsonl", [{"prompt": "w" * 36, "completion": "w" * 36}] * 3)
    job = {"model": "meta-llama/Llama-2-7b-hf", "gpu": "A40", "method": "lora", "max_length": 512, "framework": "trl"}
    job |= {"num_samples": 15_000, "supervised_fraction": 0.9, "lengths": {"fixed": 300}}
    (tmp_path / "job.json").write_text(json.dumps(job))

    def answered(*flags: str) -> dict[str, Any]:
        assert cli.run(["estimate", "job.json", "--dataset", "d.jsonl", "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    counted = answered()
    assert (counted["job"]["num_samples"], counted["num_steps"]) == (3, 3)
    assert counted["job"]["supervised_fraction"] == pytest.approx(0.5, abs=0.06)  # the completions
    said = [warning for warning in counted["warnings"] if warning.startswith("num_samples")]
    assert said == ["num_samples 15000 of job.json is not used: d.jsonl gives 3; to keep it, give --num-samples"]
    kept = answered("--num-samples", "15000", "--supervised-fraction", "0.9")
    assert (kept["job"]["num_samples"], kept["job"]["supervised_fraction"]) == (15_000, 0.9)
    assert not [warning for warning in kept["warnings"] if warning.startswith("num_samples")]


def test_compare_and_optimize_count_a_data_set_as_estimate_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _tokenizer(tmp_path / "t")
    _json_lines(tmp_path / "d.jsonl", [{"text": " ".join("w" * n)} for n in (9, 29, 9)])
    flags = "-m meta-llama/Llama-2-7b-hf -g A40 --method lora --seq-len 20 -b 1 --dataset d.jsonl --tokenizer t --json"
    assert cli.run(["estimate", *flags.split()]) == 0
    alone = json.loads(capsys.readouterr().out)["job"]
    assert cli.run(["compare", *flags.split(), "--gpus", "A40", "--as-is"]) == 0
    out, err = capsys.readouterr()
    compared = json.loads(out)[0]["estimate"]["job"]
    assert err.startswith("ftcost: d.jsonl: 3 text samples, 17 tokens on average, the longest 30\n")
    assert cli.run(["optimize", *flags.split()]) == 0
    out, err = capsys.readouterr()
    start = json.loads(out)["start"]["estimate"]["job"]
    assert err.startswith("ftcost: d.jsonl: 3 text samples, ")
    for field in ("lengths", "num_samples", "max_length", "supervised_fraction"):
        assert alone.get(field) == compared.get(field) == start.get(field)
    assert alone["num_samples"] == 3
    without = flags.replace("--tokenizer t ", "").split()
    assert cli.run(["compare", *without, "--gpus", "A40"]) == 0
    assert "lengths are estimated from characters" in capsys.readouterr().err


def test_estimate_draws_the_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    _json_lines(tmp_path / "d.jsonl", [{"text": "w" * 360 * n} for n in range(1, 11)])
    line = "estimate -m meta-llama/Llama-2-7b-hf -g A40 --method lora --seq-len 512 -b 2 --dataset d.jsonl"
    assert cli.run(line.split()) == 0
    lines = [" ".join(each.split()) for each in capsys.readouterr().out.splitlines()]
    assert "samples 10 (text)" in lines
    assert "cut or dropped 5 above 512 tokens (50.0 %)" in lines
    assert f"101 to 200 1 10.0 % {'#' * 40}" in lines


def test_the_models_own_tokenizer_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _tokenizer(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(TINY))
    path = _json_lines(tmp_path / "d.jsonl", ROWS)
    assert cli.run(["estimate", "-m", str(folder), "--seq-len", "64", "--dataset", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dataset"]["tokenizer"] == str(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer", "t"], "--tokenizer goes with --dataset"),
        (["--dataset", "d.jsonl", "--lengths", "fixed:3"], "give --dataset or --lengths, not both"),
        (["--dataset", "none.jsonl"], "no such file: none.jsonl"),
    ],
)
@pytest.mark.parametrize("command", ["estimate", "compare", "optimize"])
def test_wrong_input(command: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "-m", "meta-llama/Llama-2-7b-hf", "--seq-len", "64", *arguments]) == 2
    assert capsys.readouterr() == ("", f"ftcost: {message}\n")


def test_counting_without_a_tokenizer_loads_nothing_optional(tmp_path: Path) -> None:
    path = _json_lines(tmp_path / "d.jsonl", ROWS)
    code = (
        f"import sys; from costmodel.dataset import read_dataset; print(read_dataset({str(path)!r}).num_samples, "
        "sorted({'tokenizers', 'jinja2', 'pyarrow', 'rich', 'torch', 'transformers', 'yaml'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "2 []\n"
