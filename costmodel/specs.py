"""What comes in: the job, the GPU, the price. Frozen pydantic records; an unknown field is refused with the nearest name.

Field names are those of ``TrainingArguments``, TRL's ``SFTConfig`` / ``ModelConfig`` and ``BitsAndBytesConfig``.
``None`` means "not said": :mod:`costmodel.defaults` fills it with the framework's own default and names it in the answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from costmodel.errors import CostModelError, UnknownNameError

SCHEMA_VERSION: Final = 1

Method = Literal["full", "lora", "qlora"]
Quantization = Literal["nf4", "fp4", "int8", "gptq-int4", "awq-int4", "mxfp4", "fp8"]
Framework = Literal["transformers", "trl", "unsloth", "litgpt", "torchtune", "axolotl", "llamafactory", "other"]
Tier = Literal["on_demand", "spot", "reserved", "community"]
Dtype = Literal["float32", "bfloat16", "float16"]

_DTYPE_ALIASES: Final = {
    "fp32": "float32",
    "float": "float32",
    "torch.float32": "float32",
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "torch.float16": "float16",
}

# transformers' names (`OptimizerNames`, 5.24), with the short forms people type.
OPTIMIZERS: Final = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_apex_fused",
    "adamw_anyprecision",
    "adamw_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "sgd",
    "adafactor",
    "adagrad",
    "rmsprop",
    "lion_32bit",
    "lion_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
)


class Record(BaseModel):
    """A frozen record that refuses unknown fields and names the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        known = set(cls.model_fields)
        known |= {field.alias for field in cls.model_fields.values() if field.alias}
        known |= cls._accepted_aliases()
        for name in value:
            if name not in known:
                raise UnknownNameError(f"{cls.__name__} field", name, known)
        return value

    @classmethod
    def _accepted_aliases(cls) -> set[str]:
        return set()


class GpuSpec(Record):
    """One product's data sheet. Rates are dense (no sparsity) and per second; unknown is ``None``.

    ``memory_bytes`` is the capacity the driver reports, which is below the marketed size. ``measured_*`` is the best
    rate a large matmul was seen to reach; ``seconds_per_operator`` is only set for a device that was probed.
    """

    name: str
    nvml_names: tuple[str, ...] = ()
    vendor: str = "NVIDIA"
    architecture: str = ""
    compute_capability: str = ""
    memory_bytes: int = Field(gt=0)
    memory_is_marketed: bool = False
    memory_bandwidth_bytes_per_second: float = Field(gt=0)
    peak_bf16_flops_per_second: float | None = Field(default=None, gt=0)
    peak_fp16_flops_per_second: float | None = Field(default=None, gt=0)
    peak_fp32_flops_per_second: float | None = Field(default=None, gt=0)
    peak_tf32_flops_per_second: float | None = Field(default=None, gt=0)
    peak_fp8_flops_per_second: float | None = Field(default=None, gt=0)
    tdp_watts: float | None = Field(default=None, gt=0)
    l2_cache_bytes: int | None = Field(default=None, gt=0)
    measured_bf16_matmul_flops_per_second: float | None = Field(default=None, gt=0)
    measured_fp32_matmul_flops_per_second: float | None = Field(default=None, gt=0)
    seconds_per_operator: float | None = Field(default=None, gt=0)
    source: str = ""
    notes: str = ""


class Price(Record):
    """What one hour of one GPU costs, from whom and since when. ``usd_per_instance_hour`` is what is billed."""

    usd_per_gpu_hour: float = Field(gt=0)
    usd_per_instance_hour: float = Field(gt=0)
    gpus_per_instance: int = Field(default=1, ge=1)
    gpu: str = ""
    cloud: str = ""
    product: str = ""
    region: str = ""
    tier: str = "on_demand"
    source: str = ""
    as_of: str = ""
    note: str = ""

    @field_validator("usd_per_gpu_hour", "usd_per_instance_hour")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("a price must be a finite number of dollars; leave it out if it is not known")
        return value


