"""What every importer shares: files read within bounds, keys that are accounted for, values turned into a job's.

Nothing here runs anything: YAML is safe-loaded, JSON is JSON, no pickle is opened. A file is at most 10 MB, and YAML at most
200,000 values after its aliases are expanded; a key that comes twice is refused.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from costmodel.errors import CostModelError, one_line, short, shown
from costmodel.specs import OPTIMIZERS, Job, parse_job
from costmodel.strict_json import job_mapping, parse_json

MAX_CONFIG_BYTES: Final = 10 * 1000 * 1000
MAX_CONFIG_VALUES: Final = 200_000

# What limits or splits a data set, in any of the tools.
DATASET_KEYS: Final = (
    "max_samples",
    "max_train_samples",
    "val_set_size",
    "val_size",
    "test_split_size",
    "validation_split_percentage",
)
LossOn = Literal["all", "completion", "by_format"]

# Trainings whose step is more than one forward and backward of a batch of texts -> what it does besides.
_PAIRS: Final = "each sample is two sequences"
_DRAWS: Final = "each step also generates and scores what it trains on"
_NOT_FINE_TUNING: Final[Mapping[str, str]] = {
    "DPO": f"{_PAIRS}, and a reference model reads them too",
    "IPO": f"{_PAIRS}, and a reference model reads them too",
    "SimPO": _PAIRS,
    "ORPO": _PAIRS,
    "CPO": _PAIRS,
    "KTO": "a reference model reads each batch too",
    "distillation": "a teacher model reads each batch too, and may write it",
    "PPO": f"{_DRAWS}, with a reference and a reward model",
    "GRPO": _DRAWS,
    "RLOO": _DRAWS,
    "reward modelling": "a head of one number takes the place of the vocabulary's, mostly over pairs of sequences",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a job field came from: a key of the file, or the tool's own default (``text`` says which, and its source)."""

    kind: Literal["file", "tool_default"]
    text: str


@dataclass(frozen=True, slots=True)
class ImportedJob:
    """A job as another tool's configuration describes it, with every key accounted for.

    ``read_fields`` are those of :class:`costmodel.specs.Job`; ``origins`` says for each where it came from. ``unknown`` keys
    were not used. ``max_samples`` (for each of ``num_datasets``), ``eval_split`` (a share below 1, or samples),
    ``drops_long_samples`` and ``loss_on`` say what the tool would do with a data set; they wait for one to be counted.
    ``unmodelled``: why the run that the file describes is not priced, with the way out; "" where it is a fine-tuning.
    ``tied``: field -> the field without whose value here it says nothing (a price is that of its own GPU).
    """

    tool: str
    tool_version: str
    where: str
    read_fields: dict[str, Any]
    origins: dict[str, Origin]
    understood: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    max_samples: int | None = None
    num_datasets: int = 1
    eval_split: float | None = None
    drops_long_samples: bool = False
    loss_on: LossOn | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    unmodelled: str = ""

    def require_modelled(self) -> None:
        """Raises :class:`CostModelError` for a run that is no fine-tuning (DPO, GRPO, reward modelling)."""
        if self.unmodelled:
            raise CostModelError(self.unmodelled)

    @property
    def fields(self) -> dict[str, Any]:
        """The job's fields, to be priced with others on top. Raises :class:`CostModelError` where it is not modelled."""
        self.require_modelled()
        return self.read_fields

    @property
    def job(self) -> Job:
        """The job. Raises :class:`CostModelError` where it is not modelled, names no model or contradicts itself."""
        if "model" not in self.fields:
            raise CostModelError(f"{self.where} names no model; give one (--model, or the field model)")
        return parse_job(self.fields)

    @property
    def assumed(self) -> tuple[str, ...]:
        """The fields that the file leaves out and the tool's own default fills."""
        return tuple(name for name, origin in self.origins.items() if origin.kind == "tool_default")

    @property
    def waits_for_dataset(self) -> str | None:
        """A sentence on what the tool would do with a data set where only its size is given: not applied to it."""
        if not (self.max_samples or self.eval_split):
            return None
        keys = [key for key in DATASET_KEYS if key in self.understood]
        return (
            f"{' and '.join(keys) or 'a limit or split of the data set'} in {self.where}: needs the data set itself "
            "(--dataset); num_samples is taken as what is trained on"
        )

    @property
    def most_samples(self) -> str | None:
        """A sentence on the samples that the tool trains on at most, where the data set itself is not counted."""
        if not self.max_samples:
            return None
        number = self.max_samples * self.num_datasets
        each = f" of each of {self.num_datasets} data sets" if self.num_datasets > 1 else ""
        return (
            f"{self.where} takes {self.max_samples:,} samples{each} at most, and its data is not counted: give "
            f"--num-samples {number} for the most that it may cost, or --dataset"
        )

    @property
    def all_warnings(self) -> tuple[str, ...]:
        """``warnings``, and the unknown keys in one sentence."""
        if not self.unknown:
            return self.warnings
        one = len(self.unknown) == 1
        listed = f"{'key' if one else 'keys'} of {self.where} {'is' if one else 'are'} not known and not used: "
        return (*self.warnings, f"{len(self.unknown)} {listed}{', '.join(map(short, self.unknown))}")


