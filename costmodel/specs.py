"""What comes in: the job, the GPU, the price. Frozen pydantic records; an unknown field is refused with the nearest name.

Field names are those of ``TrainingArguments``, TRL's ``SFTConfig`` / ``ModelConfig`` and ``BitsAndBytesConfig``.
``None`` means "not said": :mod:`costmodel.defaults` fills it with the framework's own default and names it in the answer.
"""

from __future__ import annotations

import functools
import os
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from costmodel.errors import CostModelError, UnknownNameError, short, shown
from costmodel.probes import asks_for_probe, probed_device
from costmodel.strict_json import as_json_value

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

# Far above what exists, and small enough that no product of them leaves the range of a float.
MAX_COUNT: Final = 10**12  # samples, steps
MAX_TOKENS: Final = 10**9  # of one sequence
MAX_BATCH: Final = 10**6
MAX_GPUS: Final = 10**6
MAX_LORA_R: Final = 65_536
MAX_USD_PER_GPU_HOUR: Final = 10_000.0

_FlopsPerSecond = Annotated[float, Field(ge=1e6, le=1e21)]

# transformers' names (`OptimizerNames`, 5.24), with the short forms people type.
OPTIMIZERS: Final = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_apex_fused",
    "adamw_anyprecision",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
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


# TRL's of supervised fine-tuning (trainer/sft_config.py, with the alias of an earlier release).
SFT_LOSSES: Final = ("nll", "dft", "chunked_nll")

TWO_AUTOCASTS: Final = "bf16 and fp16 are both true; autocast has one type, set one of them"


def is_fine_tuning_loss(name: object) -> bool:
    """Whether a ``loss_type`` is one of supervised fine-tuning; transformers' own are named after their model's head."""
    return isinstance(name, str) and (name in SFT_LOSSES or name.startswith("For"))


class Record(BaseModel):
    """A frozen record that refuses unknown fields and names the nearest known one."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=(), allow_inf_nan=False
    )

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

    @field_validator("*", mode="before")
    @classmethod
    def _what_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads ``true`` as 1, and the text ``"1_0"`` as 10."""
        is_none = isinstance(value, bool) or (isinstance(value, str) and "_" in value)
        if is_none and info.field_name is not None and _takes_numbers_only(cls, info.field_name):
            raise ValueError(f"must be a number, got {shown(value)}")
        return value

    @classmethod
    def _accepted_aliases(cls) -> set[str]:
        return set()


@functools.cache
def _takes_numbers_only(kind: type[BaseModel], field: str) -> bool:
    """Whether the field takes an int or a float (in a union, with bounds, as a literal), and no truth value."""
    annotation = kind.model_fields[field].annotation
    parts = typing.get_args(annotation) or (annotation,)
    plain = {typing.get_args(part)[0] if typing.get_origin(part) is Annotated else part for part in parts}
    if typing.get_origin(annotation) is Literal:
        plain = {type(part) for part in parts}
    return bool(plain & {int, float}) and bool not in plain


# Sizes, ascending, each with what was measured at it. Between two of them it is a line on logarithmic axes.
Curve = Annotated[
    tuple[tuple[Annotated[float, Field(gt=0, le=1e15)], Annotated[float, Field(gt=0, le=1e21)]], ...], Field(min_length=1)
]


class ProbedRates(Record):
    """What ``ftcost probe`` measured of a device beside large products, bandwidth and dispatch. Not measured: ``None``.

    ``matmul_flops_per_second``: what fp32 products approach whose operands no cache holds. ``matmul_half_size``: of that a
    product reaches D / (D + this) for each of its three dimensions D. ``forward_seconds_per_operator`` and ``backward_``:
    dispatch from Python, and from autograd. By bytes of one tensor: ``elementwise_bytes_per_second``, read and written. By
    tokens of a sequence: ``attention_flops_per_second``, of the half of the square. By bytes of the logits:
    ``loss_seconds_per_logit``, forward and backward. ``optimizer_seconds_per_parameter`` and ``_per_tensor``: fused AdamW
    and clipping in fp32. ``dequantisation_seconds_per_weight``: by quantisation, one pass. Of CUDA:
    ``allocation_granularity_bytes`` and ``context_bytes``, which are shown and not used yet.
    """

    matmul_flops_per_second: _FlopsPerSecond | None = None
    matmul_half_size: float | None = Field(default=None, ge=0, le=1e6)
    forward_seconds_per_operator: float | None = Field(default=None, gt=0, le=1.0)
    backward_seconds_per_operator: float | None = Field(default=None, gt=0, le=1.0)
    elementwise_bytes_per_second: Curve | None = None
    attention_flops_per_second: Curve | None = None
    loss_seconds_per_logit: Curve | None = None
    optimizer_seconds_per_parameter: float | None = Field(default=None, gt=0, le=1.0)
    optimizer_seconds_per_tensor: float | None = Field(default=None, gt=0, le=1.0)
    dequantisation_seconds_per_weight: dict[Quantization, Annotated[float, Field(gt=0, le=1.0)]] | None = None
    allocation_granularity_bytes: int | None = Field(default=None, ge=0, le=2**50)
    context_bytes: int | None = Field(default=None, ge=0, le=2**50)

    @field_validator("elementwise_bytes_per_second", "attention_flops_per_second", "loss_seconds_per_logit")
    @classmethod
    def _ascending(cls, value: Curve | None) -> Curve | None:
        sizes = [size for size, _ in value or ()]
        if sizes != sorted(set(sizes)):
            raise ValueError("the sizes must ascend")
        return value


