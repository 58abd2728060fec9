"""``ftcost report``: rows, page and messages, through the console script's own entry point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from synthetic_run import MIXTRAL, dense_run, moe_run, one_step_run, write_rows, write_truncated

from costmodel.cli import run
from ftcost_callback.cli import app
from ftcost_callback.report_rows import summary_row, summary_text


def ftcost(*arguments: object) -> int:
    return run([str(each) for each in arguments], application=app)


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    write_rows(tmp_path / "out" / "_ftcost" / "run.jsonl", moe_run())
    return tmp_path / "out"


@pytest.mark.parametrize("where", [".", "_ftcost", "_ftcost/run.jsonl"])
def test_json_is_the_summary_row_with_what_identifies_the_run(
    where: str, output_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ftcost("report", output_dir / where, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    written = [json.loads(line) for line in (output_dir / "_ftcost" / "run.jsonl").read_text().splitlines()]
    summary = next(each for each in reversed(written) if each["type"] == "summary")
    before = next(each for each in written if each["type"] == "prediction" and each["basis"] == "before")
    assert {name: row[name] for name in summary if name != "type"} == {k: v for k, v in summary.items() if k != "type"}
    assert row["run"] == str(output_dir / "_ftcost" / "run.jsonl")
    assert row["name"] == MIXTRAL
    assert row["gpu"] == "NVIDIA A40"
    assert row["num_sessions"] == 2
    assert row["predicted_usd"] == before["total_usd"]
    assert row["total_measured_over_predicted"] == summary["spent_usd"] / before["total_usd"]
    assert "projected_usd" not in row


def test_a_checkpoint_stands_for_the_run_that_wrote_it(
    output_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for checkpoint in (output_dir / "checkpoint-60", tmp_path / "elsewhere" / "checkpoint-60"):
        checkpoint.mkdir(parents=True)
    (output_dir / "checkpoint-60" / "trainer_state.json").write_text("{}")
    assert summary_row(output_dir / "checkpoint-60") == summary_row(output_dir)
    monkeypatch.chdir(output_dir / "checkpoint-60")
    assert ftcost("report", ".") == 0
    assert MIXTRAL.partition("/")[2] in capsys.readouterr().out
    assert ftcost("report", tmp_path / "elsewhere" / "checkpoint-60") == 2
    assert "is a checkpoint, and no _ftcost/run.jsonl lies beside it; give the output_dir" in capsys.readouterr().err


def test_rates_of_the_last_session_are_labelled(output_dir: Path) -> None:
    row = {**summary_row(output_dir), "non_padding_tokens_per_second": 353.0}
    assert "353 tokens/s without padding, " in summary_text(row)
    assert "353 tokens/s without padding (last session), " in summary_text({**row, "num_sessions_in_rates": 1})


def test_a_killed_run_gets_the_same_fields_from_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = write_truncated(tmp_path / "run.jsonl", moe_run(), keep_rows=200)
    steps = [json.loads(line) for line in killed.read_text().splitlines()[:200]]
    steps = [each for each in steps if each["type"] == "step"]
    assert ftcost("report", killed, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["status"] == "running_or_killed"
    assert row["global_step"] == steps[-1]["global_step"]
    assert row["num_tokens"] == sum(each["num_tokens"] for each in steps)
    assert row["train_seconds"] == pytest.approx(sum(each["step_seconds"] for each in steps))
    parts = sum(row[f"{name}_seconds"] for name in ("train", "eval", "save", "log", "startup", "other"))
    assert parts == pytest.approx(row["wall_seconds"])
    assert row["projected_usd"] == next(
        each["projected_total_usd"] for each in reversed(steps) if "projected_total_usd" in each
    )
    assert "total_measured_over_predicted" not in row
    assert row["remarks"] == ["the last line is cut off, as after a kill: it was left out"]


def test_several_runs_give_a_row_each_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_rows(tmp_path / name / "run.jsonl", rows) for name, rows in (("a", dense_run()), ("b", one_step_run()))]
    assert ftcost("report", *runs, "--json") == 0
    assert [row["run"] for row in json.loads(capsys.readouterr().out)] == [str(each) for each in runs]


def test_without_an_option_a_person_reads_it(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ftcost("report", output_dir) == 0
    printed = capsys.readouterr()
    first, where, rates, *_ = printed.out.splitlines()
    assert first.startswith(f"{MIXTRAL}: finished at step 600 of 600: $")
    assert where.startswith("  training ")
    assert where.endswith(" done twice or lost")
    assert ", of the training " in where  # it is no time of its own
    assert "tokens/s without padding, MFU" in rates
    assert "predicted $1.54, 1 h 57 min (took " in rates
    assert printed.err == ""


@pytest.mark.parametrize("option", ["--html", "--out"])
def test_the_page_is_written_and_said_on_stderr(
    option: str, output_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "pages" / "report.html"
    page.parent.mkdir()
    assert ftcost("report", output_dir, option, page) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"ftcost: wrote {page}\n")
    assert MIXTRAL in page.read_text(encoding="utf-8")


def test_open_shows_the_page_that_was_written(
    output_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(shown.append(address)))  # False: no browser
    page = tmp_path / "report.html"
    assert ftcost("report", output_dir, "--html", page, "--open") == 0
    assert shown == [page.as_uri()]
    assert capsys.readouterr().err.splitlines()[-1] == f"ftcost: no browser could be started; open {page}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"", "the file is empty"),
        (b'{"loss": 1.0}\n', "none of them a session, step, prediction or summary row"),
        (b"\x00\xff\x00PK\x03\x04", "none of them a session, step, prediction or summary row"),
        (b"[1, 2]\n", "none of them a session, step, prediction or summary row"),
    ],
    ids=["missing", "empty", "another tool's", "binary", "a list"],
)
@pytest.mark.parametrize("options", [(), ("--json",), ("--html", "page.html")], ids=["text", "json", "html"])
def test_what_is_no_record_is_refused_in_one_line(
    content: bytes | None,
    said: str,
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "run.jsonl").write_bytes(content)
    assert ftcost("report", "run.jsonl", *options) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("ftcost: run.jsonl: ")
    assert said in line
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("form", ["text", "json", "html"])
def test_a_run_that_is_not_there_does_not_cost_the_others(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = (write_rows(tmp_path / name / "run.jsonl", dense_run()) for name in ("a", "c"))
    page = tmp_path / "page.html"
    options = {"text": [], "json": ["--json"], "html": ["--html", page]}[form]
    assert ftcost("report", first, tmp_path / "b", last, *options) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith(f"ftcost: {tmp_path / 'b'}: ")
    shown = page.read_text(encoding="utf-8") if form == "html" else printed.out
    if form == "json":
        assert [row["run"] for row in json.loads(shown)] == [str(first), str(last)]
    elif form == "text":
        assert shown == "".join(f"{summary_text(summary_row(each))}\n" for each in (first, last))
    else:
        assert "<title>2 runs" in shown


def test_a_folder_without_a_record_and_open_without_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ftcost("report", tmp_path) == 2
    assert "holds no _ftcost/run.jsonl" in capsys.readouterr().err
    assert ftcost("report", tmp_path, "--open") == 2
    assert "give --html FILE" in capsys.readouterr().err


def test_a_summary_with_foreign_values_does_not_end_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*one_step_run()]
    odd = {"type": "summary", "status": "finished", "wall_seconds": "soon", "spent_usd": None, "mfu": [1]}
    path = write_rows(tmp_path / "run.jsonl", [*(each for each in rows if each["type"] != "summary"), odd])
    assert ftcost("report", path) == 0
    assert ftcost("report", path, "--json") == 0
    assert "soon" not in capsys.readouterr().out


def test_help_names_the_ways_to_give_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert ftcost("report", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("RUN...", "run.jsonl", "output_dir", "--html", "--open", "--json"):
        assert words in text


@pytest.mark.parametrize("arguments", [["gpus"], ["report", "RUN", "--json"]], ids=["gpus", "report"])
def test_no_command_loads_more_than_it_needs(arguments: list[str], output_dir: Path) -> None:
    arguments = [str(output_dir) if each == "RUN" else each for each in arguments]
    code = (
        "import sys; from costmodel.cli import run; from ftcost_callback.cli import app; "
        f"code = run({arguments!r}, application=app); "
        "print([n for n in ('torch', 'transformers', 'plotly', 'wandb', 'numpy') if n in sys.modules], code, "
        "file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[] 0"