class ConfigReader:
    """Takes values out of one configuration, and remembers which keys were read and where each job field came from.

    ``understood``: keys that count as read wherever they stand, also where another key makes them idle.
    """

    def __init__(
        self, config: Mapping[str, Any], where: str, tool: str, tool_version: str, understood: Collection[str] = ()
    ) -> None:
        self.config = config
        self.where = where
        self.tool = tool
        self.tool_version = tool_version
        self.fields: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self.warnings: list[str] = []
        self.unmodelled = ""
        self._read: set[str] = set(understood)

    def value(self, *keys: str) -> Any:
        """The first of these keys that is not null; ``None`` if there is none. All of them count as understood."""
        self._read.update(keys)
        return next((self.config[key] for key in keys if self.config.get(key) is not None), None)

    def key_of(self, *keys: str) -> str:
        """The key that :meth:`value` would answer from."""
        return next((key for key in keys if self.config.get(key) is not None), keys[0])

    def flag(self, *keys: str) -> bool | None:
        """A yes or no; YAML and W&B also hold them as text. Raises :class:`CostModelError` for anything else."""
        value = self.value(*keys)
        return None if value is None else as_flag(value, f"{self.where}: {self.key_of(*keys)}")

    def number(self, *keys: str, at_least: float = 0) -> float | None:
        """A number, whole or not. Raises :class:`CostModelError` for anything else, and for one below ``at_least``."""
        value = self.value(*keys)
        if value is None:
            return None
        number = as_number(value, f"{self.where}: {self.key_of(*keys)}")
        if number < at_least:
            raise CostModelError(f"{self.where}: {self.key_of(*keys)} must be at least {at_least:g}, got {number:g}")
        return number

    def mapping(self, *keys: str) -> dict[str, Any] | None:
        """A mapping, or one as JSON text, which command lines pass. Raises :class:`CostModelError` for anything else."""
        value = self.value(*keys)
        where = f"{self.where}: {self.key_of(*keys)}"
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = parse_json(value, where)
        if value is not None and not isinstance(value, dict):
            raise CostModelError(f"{where} must be a mapping, got {shown(value)}")
        return value

    def set(self, field: str, value: Any, *keys: str, note: str = "") -> None:
        """A job field that the file's ``keys`` decide. ``None`` says nothing."""
        if value is not None:
            self.fields[field] = self._checked(field, value, keys)
            self.origins[field] = Origin("file", f"{' and '.join(keys)} in {self.where}" + (f" ({note})" if note else ""))

    def copy(self, field: str, *keys: str, convert: Callable[[Any], Any] | None = None) -> Any:
        """The job field from the first of ``keys`` that is there, converted; returns it."""
        value = self.value(*keys)
        if value is not None:
            key = self.key_of(*keys)
            self.set(field, self.converted(value, key, convert) if convert else value, key)
        return self.fields.get(field)

    def copy_lora_fields(self, *, prefix: str) -> None:
        """The fields of peft's ``LoraConfig``: its own names with ``prefix`` "", TRL's ModelConfig with "lora_"."""
        self.copy("lora_r", f"{prefix}r")
        self.copy("lora_alpha", "lora_alpha")
        self.copy("lora_dropout", "lora_dropout")
        self.copy("lora_target_modules", f"{prefix}target_modules", convert=names)
        self.copy("lora_target_parameters", f"{prefix}target_parameters", convert=listed_names)
        self.copy("lora_modules_to_save", f"{prefix}modules_to_save", convert=listed_names)
        for name in ("use_rslora", "use_dora"):
            self.set(name, self.flag(name), name)

    def converted(self, value: Any, key: str, convert: Callable[[Any], Any]) -> Any:
        """``convert(value)``, whose complaint then names the file and the key."""
        try:
            return convert(value)
        except CostModelError as error:
            raise CostModelError(f"{self.where}: {key}: {error}") from None

    def default(self, field: str, value: Any, source: str) -> None:
        """What the tool does when the file does not say: used unless the field is set. ``source``: the tool's file."""
        if field not in self.fields and value is not None:
            self.fields[field] = value
            self.origins[field] = Origin("tool_default", f"default of {self.tool} {self.tool_version} ({source})")

    def recognised(self, framework: str) -> None:
        """The framework that the file is for, which its keys tell."""
        self.fields["framework"] = framework
        self.origins["framework"] = Origin("file", f"the keys of {self.where}")

    def is_not_fine_tuning(self, training: str, said_by: str, way_out: str) -> None:
        """The run is a ``training`` that is not modelled, as the keys ``said_by`` say: it is read, and not priced.

        ``training``: its name in any case, known here or not. ``way_out``: what makes the file one of a fine-tuning.
        """
        known = {name.lower(): name for name in _NOT_FINE_TUNING}
        name = known.get(training.lower(), short(training))
        why = _NOT_FINE_TUNING.get(name, "a step is more than one forward and backward of a batch of texts")
        self.unmodelled = one_line(
            f"{self.where}: training with {name} is not modelled ({said_by}): {why}; to measure what it costs, give its "
            f"trainer an FTCostCallback; to price supervised fine-tuning of the same model, {way_out} in a copy of the file"
        )

    def warn(self, sentence: str) -> None:
        sentence = one_line(sentence)  # it may quote the file
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def _checked(self, field: str, value: Any, keys: tuple[str, ...]) -> Any:
        """Refuses a value that the job would, but names the key that the user wrote."""
        try:
            parse_job({"model": "-", field: value})
        except CostModelError as error:
            message = str(error).removeprefix(f"{field}: ")
            raise CostModelError(f"{self.where}: {' and '.join(keys)}: {message}") from None
        return value

    def finish(
        self,
        *,
        harmless: Collection[str],
        harmless_prefixes: tuple[str, ...] = (),
        not_modelled: Mapping[str, str],
        **facts: Any,
    ) -> ImportedJob:
        """Every key in its class. A key of ``not_modelled`` that is switched on becomes a warning with its reason."""
        understood, without_cost, unknown = [], [], []
        for key, value in self.config.items():
            if key in not_modelled:
                understood.append(key)
                if is_on(value):
                    self.warn(f"{key}: {not_modelled[key]}")
            elif key in self._read:
                understood.append(key)
            elif key in harmless or key.startswith(harmless_prefixes):
                without_cost.append(key)
            else:
                unknown.append(key)
        return ImportedJob(
            tool=self.tool,
            tool_version=self.tool_version,
            where=self.where,
            read_fields=self.fields,
            origins=self.origins,
            understood=tuple(understood),
            harmless=tuple(without_cost),
            unknown=tuple(unknown),
            warnings=tuple(self.warnings),
            unmodelled=self.unmodelled,
            **facts,
        )


