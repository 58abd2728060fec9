"""The example as a user runs it: a process of its own, offline, then what it left behind is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

SCRIPT = Path(__file__).parents[1] / "examples" / "finetune_with_live_cost.py"
USD_PER_GPU_HOUR = 2.5
BUCKETS = ("train_seconds", "eval_seconds", "save_seconds", "log_seconds", "startup_seconds", "other_seconds")


def run_example(output_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
    }
    command = [sys.executable, str(SCRIPT), "--quick", "--output-dir", str(output_dir)]
    return subprocess.run(
        [*command, "--usd-per-gpu-hour", str(USD_PER_GPU_HOUR), *flags],
        capture_output=True,
        text=True,
        check=False,
        cwd=output_dir.parent,
        env=os.environ | offline | {"HF_HOME": str(output_dir.parent / "hf_home")},
    )


def rows_of(output_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (output_dir / "_ftcost" / "run.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["type"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "trainer", "num_expert_layers"),
    [("mixtral", "trainer", 4), ("qwen3_moe", "sft", 4), ("llama", "sft", 0)],
)
def test_example_estimates_trains_resumes_and_reports(
    tmp_path: Path, architecture: str, trainer: str, num_expert_layers: int
) -> None:
    output_dir = tmp_path / "demo_output"
    done = run_example(output_dir, "--architecture", architecture, "--trainer", trainer)
    assert done.returncode == 0, done.stderr

    first, second = rows_of(output_dir, "session")
    assert first["run_id"] == second["run_id"]
    assert (first["session_index"], second["session_index"]) == (0, 1)
    assert second["resumed_from_step"] == 4
    assert [row["global_step"] for row in rows_of(output_dir, "step")] == list(range(1, 9))
    assert {row["kind"] for row in rows_of(output_dir, "pause")} >= {"eval", "save"}
    assert {len(row["layer_names"]) for row in rows_of(output_dir, "expert_load")} == (
        {num_expert_layers} if num_expert_layers else set()
    )
    assert rows_of(output_dir, "prediction")[0]["basis"] == "before"

    summary = rows_of(output_dir, "summary")[-1]
    assert (summary["num_sessions"], summary["num_steps"]) == (2, 8)
    assert sum(summary[bucket] for bucket in BUCKETS) == pytest.approx(summary["wall_seconds"], rel=1e-6)
    # Both are read from the clock at the end, within milliseconds of each other.
    assert summary["spent_usd"] == pytest.approx(summary["wall_seconds"] * USD_PER_GPU_HOUR / 3600, rel=1e-3)

    assert f"${summary['spent_usd']:.4f}" in done.stdout
    assert first["run_id"] in (output_dir / "report.html").read_text()
    assert len(list(output_dir.glob("wandb/offline-run-*/run-*.wandb"))) == 1


@pytest.mark.slow
def test_example_takes_a_model_folder_and_a_jsonl_file_of_messages(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "user", "what", "does", "it", "cost"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(words), pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = "{% for each in messages %}{{ each.role }} {{ each.content }} {% endfor %}"
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape))
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "model")
    questions = [" ".join(words[3 : 4 + number % 4]) for number in range(40)]
    lines = [json.dumps({"messages": [{"role": "user", "content": question}]}) for question in questions]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))

    output_dir = tmp_path / "output"
    done = run_example(output_dir, "--model", "model", "--dataset", "train.jsonl", "--uninterrupted", "--max-steps", "3")
    assert done.returncode == 0, done.stderr
    assert [row["global_step"] for row in rows_of(output_dir, "step")] == [1, 2, 3]
    # 2 layers, 4 projections of 32 x 32 each, LoRA of rank 16: two matrices of 32 x 16.
    assert rows_of(output_dir, "session")[0]["model"]["num_trainable_params"] == 2 * 4 * 2 * 32 * 16


def word_tokenizer(words: list[str]) -> Any:
    """One token a word, separated by blanks; ``</s>`` is split off as a special token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.mark.slow
def test_example_leaves_an_earlier_run_alone(tmp_path: Path) -> None:
    record = tmp_path / "demo_output" / "_ftcost" / "run.jsonl"
    record.parent.mkdir(parents=True)
    record.write_text("an earlier run\n")
    done = run_example(tmp_path / "demo_output")
    assert done.returncode == 2
    assert "What it will cost" not in done.stdout
    assert "already holds a run" in done.stderr
    assert record.read_text() == "an earlier run\n"