class Lengths(Record):
    """Tokens per sample: exactly one of the ways to say it. Lengths above ``max_length`` are cut (and reported)."""

    fixed: int | None = Field(default=None, ge=1)
    mean: float | None = Field(default=None, gt=0)
    max: int | None = Field(default=None, ge=1)
    values: tuple[int, ...] | None = Field(default=None, min_length=1)
    histogram: dict[int, float] | None = Field(default=None, min_length=1)
    dataset: str | None = None
    file: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Lengths:
        given = [
            name for name in ("fixed", "mean", "values", "histogram", "dataset", "file") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError(
                "lengths takes exactly one of fixed, mean (with max), values, histogram, dataset, file; "
                f"got {', '.join(given) or 'none of them'}"
            )
        if self.mean is not None and self.max is None:
            raise ValueError("lengths with a mean also needs max, the longest sample in tokens")
        if self.mean is not None and self.max is not None and self.mean > self.max:
            raise ValueError(f"lengths: mean {self.mean:g} is above max {self.max}")
        if self.max is not None and self.mean is None:
            raise ValueError("lengths: max goes with mean")
        if self.values is not None and min(self.values) < 1:
            raise ValueError(f"lengths: every value must be at least 1 token, got {min(self.values)}")
        if self.histogram is not None:
            for length, count in self.histogram.items():
                if length < 1:
                    raise ValueError(f"lengths: every length must be at least 1 token, got {length}")
                if not (math.isfinite(count) and count >= 0):
                    raise ValueError(f"lengths: the count of length {length} must be a number >= 0, got {count}")
            if not sum(self.histogram.values()) > 0:
                raise ValueError("lengths: the histogram holds no samples")
        return self


class Job(Record):
    """One fine-tuning run, as the user describes it. See ``docs/job.md`` for each field's meaning and default."""

    schema_version: Literal[1] = 1

    # the model
    model: str | dict[str, Any]
    model_overrides: dict[str, Any] = Field(default_factory=dict)

    # the machine
    gpu: str | GpuSpec | None = None
    num_gpus: int = Field(default=1, ge=1)

    # method and quantisation
    method: Method | None = None
    quantization: Quantization | None = None
    double_quant: bool | None = None
    prepare_model_for_kbit_training: bool | None = None

    # LoRA
    lora_r: int | None = Field(default=None, ge=1)
    lora_alpha: float | None = Field(default=None, gt=0)
    lora_dropout: float | None = Field(default=None, ge=0, lt=1)
    lora_target_modules: str | tuple[str, ...] | None = None
    lora_target_parameters: tuple[str, ...] | None = None
    lora_modules_to_save: tuple[str, ...] | None = None
    use_dora: bool = False
    use_rslora: bool = False
    adapter_dtype: Dtype | None = None

    # precision
    dtype: Dtype | None = None
    bf16: bool | None = None
    fp16: bool | None = None

    # batch, attention, optimizer, kernels
    per_device_train_batch_size: int | None = Field(default=None, ge=1)
    gradient_accumulation_steps: int | None = Field(default=None, ge=1)
    gradient_checkpointing: bool | None = None
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None = None
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] | None = None
    optim: str | None = None
    torch_compile: bool | None = None
    use_liger_kernel: bool | None = None
    fused_loss: Literal["chunked", "fused"] | None = None
    loss_type: str | None = None
    use_cache: bool | None = None
    logits_to_keep: int | None = Field(default=None, ge=0)
    activation_offloading: bool | None = None
    fsdp: str | dict[str, Any] | None = None
    deepspeed: str | dict[str, Any] | None = None

    # data
    max_length: int | None = Field(default=None, ge=1)
    packing: bool | None = None
    padding_free: bool | None = None
    padding: Literal["longest", "max_length"] | None = None
    pad_to_multiple_of: int | None = Field(default=None, ge=1)
    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] | None = None
    lengths: Lengths | None = None
    supervised_fraction: float | None = Field(default=None, gt=0, le=1)
    num_samples: int | None = Field(default=None, ge=1)

    # duration
    num_train_epochs: float | None = Field(default=None, gt=0)
    max_steps: int | None = Field(default=None, ge=-1)
    eval_strategy: Literal["no", "steps", "epoch"] | None = None
    eval_steps: float | None = Field(default=None, gt=0)
    per_device_eval_batch_size: int | None = Field(default=None, ge=1)
    num_eval_samples: int | None = Field(default=None, ge=1)
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = None
    save_steps: float | None = Field(default=None, gt=0)
    save_only_model: bool | None = None

    # the software
    framework: Framework | None = None
    framework_version: str | None = None

    # what was measured before: a file of `ftcost calibrate`, its content, or "auto" (the user's own that match)
    calibration: str | dict[str, Any] | None = None

    # money
    usd_per_gpu_hour: float | None = None
    cloud: str | None = None
    tier: Tier | None = None

    @classmethod
    def _accepted_aliases(cls) -> set[str]:
        return set(_JOB_ALIASES)

    @model_validator(mode="before")
    @classmethod
    def _read_aliases(cls, value: Any) -> Any:
        """bitsandbytes' and older transformers' names, translated to the contract's."""
        if not isinstance(value, Mapping):
            return value
        fields = dict(value)
        if fields.pop("load_in_4bit", None):
            fields.setdefault("quantization", fields.get("bnb_4bit_quant_type") or "fp4")
            fields.setdefault("double_quant", bool(fields.get("bnb_4bit_use_double_quant", False)))
        if fields.pop("load_in_8bit", None):
            fields.setdefault("quantization", "int8")
        if "bnb_4bit_use_double_quant" in fields:
            fields.setdefault("double_quant", bool(fields["bnb_4bit_use_double_quant"]))
        fields.pop("bnb_4bit_quant_type", None)
        fields.pop("bnb_4bit_use_double_quant", None)
        if "torch_dtype" in fields:
            fields.setdefault("dtype", fields.pop("torch_dtype"))
            fields.pop("torch_dtype", None)
        return fields

    @field_validator("dtype", "adapter_dtype", mode="before")
    @classmethod
    def _long_dtype_name(cls, value: Any) -> Any:
        return _DTYPE_ALIASES.get(str(value), value) if value is not None else None

    @field_validator("calibration", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("optim")
    @classmethod
    def _known_optimizer(cls, value: str | None) -> str | None:
        if value is not None and value not in OPTIMIZERS:
            raise UnknownNameError("optimizer", value, OPTIMIZERS)
        return value

    @field_validator("usd_per_gpu_hour")
    @classmethod
    def _sensible_price(cls, value: float | None) -> float | None:
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"usd_per_gpu_hour must be a positive number of dollars, got {value}; leave it out for hours only"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both true; autocast has one type, set one of them")
        if self.method == "qlora" and self.dtype == "float32" and self.quantization is None:
            raise ValueError("method qlora needs a quantization (nf4, fp4, int8, gptq-int4, awq-int4, mxfp4, fp8)")
        if self.method == "full" and self.quantization in {"nf4", "fp4", "int8", "gptq-int4", "awq-int4"}:
            raise ValueError(
                f"a base quantised to {self.quantization} cannot be fully fine-tuned; use method qlora, or no quantization"
            )
        if self.num_train_epochs is not None and not math.isfinite(self.num_train_epochs):
            raise ValueError(f"num_train_epochs must be a finite number, got {self.num_train_epochs}")
        return self


# Accepted on input beside the contract's own names.
_JOB_ALIASES: Final = (
    "load_in_4bit",
    "load_in_8bit",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "torch_dtype",
)


def parse_job(value: Job | Mapping[str, Any]) -> Job:
    """A :class:`Job` from a mapping. Raises :class:`CostModelError` with one line for each fault."""
    if isinstance(value, Job):
        return value
    if not isinstance(value, Mapping):
        raise CostModelError(f"a job is a mapping of field names to values, got {type(value).__name__}")
    job: Job = _validated(Job, value)
    return job


def parse_gpu(value: GpuSpec | Mapping[str, Any]) -> GpuSpec:
    """A :class:`GpuSpec` from a mapping (a probed or hand-described device)."""
    return value if isinstance(value, GpuSpec) else _validated(GpuSpec, value)


def _validated(kind: type[Any], value: Mapping[str, Any]) -> Any:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise CostModelError("; ".join(_one_line(fault) for fault in error.errors())) from None


def _one_line(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    if "input" in fault and fault["type"] not in {"value_error", "missing"} and not isinstance(fault["input"], dict):
        message += f", got {fault['input']!r}"
    return f"{where}: {message}" if where else message