class GpuSpec(Record):
    """One product's data sheet. Rates are dense (no sparsity) and per second; unknown is ``None``.

    ``memory_bytes`` is the capacity the driver reports, which is below the marketed size. ``measured_*`` is the best
    rate a large matmul was seen to reach; ``seconds_per_operator`` and ``probed`` are only set for a device that was probed.
    ``nvlink`` and ``pcie`` are one direction between this GPU and the others of its machine (``nvlink``: any link of the
    cards' own).
    """

    name: str
    nvml_names: tuple[str, ...] = ()
    vendor: str = "NVIDIA"
    architecture: str = ""
    compute_capability: str = ""
    memory_bytes: int = Field(gt=0, le=2**50)
    memory_is_marketed: bool = False
    memory_bandwidth_bytes_per_second: float = Field(ge=1e6, le=1e18)
    peak_bf16_flops_per_second: _FlopsPerSecond | None = None
    peak_fp16_flops_per_second: _FlopsPerSecond | None = None
    peak_fp32_flops_per_second: _FlopsPerSecond | None = None
    peak_tf32_flops_per_second: _FlopsPerSecond | None = None
    peak_fp8_flops_per_second: _FlopsPerSecond | None = None
    tdp_watts: float | None = Field(default=None, gt=0, le=1e6)
    l2_cache_bytes: int | None = Field(default=None, gt=0, le=2**50)
    nvlink_bytes_per_second: float | None = Field(default=None, ge=1e6, le=1e18)
    pcie_bytes_per_second: float | None = Field(default=None, ge=1e6, le=1e18)
    measured_bf16_matmul_flops_per_second: _FlopsPerSecond | None = None
    measured_fp32_matmul_flops_per_second: _FlopsPerSecond | None = None
    seconds_per_operator: float | None = Field(default=None, gt=0, le=1e3)
    probed: ProbedRates | None = None
    source: str = ""
    notes: str = ""


class Price(Record):
    """What one hour of one GPU costs, from whom and since when. ``usd_per_instance_hour`` is what is billed."""

    usd_per_gpu_hour: float = Field(gt=0, le=MAX_USD_PER_GPU_HOUR)
    usd_per_instance_hour: float = Field(gt=0, le=MAX_USD_PER_GPU_HOUR * MAX_GPUS)
    gpus_per_instance: int = Field(default=1, ge=1, le=MAX_GPUS)
    gpu: str = ""
    cloud: str = ""
    product: str = ""
    region: str = ""
    tier: str = "on_demand"
    source: str = ""
    as_of: str = ""
    note: str = ""


def check_length(tokens: int) -> None:
    """Refuses a sample of no tokens or of more than any model reads."""
    if tokens < 1:
        raise CostModelError(f"every length must be at least 1 token, got {shown(tokens)}")
    if tokens > MAX_TOKENS:
        raise CostModelError(f"every length must be at most {MAX_TOKENS:,} tokens, got {shown(tokens)}")


def check_histogram(counts: Mapping[int, float]) -> None:
    """Refuses lengths that are none, counts that are no finite number from 0 on, and a histogram of no samples."""
    for length, count in counts.items():
        check_length(length)
        if not 0 <= count <= MAX_COUNT:  # nan is neither
            raise CostModelError(f"the count of length {length} must be from 0 to {MAX_COUNT:,}, got {shown(count)}")
    if not sum(counts.values()) > 0:
        raise CostModelError("the histogram holds no samples")


