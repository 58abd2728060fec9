"""Probe this CPU, predict small fine-tunings, run them, and hold the two against each other: docs/cpu_proof.md.

    python benchmarks/cpu_proof.py [--json FILE] [--markdown FILE] [--clock processor|wall] [--threads 1]
                                   [--shapes report|choose] [--only llama-full ...] [--most-tokens 1024]

Each case is a real Trainer with FTCostCallback on a random model. It is predicted with a probe taken shortly before it, which
never sees the run: ``uncalibrated``. Then the first 20 steps calibrate the model, and the 30 after them are predicted:
``after 20 steps``. ``projection`` is what the callback itself expected of the remaining steps at step 20. Lengths vary from
half to the whole of the case's, so that the steps after the first 20 hold other tokens.

The machine's own speed moves, so it is measured beside every row, by rules that stand here and not in the results:

- A :class:`Reference`, the same 1 ms of work each time, is run before and after each probe, before and after each run, and before
  each step, where it is hidden from the clock of the run. ``drift to the run``: its median around the run over that around
  the probe. ``drift after 20``: its median from step 21 on over that before. Inside a Trainer small operators take longer than
  outside at any speed, so the two places are never held against each other.
- The last 15 steps hold the very batches of the 15 before them. ``repeat`` is what they took over what those took: no
  prediction can be better than that, so it is the noise floor of the 5 % bar.
- All rows are in the figures. ``steady rows`` are those whose reference moved by no more than ``STEADY``
  (cpu_proof_page.py, which makes figures and page), ``rows that repeat`` those whose ``repeat`` is within the bar (bursts of a few steps move the mean and not the reference); ``drift taken out``
  multiplies each prediction by the drift, that is, asks what a machine of constant speed would have shown.

``--clock processor`` (default) counts the seconds that a processor worked for us, in the probe and in the run: on a shared
machine the clock on the wall tells about its neighbours. With one thread and no neighbours the two are the same.
``--shapes choose`` are the models that the hand counts and constants were chosen on; the report's are others.
"""

# ruff: noqa: E501 (dictionaries and printed lines kept whole)
from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cpu_proof_page import markdown, summary

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