# --- files ------------------------------------------------------------------------------------------------------------


def read_text(path: str, max_bytes: int = MAX_CONFIG_BYTES) -> str:
    """A configuration file's text. Raises :class:`CostModelError` with the path as it was given."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise CostModelError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise CostModelError(f"{path} is a folder; give a job file (.json, .yaml or .jsonl)") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise CostModelError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > max_bytes:
        raise CostModelError(f"{path} is larger than {max_bytes // 1_000_000} MB: not a configuration")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise CostModelError(f"{path} is not a text file in UTF-8") from None


def read_mapping(path: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The mapping that a ``.json``, ``.yaml`` or ``.yml`` file holds. Raises :class:`CostModelError`."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (".yaml", ".yml", ".json", ""):
        read_text(path)  # a file that is not there is said first
        if suffix == ".jsonl":
            raise CostModelError(f"{path} holds a job a line, which only ftcost estimate reads; give one job")
        raise CostModelError(f"{path}: a job file is .json, .yaml or .jsonl, not {short(suffix)}")
    return mapping_in_text(read_text(path, max_bytes), path, is_yaml=suffix in (".yaml", ".yml"))


def mapping_in_text(text: str, path: str, *, is_yaml: bool) -> dict[str, Any]:
    """:func:`read_mapping` for a text that is read already; ``path`` is its name in messages."""
    return job_mapping(parse_yaml(text, path) if is_yaml else parse_json(text, path), path)


def parse_yaml(text: str, where: str) -> Any:
    """YAML by the safe loader. A bare ``no`` (false in YAML 1.1) is put back where it is a strategy's name."""
    import yaml

    try:
        value = yaml.load(text, Loader=_safe_loader())
    except CostModelError as error:  # of a key that comes twice
        raise CostModelError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        text = " ".join(str(error).replace('in "<unicode string>",', "at").split())
        raise CostModelError(f"{where} is not valid YAML: {text}") from None
    _refuse_expansion(value, where)
    if isinstance(value, dict):
        for name in ("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy"):
            if value.get(name) is False:
                value[name] = "no"
    return value