EXAMPLES = SCRIPT.parent


def run_small(arguments: list[str], folder: Path) -> str:
    """stdout and stderr of a command run offline in ``folder``; it must not fail."""
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf_home"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=folder, env=os.environ | fixed)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sft_qlora_mixtral", "finished at step 6"),
        ("qwen3_moe_lora", "finished at step 6"),
        ("full_finetune_1b", "finished at step 6"),
        ("sparse_or_dense", "loss saved per dollar"),
        ("stop_at_budget", "stopped at budget"),
        ("twenty_step_check", "dry run of 20 steps"),
        ("resume_elsewhere", "resumed at step 6 with the bill of the first machine"),
    ],
)
def test_small_example_runs(name: str, says: str, tmp_path: Path) -> None:
    if name == "sft_qlora_mixtral":
        pytest.importorskip("bitsandbytes", reason="4-bit loading needs bitsandbytes")
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--tiny", "--output-dir", str(tmp_path / "out")]
    said = run_small(command, tmp_path)
    assert says in said


def test_choose_gpu_writes_a_picture_and_a_skypilot_task(tmp_path: Path) -> None:
    said = run_small(["bash", str(EXAMPLES / "choose_gpu.sh"), str(EXAMPLES / "job.json"), str(tmp_path)], tmp_path)
    assert "$" in said
    task = yaml.safe_load((tmp_path / "task.yaml").read_text())
    assert task["resources"]["ordered"]
    assert "train.py" in task["run"]
    assert (tmp_path / "compare.svg").read_text().startswith("<svg")


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """Its code cells in order in one Python, with stand-ins for what a notebook displays with."""
    cells = json.loads((EXAMPLES / "estimate.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    stand_in = (
        "import sys, types\n"
        "shown = []\n"
        "sys.modules['IPython'] = types.ModuleType('IPython')\n"
        "sys.modules['IPython.display'] = module = types.ModuleType('IPython.display')\n"
        "module.SVG, module.display = str, shown.append\n"
    )
    check = "\nassert len(shown) == 2 and all(each.startswith('<svg') for each in shown)\nprint(len(fig.data), 'lines')\n"
    assert "2 lines" in run_small([sys.executable, "-c", stand_in + code + check], tmp_path)


def test_every_python_example_has_a_tiny_size() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    own = {"tiny.py", "finetune_with_live_cost.py"}  # the first makes the rest tiny; the second is small without a flag
    without = [each.name for each in files if each.name not in own and "given.tiny" not in each.read_text()]
    assert len(files) > len(own)
    assert without == []


def test_every_python_example_says_that_no_gpu_has_run_its_real_size() -> None:
    files = sorted({*EXAMPLES.glob("*.py")} - {EXAMPLES / "tiny.py"})
    assert [each.name for each in files if "no gpu has run" not in each.read_text().lower()] == []


def test_every_example_is_in_the_list() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".sh", ".ipynb"}} - {"tiny.py"}
    assert [name for name in sorted(files) if f"`{name}`" not in listed] == []


@pytest.mark.slow
def test_the_loop_of_ones_own_is_recorded_profiled_and_reported(tmp_path: Path) -> None:
    script = SCRIPT.with_name("plain_accelerate_loop.py")
    flags = ["--tiny", "--num-samples", "64", "--epochs", "2", "--usd-per-gpu-hour", "2.5", "--output-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, str(script), *flags], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["global_step"] for row in rows_of(tmp_path, "step")] == list(range(1, 17))
    assert [row["kind"] for row in rows_of(tmp_path, "pause")].count("eval") == 2
    (profile,) = rows_of(tmp_path, "profile")
    assert (profile["global_step"], profile["num_steps"]) == (7, 3)
    assert sum(profile["layer_type_seconds"].values()) == pytest.approx(profile["step_seconds"], rel=1e-6)
    summary = rows_of(tmp_path, "summary")[-1]
    assert summary["status"] == "finished"
    assert summary["expert_balance"]["num_dead_experts"] == 0
    assert sum(summary[bucket] for bucket in BUCKETS) == pytest.approx(summary["wall_seconds"], rel=1e-6)