CALIBRATION_STEPS = 20
REPEATED_STEPS = 15  # the last ones, on the batches of as many before them
STEPS = CALIBRATION_STEPS + 2 * REPEATED_STEPS
WARM_UP_STEPS = 2  # left out, as ftcost calibrate leaves them out
REFERENCES = 20  # before a probe or a run, and as many after it
FAMILIES = ("llama", "mixtral", "qwen3_moe")
METHODS = ("full", "lora")
BATCHES, LENGTHS = (1, 4, 16), (64, 256, 512)
MOST_TOKENS = 1024  # of a micro-batch; more takes too long here
SHAPES: dict[str, dict[str, Any]] = {
    "report": {
        "shared": {
            "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "pad_token_id": 0,
        },
        "llama": {"intermediate_size": 768},
        "mixtral": {"intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2},
        "qwen3_moe": {"moe_intermediate_size": 192, "num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 768},
    },
    "choose": {
        "shared": {
            "vocab_size": 2048, "hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6,
            "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 1024, "pad_token_id": 0,
        },
        "llama": {"intermediate_size": 512},
        "mixtral": {"intermediate_size": 384, "num_local_experts": 8, "num_experts_per_tok": 2},
        "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 512},
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    family: str
    method: str
    batch: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.family}-{self.method}"


class Rows:
    """Random token ids, from half of ``length`` to all of it, in the order of the steps; the last batches come twice."""

    def __init__(self, case: Case, vocabulary: int) -> None:
        chosen = random.Random(17)
        number = case.batch * (STEPS - REPEATED_STEPS)
        lengths = [chosen.randint(case.length // 2, case.length) for _ in range(number)]
        self._rows = [self._row(place, length, vocabulary) for place, length in enumerate(lengths)]
        self._rows += self._rows[-case.batch * REPEATED_STEPS :]

    @staticmethod
    def _row(place: int, length: int, vocabulary: int) -> dict[str, list[int]]:
        ids = [1 + (7 * place + 13 * position) % (vocabulary - 1) for position in range(length)]
        return {"input_ids": ids, "labels": ids}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        return self._rows[place]


class Reference:
    """The same work each time, 1 ms: a product, element-wise passes, small operators. No random number.

    Each is done twice and the second time counts, and all of it stays in a core's own cache: so it tells how fast the
    processor is, whatever the run has left in the caches. What neighbours take of the memory's rate it does not see.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        import torch

        self._clock = clock
        self.hidden_seconds = 0.0  # that all of them took
        self._square, self._product = torch.full((320, 320), 0.5), torch.empty(320, 320)
        self._long, self._sum = torch.full((2**15,), 0.5), torch.empty(2**15)
        self._small = torch.full((8,), 0.5)
        for _ in range(20):
            self.seconds()

    def seconds(self) -> tuple[float, float, float]:
        """(product, element-wise, operators), each once to have it in the caches as it is in a tight loop, and once measured."""
        begun = self._clock()
        seconds = self._twice(self._multiply), self._twice(self._pass), self._twice(self._dispatch)
        self.hidden_seconds += self._clock() - begun
        return seconds

    def several(self) -> list[tuple[float, float, float]]:
        return [self.seconds() for _ in range(REFERENCES)]

    def _twice(self, work: Callable[[], None]) -> float:
        import torch

        with torch.no_grad():
            work()
            before = self._clock()
            work()
            return self._clock() - before

    def _multiply(self) -> None:
        import torch

        torch.mm(self._square, self._square, out=self._product)

    def _pass(self) -> None:
        import torch

        for _ in range(30):
            torch.mul(self._long, self._long, out=self._sum)

    def _dispatch(self) -> None:
        for _ in range(250):
            self._small + self._small


Measured = list[tuple[float, float, float]]


def drift(now: Measured, before: Measured) -> float:
    """How much slower the reference is than it was: each part by its median, the parts by their geometric mean; 0 is none."""
    parts = range(len(now[0]))
    ratios = [
        statistics.median(each[part] for each in now) / statistics.median(each[part] for each in before) for part in parts
    ]
    return statistics.geometric_mean(ratios) - 1


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    import torch

    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, fill: int) -> Any:
        return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def make_model(case: Case, shapes: dict[str, Any]) -> Any:
    import torch
    import transformers

    torch.manual_seed(17)
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[case.family]
    made = model(config(**shapes["shared"], **shapes[case.family]))
    if case.method == "full":
        return made
    from peft import LoraConfig, get_peft_model

    return get_peft_model(made, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


def run(
    case: Case,
    shapes: dict[str, Any],
    probed: dict[str, Any],
    at_probe: Measured,
    reference: Reference,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """One training, what was predicted of it, and how the machine's own speed moved meanwhile."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from costmodel.calibration import fit
    from ftcost_callback import FTCostCallback
    from ftcost_callback.calibrating import steady_steps, steps_of_run
    from ftcost_callback.run_file import read_run
    from ftcost_callback.sinks import InMemorySink

    class Beside(TrainerCallback):
        """Measures the reference before each step, and the step by the clock on the wall."""

        def __init__(self) -> None:
            self.references: Measured = []
            self.wall_seconds: list[float] = []
            self._begun = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.references.append(reference.seconds())
            self._begun = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.wall_seconds.append(time.perf_counter() - self._begun)

    beside, sink = Beside(), InMemorySink()
    with tempfile.TemporaryDirectory() as folder:
        callback = FTCostCallback(gpu=probed, sinks=[sink])
        # the record and the projection are then in the same seconds as the probe, and know of no reference
        callback._clock = lambda: clock() - reference.hidden_seconds
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=case.batch, max_steps=STEPS, logging_steps=CALIBRATION_STEPS,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, seed=17, train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer = Trainer(
            model=make_model(case, shapes), args=arguments, train_dataset=Rows(case, shapes["shared"]["vocab_size"]),
            data_collator=collate, callbacks=[callback, beside],
        )  # fmt: skip
        trainer.remove_callback(_printer(trainer))
        around = reference.several()
        trainer.train()
        around += reference.several()
        record = read_run(folder)
    first = sink.predictions[0].estimate
    steady = steady_steps(record.steps)
    measured = mean_seconds(steady)
    # the same tokens: the prediction is of the data set's mean batch, the run of the batches it drew
    seen = estimate_on_tokens(record.sessions[-1].job, steady, case)
    early = dataclasses.replace(record, steps=record.steps[:CALIBRATION_STEPS])
    late = record.steps[CALIBRATION_STEPS:]
    calibration = fit(steps_of_run(early), created_on="", ftcost_version="")
    after = estimate_on_tokens({**record.sessions[-1].job, "calibration": calibration.to_dict()}, late, case)
    at_20 = next(window for window in sink.windows if window.global_step == CALIBRATION_STEPS)
    projected = at_20.remaining_seconds
    to_the_run = drift(around, at_probe)
    after_20 = drift(beside.references[CALIBRATION_STEPS:], beside.references[WARM_UP_STEPS:CALIBRATION_STEPS])
    first_time, second_time = late[:REPEATED_STEPS], late[REPEATED_STEPS:]
    tokens = [[step.num_tokens for step in steps] for steps in (first_time, second_time)]
    assert tokens[0] == tokens[1], "the repeated steps hold other batches"
    return {
        "family": case.family, "method": case.method, "batch": case.batch, "length": case.length,
        "tokens_per_step": statistics.mean(step.num_tokens or 0 for step in steady),
        "measured_step_seconds": measured,
        "measured_wall_step_seconds": statistics.median(beside.wall_seconds[WARM_UP_STEPS:]),
        "predicted_step_seconds": first["step_seconds"],
        "uncalibrated_error": first["step_seconds"] / measured - 1,
        "uncalibrated_error_on_the_tokens_seen": seen / measured - 1,
        "after_20_steps_error": after / mean_seconds(late) - 1,
        "projection_error": projected / sum(step.step_seconds for step in late) - 1 if projected else None,
        "repeat_error": mean_seconds(second_time) / mean_seconds(first_time) - 1,
        "drift_to_the_run": to_the_run,
        "drift_after_20": after_20,
        "num_factors": calibration.num_factors,
        "by_group_seconds": first["step"]["by_group_seconds"],
        "step_seconds": [step.step_seconds for step in record.steps],
        "references": {"at_probe": at_probe, "around_run": around, "before_steps": beside.references},
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


def mean_seconds(steps: list[Any]) -> float:
    return statistics.mean(step.step_seconds for step in steps)


def estimate_on_tokens(job: dict[str, Any], steps: list[Any], case: Case) -> float:
    from costmodel.described_job import TokensSeen
    from costmodel.estimation import estimate_from_tokens

    number = len(steps)
    seen = TokensSeen(
        num_sequences=case.batch,
        num_tokens=sum(step.num_tokens for step in steps) / number,
        num_non_padding_tokens=sum(step.num_non_padding_tokens for step in steps) / number,
        sum_squared_sequence_tokens=sum(step.num_tokens**2 for step in steps) / number / case.batch,
        longest_tokens=case.length,
    )
    predicted = estimate_from_tokens(job, seen).step_seconds
    assert predicted is not None
    return predicted


def _printer(trainer: Any) -> Any:
    from transformers import PrinterCallback

    return next((each for each in trainer.callback_handler.callbacks if isinstance(each, PrinterCallback)), PrinterCallback)


def cases(only: list[str] | None, most_tokens: int) -> Iterator[Case]:
    """By size, so that models of each kind are run soon after one probe."""
    for batch, length in sorted(itertools.product(BATCHES, LENGTHS), key=math.prod):
        for family, method in itertools.product(FAMILIES, METHODS):
            case = Case(family, method, batch, length)
            if batch * length <= most_tokens and (not only or case.name in only):
                yield case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", choices=["processor", "wall"], default="processor")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--probe-seconds", type=float, default=5.0)
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="report")
    parser.add_argument("--only", nargs="*", help="such as llama-full")
    parser.add_argument("--most-tokens", type=int, default=MOST_TOKENS, help="of a micro-batch")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if options.clock == "processor" and options.threads != 1:
        parser.error("the processor's time of several threads is their sum: --clock wall, or --threads 1")

    import torch
    import transformers

    from ftcost_callback.live_device import device_facts
    from ftcost_callback.probe import probe_cpu

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "processor" else time.perf_counter
    load_at_begin = os.getloadavg()[0]
    reference = Reference(clock)
    rows: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []
    probed_for: tuple[int, int, str] | None = None
    at_probe: Measured = []
    facts = device_facts("cpu")
    for case in cases(options.only, options.most_tokens):
        if probed_for != (case.batch, case.length, case.family):
            at_probe = reference.several()
            probes.append(
                probe_cpu(seconds=options.probe_seconds, num_threads=options.threads, clock=clock, say=lambda line: None)
            )
            at_probe += reference.several()
            probed_for = (case.batch, case.length, case.family)
        row = run(case, SHAPES[options.shapes], probes[-1], at_probe, reference, clock)
        rows.append(row)
        print(
            f"{case.name:14} {case.batch:2} x {case.length:3}: {row['measured_step_seconds'] * 1e3:7.1f} ms, "
            f"uncalibrated {row['uncalibrated_error']:+.1%} (drift {row['drift_to_the_run']:+.1%}), "
            f"after 20 {row['after_20_steps_error']:+.1%} (drift {row['drift_after_20']:+.1%}, repeat {row['repeat_error']:+.1%}), "
            f"projection {row['projection_error'] or 0:+.1%}, load {row['load_average']:.1f}",
            file=sys.stderr,
            flush=True,
        )
        answer = {
            "date": datetime.date.today().isoformat(),
            "machine": {
                "processor": facts.get("name", platform.processor()), "processors": os.cpu_count(), "torch": torch.__version__,
                "transformers": transformers.__version__, "load_at_begin": load_at_begin, "load_at_end": os.getloadavg()[0],
            },
            "clock": options.clock, "threads": options.threads, "steps": STEPS, "calibration_steps": CALIBRATION_STEPS,
            "shapes": options.shapes,
            "summary": summary(rows), "rows": rows, "probes": probes,
        }  # fmt: skip
        if options.json:
            options.json.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
        if options.markdown:  # written after each row: a run that is broken off still tells
            options.markdown.write_text(markdown(answer), encoding="utf-8")
    print(markdown(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