@functools.cache
def _safe_loader() -> Any:
    """The safe loader, which also refuses a key that comes twice: the last would win in silence."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class OneKeyLoader(loader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[tuple[str, str], int] = {}
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                line, first = key.start_mark.line + 1, lines.get((key.tag, key.value))
                if first is not None:
                    where = f"in line {line}" if line == first else f"in lines {first} and {line}"
                    raise CostModelError(f"the key {short(key.value)} is there twice, {where}: keep one")
                lines[key.tag, key.value] = line
            return super().construct_mapping(node, deep=deep)

    return OneKeyLoader


def _refuse_expansion(value: Any, where: str) -> None:
    """Aliases make a small YAML file stand for a huge one, or for one without end."""
    pending, seen = [value], 0
    while pending:
        seen += 1
        if seen > MAX_CONFIG_VALUES:
            raise CostModelError(f"{where} stands for more than {MAX_CONFIG_VALUES:,} values: not a configuration")
        current = pending.pop()
        if isinstance(current, dict):
            pending.extend(current.values())
        elif isinstance(current, (list, tuple, set)):
            pending.extend(current)


# --- values -----------------------------------------------------------------------------------------------------------


def as_flag(value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _WORDS_FOR_YES | _WORDS_FOR_NO:
        return value.strip().lower() in _WORDS_FOR_YES
    raise CostModelError(f"{where} must be true or false, got {shown(value)}")


_WORDS_FOR_YES: Final = frozenset({"true", "yes", "on", "1"})
_WORDS_FOR_NO: Final = frozenset({"false", "no", "off", "0", "none", "null", ""})


def as_number(value: Any, where: str) -> float:
    number = value if not isinstance(value, bool) else None
    if isinstance(value, str):
        for kind in (float, int):  # the last that reads it
            with contextlib.suppress(ValueError):
                number = kind(value)
    if isinstance(number, (int, float)) and abs(number) <= _MAX_NUMBER:  # nan is not
        return number
    raise CostModelError(f"{where} must be a number, got {shown(value)}")


_MAX_NUMBER: Final = 1e15


def is_on(value: Any) -> bool:
    """Whether a switch of unknown kind does something: not null, false, zero, empty or a word for none."""
    if isinstance(value, str):
        return value.strip().lower() not in _WORDS_FOR_NO
    return bool(value)


def names(value: Any) -> tuple[str, ...] | str | None:
    """Module names as a list, a comma list, or the one word ``all-linear``. A regular expression stays text."""
    if isinstance(value, str):
        text = value.strip()
        if text == "all-linear" or any(character in text for character in "*+?()[]|\\^$"):
            return text or None
        value = text.split(",")
    elif isinstance(value, (set, frozenset)):
        value = sorted(value)
    if not isinstance(value, (list, tuple)):
        raise CostModelError(f"module names must be a list or text, got {shown(value)}")
    found = tuple(str(name).strip() for name in value if str(name).strip())
    return "all-linear" if found == ("all-linear",) else found or None


def listed_names(value: Any) -> tuple[str, ...] | None:
    """:func:`names`, where a job field takes only a list."""
    found = names(value)
    return (found,) if isinstance(found, str) else found


_DTYPES: Final = {
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
}


def dtype_name(value: Any) -> str | None:
    """``"torch.bfloat16"``, ``"bf16"`` ... -> ``"bfloat16"``; ``None`` for ``"auto"`` and for what is no float type."""
    return _DTYPES.get(str(value).strip().lower().removeprefix("torch."))


ATTENTION_KERNELS: Final = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def attention_name(reader: ConfigReader, value: Any, key: str) -> str | None:
    """A job's ``attn_implementation``; the nearest modelled one, with a warning, for the others."""
    name = str(value).strip().split("@")[0].split(":")[0]
    if name in ATTENTION_KERNELS:
        return name
    lowered = name.lower()
    nearest = None
    if "flash-attn3" in lowered or "flash_attention_4" in lowered:
        nearest = "flash_attention_3"
    elif "flash" in lowered:
        nearest = "flash_attention_2"
    elif lowered in ("xformers", "sage", "fp8"):
        nearest = "sdpa"
    if nearest is None:
        reader.warn(f"{key}: attention {shown(name)} is not modelled; the framework's default is assumed")
    elif "flash-attn" not in lowered:
        reader.warn(f"{key}: attention {shown(name)} is not modelled; estimated as {nearest}")
    return nearest


