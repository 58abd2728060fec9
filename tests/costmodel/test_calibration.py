"""Calibration: factors that are known come back, refusals, files, what a job's ``calibration`` does to its answer."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import constants
from costmodel.calibration import Calibration, MeasuredStep, Style, fit
from costmodel.errors import CostModelError
from costmodel.estimation import estimate, measured_step
from costmodel.report import to_text
from costmodel.stored_calibrations import (
    calibration_from_mapping,
    calibrations_folder,
    default_path,
    read_calibration,
    write_calibration,
)

JOB: dict[str, Any] = {
    "model": "mistralai/Mixtral-8x7B-v0.1",
    "gpu": "A40",
    "method": "qlora",
    "quantization": "nf4",
    "lora_r": 16,
    "lora_target_modules": ("w1", "w2", "w3", "gate"),
    "dtype": "bfloat16",
    "bf16": True,
    "gradient_checkpointing": True,
    "max_length": 1024,
    "lengths": {"dataset": "math_14k"},
    "num_samples": 1000,
    "framework": "transformers",
    "framework_version": "4.40",
}
DENSE: dict[str, Any] = {**JOB, "model": "meta-llama/Llama-2-7b-hf", "lora_target_modules": ("q_proj", "v_proj")}


def slowed(batch_size: int, device: float, host: float, job: dict[str, Any] = JOB, **fields: Any) -> MeasuredStep:
    """A step that takes what the model says with these factors."""
    fields = {**job, "per_device_train_batch_size": batch_size, **fields}
    step = measured_step(fields, 1.0, f"batch {batch_size}")
    return dataclasses.replace(step, seconds=step.predicted_seconds(device, host))


def fitted(*steps: MeasuredStep) -> Calibration:
    return fit(steps, created_on="2026-09-30", ftcost_version="0.1.0")


@settings(max_examples=15, deadline=None)
@given(device=st.floats(0.7, 1.8), host=st.floats(0.7, 1.8))
def test_two_batches_give_back_the_factors(device: float, host: float) -> None:
    """Within what holding them loosely at 1 costs."""
    calibration = fitted(slowed(1, device, host), slowed(8, device, host))
    assert calibration.num_factors == 2
    assert calibration.device_factor == pytest.approx(device, rel=0.06)
    assert calibration.host_factor == pytest.approx(host, rel=0.06)


@given(factor=st.floats(0.3, 3.0))
@settings(max_examples=10, deadline=None)
def test_equal_factors_scale_the_step(factor: float) -> None:
    step = slowed(4, 1.0, 1.0)
    assert step.predicted_seconds(factor, factor) == pytest.approx(factor * step.seconds, rel=1e-12)


def test_steps_that_scatter_too_much_give_one_factor() -> None:
    """Batches of 1 and 8 tell the two apart while each is good to a few per cent, and no longer at 30 %."""

    def of(scatter: float) -> Calibration:
        return fitted(*(dataclasses.replace(slowed(size, 1.4, 0.9), scatter=scatter) for size in (1, 8)))

    assert of(0.02).num_factors == 2
    noisy = of(0.3)
    assert (noisy.num_factors, noisy.error) == (1, None)
    assert 0.9 < noisy.device_factor < 1.4
    assert "scattered too much" in noisy.sentence()


def test_a_step_that_scatters_counts_for_less() -> None:
    """Of three batches the middle one is half as fast as the others say: by how well it is known."""
    small, large = slowed(1, 1.2, 1.2), slowed(16, 1.2, 1.2)
    odd = slowed(6, 2.4, 2.4)
    sure, unsure = (fitted(small, dataclasses.replace(odd, scatter=scatter), large) for scatter in (0.0, 0.4))
    assert unsure.device_factor == pytest.approx(1.2, rel=0.05)
    assert sure.device_factor > 1.1 * unsure.device_factor
    assert unsure.error is not None
    assert unsure.error >= 1.28 * 0.4 / math.sqrt(3)  # no better known than the steps it was fitted on


def test_one_batch_gives_one_factor_and_no_error_of_its_own() -> None:
    calibration = fitted(slowed(4, 1.3, 1.3))
    assert (calibration.num_factors, calibration.error) == (1, None)
    assert calibration.device_factor == calibration.host_factor == pytest.approx(1.3)


@pytest.mark.parametrize("gpu", ["A40", "B200"])
@pytest.mark.parametrize(("small", "large"), [(1, 2), (4, 8), (8, 16)])
def test_neighbouring_batches_are_refused_and_told_what_to_measure(small: int, large: int, gpu: str) -> None:
    """Whatever bounds the step: a rule that people can know beforehand."""
    with pytest.raises(
        CostModelError, match=r"are neighbours: .*measure the smallest batch and (one of at least|the largest)"
    ):
        fitted(slowed(small, 1.0, 1.0, gpu=gpu), slowed(large, 1.0, 1.0, gpu=gpu))


@pytest.mark.parametrize("gpu", ["A40", "B200", "H100 SXM", "RTX 4090"])
@pytest.mark.parametrize("large", [3, 12, 64])
def test_batches_far_apart_are_never_refused(large: int, gpu: str) -> None:
    calibration = fitted(slowed(1, 1.2, 1.2, gpu=gpu), slowed(large, 1.2, 1.2, gpu=gpu))
    assert calibration.device_factor == pytest.approx(1.2, rel=0.06)
    if calibration.num_factors == 1:  # bound alike from end to end
        assert calibration.error is None
        assert "bound by the same thing" in calibration.sentence()
    assert "measure the smallest" not in calibration.sentence()


@pytest.mark.parametrize(
    ("num_params", "text"), [(6.6e9, "6.6b"), (494e6, "0.5b"), (14e6, "14m"), (90_000, "90k"), (1.2e12, "1200.0b")]
)
def test_file_names_say_a_size_that_is_not_nothing(num_params: float, text: str) -> None:
    calibration = dataclasses.replace(fitted(slowed(4, 1.0, 1.0)), num_active_params_high=int(num_params))
    assert Path(default_path(calibration)).name.endswith(f"-{text}.json")


def test_the_same_batch_twice_is_one_batch() -> None:
    steps = slowed(4, 1.2, 1.2), dataclasses.replace(slowed(4, 1.2, 1.2), source="again")
    assert fitted(*steps).num_factors == 1


def test_steps_that_were_not_run_alike_are_refused() -> None:
    with pytest.raises(CostModelError, match=r"not run alike \(gpu A40 against L40S\)"):
        fitted(slowed(1, 1.0, 1.0), slowed(8, 1.0, 1.0, gpu="L40S"))


def written(tmp_path: Path, *steps: MeasuredStep) -> str:
    path = str(tmp_path / "calibration.json")
    write_calibration(path, fitted(*steps))
    return path


def test_a_file_holds_the_whole_calibration(tmp_path: Path) -> None:
    calibration = fitted(slowed(1, 1.1, 0.9), slowed(8, 1.1, 0.9))
    path = written(tmp_path, slowed(1, 1.1, 0.9), slowed(8, 1.1, 0.9))
    assert read_calibration(path) == calibration
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    assert content["schema_version"] == 1
    assert content["style"]["gpu"] == "A40"
    assert content["constants_version"] == constants.CONSTANTS_VERSION
    assert len(Path(path).read_bytes()) < 2000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"device_factor": 0.0}, "device_factor must lie between", id="zero"),
        pytest.param({"host_factor": "fast"}, "holds no calibration", id="text"),
        pytest.param({"error": -0.1}, "error must be a share", id="error"),
        pytest.param({"num_tokens_low": math.nan}, "num_tokens_low must be a finite number", id="nan"),
        pytest.param({"num_sequences_high": "many"}, "holds no calibration", id="sequences"),
        pytest.param({"num_active_params_low": math.inf}, "holds no calibration", id="infinite"),
        pytest.param({"style": {"gpu": "A40"}}, "holds no calibration", id="style"),
    ],
)
def test_a_mapping_that_is_no_calibration_is_refused(change: dict[str, Any], message: str) -> None:
    whole = fitted(slowed(4, 1.0, 1.0)).to_dict()
    with pytest.raises(CostModelError, match=message):
        calibration_from_mapping({**whole, **change})


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match="ftcost calibrate RUN"):
        estimate({**JOB, "calibration": str(tmp_path / "none.json")})


def test_the_answer_uses_and_names_the_calibration(tmp_path: Path) -> None:
    path = written(tmp_path, slowed(1, 1.4, 1.2), slowed(8, 1.4, 1.2))
    plain = estimate(JOB, per_device_train_batch_size=4)
    answer = estimate(JOB, per_device_train_batch_size=4, calibration=path)
    truth = slowed(4, 1.4, 1.2).seconds
    assert plain.calibration is None
    assert plain.step_seconds is not None
    assert answer.step_seconds == pytest.approx(truth, rel=0.02)
    assert answer.calibration is not None
    assert answer.calibration["file"] == path
    assert answer.calibration["is_inside_range"] is True
    assert answer.calibration["error"] == constants.CALIBRATED_STEP_INTERVAL
    # inside the range the interval is the calibration's own error
    assert answer.step_seconds_high is not None
    assert answer.step_seconds_high / answer.step_seconds == pytest.approx(math.exp(constants.CALIBRATED_STEP_INTERVAL))
    # the groups still sum to the step, and the run follows it
    assert answer.step is not None
    assert sum(answer.step.by_group_seconds.values()) == pytest.approx(answer.step_seconds)
    assert answer.total_seconds is not None
    assert plain.total_seconds is not None
    assert answer.total_seconds > 1.15 * plain.total_seconds


def test_outside_the_range_the_interval_stays_wide(tmp_path: Path) -> None:
    path = written(tmp_path, slowed(1, 1.2, 1.2), slowed(8, 1.2, 1.2))

    def width(**fields: Any) -> float:
        answer = estimate(JOB, **fields)
        assert answer.step_seconds_high is not None
        assert answer.step_seconds is not None
        return answer.step_seconds_high / answer.step_seconds

    wide = width(per_device_train_batch_size=32)
    assert width(per_device_train_batch_size=32, calibration=path) == pytest.approx(wide)
    assert width(per_device_train_batch_size=4, calibration=path) < width(per_device_train_batch_size=4)


def test_one_factor_keeps_the_interval(tmp_path: Path) -> None:
    path = written(tmp_path, slowed(4, 1.3, 1.3))
    plain, answer = estimate(JOB), estimate(JOB, calibration=path)
    for name in ("step_seconds", "step_seconds_low", "step_seconds_high"):
        assert getattr(answer, name) == pytest.approx(1.3 * getattr(plain, name))


def test_another_card_does_not_use_it_and_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, slowed(4, 1.3, 1.3))
    answer = estimate(JOB, gpu="L40S", calibration=path)
    assert answer.calibration is None
    assert answer.step_seconds == estimate(JOB, gpu="L40S").step_seconds
    assert any("is not used" in warning and "gpu A40 against L40S" in warning for warning in answer.warnings)


def test_auto_finds_the_users_own_that_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOST_CONFIG_DIR", str(tmp_path))
    nothing = estimate(JOB, calibration="auto")
    assert nothing.calibration is None
    assert any("calibration auto: none" in warning for warning in nothing.warnings)

    mixtral = fitted(slowed(1, 1.2, 1.2), slowed(8, 1.2, 1.2))
    dense = fitted(slowed(4, 1.7, 1.7, DENSE))
    paths = [default_path(calibration) for calibration in (mixtral, dense)]
    assert paths[0] != paths[1]
    for path, calibration in zip(paths, (mixtral, dense), strict=True):
        write_calibration(path, calibration)
    (Path(calibrations_folder()) / "broken.json").write_text("{", encoding="utf-8")
    answer = estimate(JOB, calibration="auto")
    assert answer.calibration is not None
    assert answer.calibration["file"] == paths[0]
    assert any("broken.json" in warning for warning in answer.warnings)
    assert estimate(JOB).calibration is None  # only when asked


def test_an_older_fit_says_that_the_constants_changed() -> None:
    old = dataclasses.replace(fitted(slowed(4, 1.1, 1.1)), constants_version="2020.01")
    answer = estimate(JOB, calibration=old.to_dict())
    assert any("fitted with constants 2020.01" in warning for warning in answer.warnings)
    assert answer.calibration is not None
    assert answer.calibration["file"] is None


def test_the_resolved_job_can_be_estimated_again(tmp_path: Path) -> None:
    path = Path(written(tmp_path, slowed(1, 1.4, 1.2), slowed(8, 1.4, 1.2)))
    answer = estimate(JOB, calibration=path)  # a path object is taken as well
    assert answer.job["calibration"] == str(path)
    assert estimate(answer.job).step_seconds == answer.step_seconds


def test_a_dense_model_has_no_style_of_experts() -> None:
    step = slowed(1, 1.0, 1.0, DENSE)
    style = Style.of(step.model, step.job, step.gpu)
    assert style.experts is None
    assert style.kind == "nf4"


def test_the_text_names_the_calibration_in_use(tmp_path: Path) -> None:
    path = written(tmp_path, slowed(1, 1.2, 0.9), slowed(8, 1.2, 0.9))
    inside = to_text(estimate({**JOB, "per_device_train_batch_size": 4, "calibration": path}))
    assert re.search(rf"calibration +{re.escape(path)}, of 2026-09-30: device x 1\.\d\d, host x 0\.9\d\n", inside)
    outside = to_text(estimate({**JOB, "per_device_train_batch_size": 64, "calibration": path}))
    assert "; this job is outside what was measured\n" in outside
    assert "calibration  " not in to_text(estimate({**JOB, "per_device_train_batch_size": 4}))