class Lengths(Record):
    """Tokens per sample: exactly one of the ways to say it. Lengths above ``max_length`` are cut (and reported)."""

    fixed: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    mean: float | None = Field(default=None, ge=1, le=MAX_TOKENS)
    max: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    values: tuple[int, ...] | None = Field(default=None, min_length=1)
    histogram: dict[int, float] | None = Field(default=None, min_length=1)
    dataset: str | None = None
    file: str | None = None

    @field_validator("values", "histogram", mode="before")
    @classmethod
    def _counted_in_numbers(cls, value: Any) -> Any:
        numbers = (*value, *value.values()) if isinstance(value, Mapping) else value
        if isinstance(numbers, (list, tuple)) and any(isinstance(number, bool) for number in numbers):
            raise ValueError("must hold numbers, got a truth value among them")
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Lengths:
        given = [
            name for name in ("fixed", "mean", "values", "histogram", "dataset", "file") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError(
                "takes exactly one of fixed, mean (with max), values, histogram, dataset, file; "
                f"got {', '.join(given) or 'none of them'}"
            )
        if self.mean is not None and self.max is None:
            raise ValueError("a mean also needs max, the longest sample in tokens")
        if self.mean is not None and self.max is not None and self.mean > self.max:
            raise ValueError(f"mean {self.mean:g} is above max {self.max}")
        if self.max is not None and self.mean is None:
            raise ValueError("max goes with mean")
        for length in self.values or ():
            check_length(length)
        if self.histogram is not None:
            check_histogram(self.histogram)
        return self


class Job(Record):
    """One fine-tuning run, as the user describes it. See ``docs/job.md`` for each field's meaning and default."""

    schema_version: Literal[1] = 1

    # the model
    model: str | dict[str, Any]
    model_overrides: dict[str, Any] = Field(default_factory=dict)

    # the machine
    gpu: str | GpuSpec | None = None
    num_gpus: int = Field(default=1, ge=1, le=MAX_GPUS)

    # method and quantisation
    method: Method | None = None
    quantization: Quantization | None = None
    double_quant: bool | None = None
    prepare_model_for_kbit_training: bool | None = None
    load_towers: bool | None = None

    # LoRA
    lora_r: int | None = Field(default=None, ge=1, le=MAX_LORA_R)
    lora_alpha: float | None = Field(default=None, gt=0, le=1e9)
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
    per_device_train_batch_size: int | None = Field(default=None, ge=1, le=MAX_BATCH)
    gradient_accumulation_steps: int | None = Field(default=None, ge=1, le=MAX_BATCH)
    gradient_checkpointing: bool | None = None
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None = None
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] | None = None
    expert_imbalance: float | None = Field(default=None, ge=1, le=MAX_BATCH)
    optim: str | None = None
    torch_compile: bool | None = None
    use_liger_kernel: bool | None = None
    fused_loss: Literal["chunked", "fused"] | None = None
    loss_type: str | None = None
    use_cache: bool | None = None
    logits_to_keep: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    activation_offloading: bool | None = None
    fsdp: str | dict[str, Any] | None = None
    deepspeed: str | dict[str, Any] | None = None

    # data
    max_length: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    packing: bool | None = None
    padding_free: bool | None = None
    padding: Literal["longest", "max_length"] | None = None
    pad_to_multiple_of: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] | None = None
    lengths: Lengths | None = None
    supervised_fraction: float | None = Field(default=None, gt=0, le=1)
    num_samples: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    dataloader_drop_last: bool | None = None

    # duration
    num_train_epochs: float | None = Field(default=None, gt=0, le=1e6)
    max_steps: int | None = Field(default=None, ge=-1, le=MAX_COUNT)
    eval_strategy: Literal["no", "steps", "epoch"] | None = None
    eval_steps: float | None = Field(default=None, gt=0, le=MAX_COUNT)
    eval_delay: float | None = Field(default=None, ge=0, le=MAX_COUNT)
    eval_on_start: bool | None = None
    per_device_eval_batch_size: int | None = Field(default=None, ge=1, le=MAX_BATCH)
    num_eval_samples: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = None
    save_steps: float | None = Field(default=None, gt=0, le=MAX_COUNT)
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
        double = fields.pop("bnb_4bit_use_double_quant", None)
        quant_type = fields.pop("bnb_4bit_quant_type", None)
        loads = {bits: fields.pop(f"load_in_{bits}bit", None) for bits in (4, 8)}
        for bits, loaded in loads.items():
            if loaded not in (None, False, True):  # text such as "false" is true to Python
                raise ValueError(f"load_in_{bits}bit must be true or false, got {shown(loaded)}")
        found: dict[str, Any] = {"dtype": fields.pop("torch_dtype", None)}
        if loads[4]:
            found |= {"quantization": quant_type or "fp4", "double_quant": bool(double)}
        elif loads[8]:
            found["quantization"] = "int8"
        if double is not None:
            found.setdefault("double_quant", bool(double))
        for name, told in found.items():
            if told is not None and fields.get(name) is None:
                fields[name] = told
        return fields

    @field_validator("dtype", "adapter_dtype", mode="before")
    @classmethod
    def _long_dtype_name(cls, value: Any) -> Any:
        return _DTYPE_ALIASES.get(str(value), value) if value is not None else None

    @field_validator("gpu", mode="before")
    @classmethod
    def _described_gpu(cls, value: Any) -> Any:
        """A description is read here, so that its faults are named without those of a GPU's name; so is a stored probe."""
        if isinstance(value, str) and asks_for_probe(value):
            value = probed_device(value)
        return parse_gpu(value) if isinstance(value, Mapping) else value

    @field_validator("framework_version", mode="before")
    @classmethod
    def _version_as_text(cls, value: Any) -> Any:
        """YAML reads ``5.24`` as a number, and ``4.40`` as the number 4.4, whose version is another one."""
        if isinstance(value, float) and len(str(value).partition(".")[2]) == 1 and not value.is_integer():
            raise ValueError(f'{value} may be {value} or {value}0 where it is not text: quote it, as in "{value}0"')
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return str(value) if is_number and 0 <= value < 1000 else value

    @field_validator(
        *("model", "model_overrides", "gradient_checkpointing_kwargs", "fsdp", "deepspeed", "calibration"), mode="before"
    )
    @classmethod
    def _held_by_json(cls, value: Any) -> Any:
        """The answer gives these mappings back as they came in, and is JSON."""
        return as_json_value(value) if isinstance(value, Mapping) else value

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

    @field_validator("loss_type")
    @classmethod
    def _modelled_loss(cls, value: str | None) -> str | None:
        if value is not None and not is_fine_tuning_loss(value):
            raise ValueError(
                f"{shown(value)} is no loss of supervised fine-tuning, and other training is not modelled (DPO, GRPO, ...); "
                f"use {', '.join(SFT_LOSSES)} or transformers' ForCausalLM"
            )
        return value

    @field_validator("usd_per_gpu_hour")
    @classmethod
    def _sensible_price(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value <= MAX_USD_PER_GPU_HOUR:
            raise ValueError(
                f"must be a positive number of dollars, at most {MAX_USD_PER_GPU_HOUR:,.0f}, got {value:g}; "
                "leave it out for hours only"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        if self.bf16 and self.fp16:
            raise ValueError(TWO_AUTOCASTS)
        if self.method == "full" and self.quantization in {"nf4", "fp4", "int8", "gptq-int4", "awq-int4"}:
            raise ValueError(
                f"a base quantised to {self.quantization} cannot be fully fine-tuned; use method qlora, or no quantization"
            )
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
        raise CostModelError(validation_message(error, kind)) from None


def validation_message(error: ValidationError, kind: type[BaseModel] | None = None) -> str:
    """One line of all faults. Where a field takes several kinds of value, what it takes in place of each kind's fault."""
    fields = kind.model_fields if kind is not None else {}
    lines = []
    for fault in error.errors(include_url=False):
        name = str(fault["loc"][0]) if fault["loc"] else ""
        kinds = _kinds_of_value(fields[name].annotation) if name in fields else []
        if len(kinds) > 1 and fault["type"] not in {"value_error", "missing"}:
            value = _value_of_field(error, name)
            lines.append(f"{name}: must be {' or '.join(kinds)}, got {shown(value)}")
        else:
            lines.append(_one_line(fault))
    return "; ".join(dict.fromkeys(lines))


def _value_of_field(error: ValidationError, name: str) -> Any:
    """The value of the field ``name`` that no kind of value fits: of its faults, the one on the outside."""
    faults = [fault for fault in error.errors(include_url=False) if fault["loc"][:1] == (name,)]
    return min(faults, key=lambda fault: len(fault["loc"]))["input"]


_KIND_WORDS: Final = {str: "text", dict: "a mapping", tuple: "a list of text", GpuSpec: "a mapping that describes it"}


def _kinds_of_value(annotation: Any) -> list[str]:
    """``str | tuple[str, ...] | None`` -> ``["text", "a list of text"]``."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return []
    kinds = [typing.get_origin(part) or part for part in typing.get_args(annotation)]
    return [_KIND_WORDS[kind] for kind in kinds if kind in _KIND_WORDS]


def _one_line(fault: Any) -> str:
    where = ".".join(short(str(part)) for part in fault["loc"])
    if fault["loc"] == ("model",) and fault["type"] == "missing":
        return "no model is named: give a catalogue id, a config.json or its folder as field model (-m on the command line)"
    message = fault["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    if "input" in fault and fault["type"] not in {"value_error", "missing"} and not isinstance(fault["input"], dict):
        message += f", got {shown(fault['input'])}"
    return f"{where}: {message}" if where else message