# Other names of optimizers that are modelled: same states, same size.
_SAME_OPTIMIZER: Final = {
    "adamw": "adamw_torch",
    "adamw_hf": "adamw_torch",
    "adamw_torch_xla": "adamw_torch_fused",
    "adamw_torch_npu_fused": "adamw_torch_fused",
    "adamw_bnb": "adamw_bnb_8bit",
    "ao_adamw_8bit": "adamw_torch_8bit",
    "ao_adamw_4bit": "adamw_torch_4bit",
    "paged_adamw": "paged_adamw_32bit",
    "lion": "lion_32bit",
    "lion_pytorch": "lion_32bit",
    "paged_lion": "paged_lion_32bit",
    "rmsprop_bnb_32bit": "rmsprop",
    "rmsprop_bnb": "rmsprop",
}


def optimizer_name(reader: ConfigReader, value: Any, key: str) -> str:
    """A job's ``optim``. Others are estimated as AdamW (8-bit where the name says 8 or 4 bit), with a warning."""
    name = str(value).strip().lower().removeprefix("optimizernames.")
    if name in OPTIMIZERS:
        return name
    if name in _SAME_OPTIMIZER:
        return _SAME_OPTIMIZER[name]
    nearest = "adamw_8bit" if re.search(r"[48]-?bit|fp8", name) else "adamw_torch"
    reader.warn(f"{key}: optimizer {shown(name)} is not modelled; its states are estimated as those of {nearest}")
    return nearest


def deepspeed_setting(reader: ConfigReader, value: Any, key: str) -> str | dict[str, Any] | None:
    """The DeepSpeed config itself: inline, from the path (as given, or beside the file), else the stage in its name."""
    if not is_on(value):
        return None
    if isinstance(value, dict):
        return value
    path = str(value)
    for candidate in (path, os.path.join(os.path.dirname(reader.where), path)):
        if os.path.isfile(candidate):
            return read_mapping(candidate)
    stage = re.search(r"z(?:ero)?[_-]?([0-3])", os.path.basename(path).lower())
    if stage is None:
        reader.warn(f"{key}: no such file: {path}; its ZeRO stage is not known")
        return path
    reader.warn(f"{key}: no such file: {path}; ZeRO stage {stage[1]} is taken from its name")
    return zero_stage(int(stage[1]), offload="offload" in os.path.basename(path).lower())


def zero_stage(stage: int, *, offload: bool = False) -> dict[str, Any]:
    """The part of a DeepSpeed config that moves memory."""
    optimization: dict[str, Any] = {"stage": stage}
    if offload:
        optimization["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            optimization["offload_param"] = {"device": "cpu"}
    return {"zero_optimization": optimization}


def fsdp_words(fsdp: Any, config: Any) -> str | None:
    """``fsdp`` and ``fsdp_config`` of any tool as ``TrainingArguments.fsdp`` spells them: ``"full_shard offload"``."""
    if fsdp is not None and not isinstance(fsdp, (bool, str, list, tuple)):
        raise CostModelError(f"must be true, false, words or a list of words, got {shown(fsdp)}")
    options = dict(config) if isinstance(config, dict) else {}
    plain = {name.removeprefix("fsdp_"): value for name, value in options.items()}
    if isinstance(fsdp, (list, tuple)):
        words = [str(word) for word in fsdp]
    else:
        words = [] if fsdp is True else str(fsdp).split() if is_on(fsdp) else []
        if not words and not (fsdp is True or options):
            return None
    if not is_on(" ".join(words)) and not (fsdp is True or options):
        return None
    if not any(word.endswith(("shard", "shard_grad_op")) or "zero" in word for word in words):
        strategy = str(plain.get("sharding_strategy", "")).lower()
        if strategy in ("shard_grad_op", "hybrid_shard", "no_shard", "full_shard"):
            words.insert(0, strategy)
        else:
            gathers_once = plain.get("reshard_after_forward") in (False, "false", "SHARD_GRAD_OP")
            words.insert(0, "shard_grad_op" if gathers_once else "full_shard")
    if is_on(plain.get("offload_params")) and "offload" not in words:
        words.append("offload")
    return " ".join(words)


def quantization_fields(config: Mapping[str, Any], warn: Callable[[str], None]) -> dict[str, Any]:
    """``quantization_config`` of a config.json (or BitsAndBytesConfig's arguments) -> the job's fields.

    ``warn`` is told of a way to store the base that is not modelled.
    """
    method = str(config.get("quant_method") or "").lower()
    bits = config.get("bits")
    if method == "bitsandbytes" or config.get("load_in_4bit") or config.get("load_in_8bit"):
        if config.get("load_in_8bit"):
            return {"quantization": "int8"}
        if config.get("load_in_4bit"):
            return {
                "quantization": str(config.get("bnb_4bit_quant_type") or "fp4"),
                "double_quant": bool(config.get("bnb_4bit_use_double_quant", False)),
            }
    if method in ("gptq", "awq") and bits in (4, None):
        return {"quantization": f"{method}-int4"}
    if method in ("mxfp4", "fp8"):
        return {"quantization": method}
    if method not in ("", "bitsandbytes"):
        how = f"{short(method)} in {bits} bits" if isinstance(bits, int) else short(method)
        warn(f"quantization_config: {how} is not modelled; the base is counted unquantised, which needs more memory")
    return {}


def local_model_config(model: Any) -> dict[str, Any] | None:
    """The model's ``config.json`` if it is inline, in the catalogue or on the disk; never asks the network."""
    from costmodel.model_catalog import find_model_config, find_model_id

    try:
        if isinstance(model, dict):
            return model
        if not isinstance(model, str):
            return None
        path = os.path.expanduser(model)
        if os.path.exists(path) or find_model_id(model) is not None:
            return find_model_config(model)
    except (CostModelError, OSError, ValueError):
        return None
    return None


def is_mixture_of_experts(model: Any) -> bool:
    """Whether the model is known, without the network, to have routed experts."""
    config = local_model_config(model) or {}
    text = config.get("text_config")
    both = {**config, **text} if isinstance(text, dict) else config
    return any(both.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"))
