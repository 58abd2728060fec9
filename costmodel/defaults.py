"""Job -> ResolvedJob: what the user left unsaid, filled with the framework's own default, and named.

What each framework fills in by itself, and by which version, stands in ``framework_defaults.py``. Everything filled here is
listed in the answer's ``assumed``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from costmodel.errors import CostModelError
from costmodel.framework_defaults import (
    FUSED_QUERY_KEY_VALUE,
    OWN_KERNEL_FRAMEWORKS,
    QUERY_AND_VALUE,
    READ_VERSIONS,
    default_max_length,
    dequantises_by_table,
    four_bit_keeps_inputs,
    has_own_defaults,
    is_before_transformers_45,
    keeps_packed_samples_apart,
    loads_towers,
    major_and_minor,
    offloads_activations,
    own_defaults,
    peft_targets,
    transformers_major,
)
from costmodel.model_spec import ModelSpec
from costmodel.sharding import Sharding, read_sharding
from costmodel.specs import TWO_AUTOCASTS, Job

FOUR_BIT: Final = frozenset({"nf4", "fp4", "gptq-int4", "awq-int4", "mxfp4"})
BITSANDBYTES: Final = frozenset({"nf4", "fp4", "int8"})

_LORA_FIELDS: Final = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "use_dora",
    "use_rslora",
    "adapter_dtype",
)


@dataclass(frozen=True, slots=True)
class ResolvedJob:
    """A job with every default filled: the plain record that the arithmetic works on. Lengths in tokens."""

    method: str  # full | lora | qlora
    quantization: str | None
    double_quant: bool
    prepare_model_for_kbit_training: bool
    four_bit_keeps_inputs: bool  # bitsandbytes before 0.44: a 4-bit linear holds what it read until its backward
    dequantises_by_table: bool  # bitsandbytes from 0.48 on: the faster kernel
    load_towers: bool
    lora_r: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: str | tuple[str, ...]
    lora_target_parameters: tuple[str, ...]
    lora_modules_to_save: tuple[str, ...]
    use_dora: bool
    adapter_dtype: str
    dtype: str  # of the loaded, unquantised weights
    autocast_dtype: str | None
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    reentrant_checkpointing: bool
    attn_implementation: str
    experts_implementation: str
    expert_imbalance: float | None  # tokens of the busiest expert over the mean; None: taken as even
    fused_experts: bool  # transformers 5 stacks the experts into one parameter; transformers 4 keeps a Linear each
    optim: str
    torch_compile: bool
    use_liger_kernel: bool
    fused_loss: str | None
    supervised_positions_only: bool  # the head sees only the positions in the loss (TRL's nll)
    upcasts_logits: bool  # transformers before 4.45 lifts the logits to fp32 in the model, and returns those
    use_cache: bool
    logits_to_keep: int
    activation_offloading: bool
    max_length: int
    packing: bool
    padding_free: bool
    padding: str
    pad_to_multiple_of: int
    train_sampling_strategy: str
    supervised_fraction: float | None
    num_gpus: int
    sharding: Sharding
    num_samples: int | None
    dataloader_drop_last: bool
    num_train_epochs: float
    max_steps: int | None
    eval_strategy: str
    eval_steps: float | None
    eval_delay: float
    eval_on_start: bool
    per_device_eval_batch_size: int
    num_eval_samples: int | None
    save_strategy: str
    save_steps: float
    save_only_model: bool
    framework: str
    framework_version: str

    def __hash__(self) -> int:
        """Of the fields that tell most jobs apart: jobs are keys of many caches, and are looked up dozens of times."""
        return hash(
            (
                self.method,
                self.quantization,
                self.lora_r,
                self.lora_target_modules,
                self.dtype,
                self.per_device_train_batch_size,
                self.gradient_accumulation_steps,
                self.gradient_checkpointing,
                self.max_length,
                self.framework_version,
            )
        )

    @property
    def is_peft(self) -> bool:
        return self.method != "full"

    @property
    def makes_own_masks(self) -> bool:
        """Whether the framework calls attention by itself, so that the masks that transformers makes do not apply."""
        return self.framework in ("litgpt", "unsloth")

    @property
    def attends_across_documents(self) -> bool:
        """Whether a flattened row is computed whole and then masked: only kernels of variable length leave out what lies in
        other documents (transformers 5.24: masking_utils.py makes one dense mask of the row for ``sdpa`` and ``eager``).

        Unsloth calls such kernels itself. Litgpt makes no masks and has none: it computes the whole row."""
        return self.padding_free and self.attn_implementation in ("sdpa", "eager") and self.framework != "unsloth"

    @property
    def evaluates(self) -> bool:
        """Whether anything is evaluated: ``eval_on_start`` needs no strategy (``Trainer._inner_training_loop``)."""
        return self.eval_strategy != "no" or self.eval_on_start

    @property
    def major_version(self) -> int:
        return major_and_minor(self.framework_version)[0]


def resolve(job: Job, model: ModelSpec, *, has_bf16: bool = True) -> tuple[ResolvedJob, tuple[str, ...]]:
    """The job with every default filled, and the names of the fields that were.

    ``has_bf16``: whether the job's card computes in bf16; a framework that looks takes fp16 where it does not.
    Raises :class:`CostModelError` where a framework has no default (``max_length`` of plain transformers) or a
    combination cannot run.
    """
    assumed: list[str] = []

    def pick(field: str, default: Any) -> Any:
        value = getattr(job, field)
        if value is None:
            assumed.append(field)
            return default
        return value

    _refuse_contradictions(job)
    framework = pick("framework", "transformers")
    version = pick("framework_version", READ_VERSIONS.get(framework, READ_VERSIONS["transformers"]))
    is_trl = framework == "trl"
    generation = transformers_major(framework, version)
    method, quantization = _method(job, assumed)
    own = own_defaults(
        framework,
        is_peft=method != "full",
        lora_r=job.lora_r,
        num_gpus=job.num_gpus,
        batch_size=job.per_device_train_batch_size,
        is_moe=model.is_moe,
        pads_to_longest=not job.packing and job.padding in (None, "longest"),
    )
    autocast = _autocast(job, framework, quantization, has_bf16, assumed)
    dtype: str | None = job.dtype
    if dtype is None:
        assumed.append("dtype")
        half = "float16" if autocast == "float16" else "bfloat16"
        if framework == "axolotl" and autocast is None:
            half = "float32"
        dtype = _loaded_in(job, model, framework, method, quantization, generation, half)
    adapter_dtype = _adapter_dtype(job, framework, version, method, quantization, dtype, assumed)
    load_towers = _loads_towers(job, model, framework, assumed)
    use_liger = bool(pick("use_liger_kernel", False))
    loss_type = job.loss_type or ("nll" if is_trl else "ForCausalLM")
    # TRL computes the head in tiles over the supervised positions: always from 1.15 on (and then without Liger's head), on
    # request from 1.4 on (sft_trainer.py, trainer/utils.py). Liger fuses the head into the loss.
    fused_loss = job.fused_loss
    if fused_loss is None:
        is_tiled = is_trl and (major_and_minor(version) >= (1, 15) or loss_type == "chunked_nll")
        fused_loss = "chunked" if is_tiled else "fused" if use_liger else own.get("fused_loss")
        if "fused_loss" in own:
            assumed.append("fused_loss")
    max_length = job.max_length
    if max_length is None:
        max_length = default_max_length(framework)
        if max_length is None:
            raise CostModelError(
                f"max_length is required: {'plain transformers' if framework == 'transformers' else framework} has no "
                "default (rows are as long as the data makes them); give the longest sample in tokens"
            )
        assumed.append("max_length")
    epochs = own.get("num_train_epochs", 3.0)
    optim = pick("optim", own.get("optim", "adamw_torch_fused" if generation >= 5 else "adamw_torch"))
    if job.expert_imbalance is not None and not model.is_moe:
        raise CostModelError("expert_imbalance is for mixtures of experts, and this model is dense; leave it out")
    experts = pick("experts_implementation", "grouped_mm" if generation >= 5 else "eager") if model.is_moe else "eager"
    if generation < 5 and experts != "eager":
        raise CostModelError(f"experts_implementation {experts!r} needs transformers 5; {framework} {version} loops (eager)")
    packing = pick("packing", False)
    kbit_prep = _prepares_for_kbit(job, framework, quantization, own, assumed)
    # SFTConfig turns checkpointing on, TrainingArguments does not; peft's k-bit preparation does, unless told not to.
    checkpointing = pick("gradient_checkpointing", own.get("gradient_checkpointing", is_trl or kbit_prep))
    offloading = job.activation_offloading
    if offloading is None:
        offloading = offloads_activations(framework, gradient_checkpointing=checkpointing, max_length=max_length)
        if offloading:
            assumed.append("activation_offloading")
    max_steps = job.max_steps if job.max_steps and job.max_steps > 0 else None
    return (
        ResolvedJob(
            method=method,
            quantization=quantization,
            double_quant=bool(pick("double_quant", own.get("double_quant", False)))
            if quantization in {"nf4", "fp4"}
            else False,
            prepare_model_for_kbit_training=kbit_prep,
            four_bit_keeps_inputs=quantization in {"nf4", "fp4"} and four_bit_keeps_inputs(framework, version),
            dequantises_by_table=dequantises_by_table(framework, version),
            load_towers=load_towers,
            lora_r=pick("lora_r", own.get("lora_r", 8)) if method != "full" else 0,
            lora_alpha=float(pick("lora_alpha", own.get("lora_alpha", 8))) if method != "full" else 0.0,
            lora_dropout=float(pick("lora_dropout", own.get("lora_dropout", 0.0))) if method != "full" else 0.0,
            lora_target_modules=_targets(job, model, own, assumed, load_towers) if method != "full" else (),
            lora_target_parameters=job.lora_target_parameters or (),
            lora_modules_to_save=job.lora_modules_to_save or (),
            use_dora=job.use_dora,
            adapter_dtype=adapter_dtype,
            dtype=dtype,
            autocast_dtype=autocast,
            per_device_train_batch_size=pick("per_device_train_batch_size", own.get("per_device_train_batch_size", 8)),
            gradient_accumulation_steps=pick("gradient_accumulation_steps", own.get("gradient_accumulation_steps", 1)),
            gradient_checkpointing=checkpointing,
            reentrant_checkpointing=_is_reentrant(
                job.gradient_checkpointing_kwargs or own.get("gradient_checkpointing_kwargs"), generation
            ),
            attn_implementation=pick("attn_implementation", "sdpa"),
            experts_implementation=experts,
            expert_imbalance=job.expert_imbalance,
            fused_experts=generation >= 5,
            optim=optim,
            torch_compile=bool(pick("torch_compile", False)),
            use_liger_kernel=use_liger,
            fused_loss=fused_loss,
            supervised_positions_only=is_trl and fused_loss == "chunked" and loss_type in {"nll", "chunked_nll", "dft"},
            upcasts_logits=is_before_transformers_45(framework, version),
            use_cache=bool(job.use_cache) if job.use_cache is not None else False,
            logits_to_keep=job.logits_to_keep or 0,
            activation_offloading=offloading,
            max_length=max_length,
            packing=packing,
            padding_free=bool(
                pick("padding_free", packing and keeps_packed_samples_apart(framework, job.attn_implementation))
            ),
            padding=pick("padding", "longest"),
            pad_to_multiple_of=pick("pad_to_multiple_of", own.get("pad_to_multiple_of", 1)),
            train_sampling_strategy=pick("train_sampling_strategy", "random"),
            supervised_fraction=job.supervised_fraction,
            num_gpus=job.num_gpus,
            sharding=read_sharding(job.fsdp, job.deepspeed, job.num_gpus),
            num_samples=job.num_samples,
            dataloader_drop_last=bool(job.dataloader_drop_last),
            num_train_epochs=float(pick("num_train_epochs", epochs))
            if max_steps is None
            else (job.num_train_epochs or epochs),
            max_steps=max_steps,
            eval_strategy=pick("eval_strategy", "no"),
            eval_steps=job.eval_steps,
            eval_delay=job.eval_delay or 0.0,
            eval_on_start=bool(job.eval_on_start),
            per_device_eval_batch_size=pick("per_device_eval_batch_size", own.get("per_device_eval_batch_size", 8)),
            num_eval_samples=job.num_eval_samples,
            save_strategy=pick("save_strategy", own.get("save_strategy", "steps")),
            save_steps=pick("save_steps", 500),
            save_only_model=bool(pick("save_only_model", False)),
            framework=framework,
            framework_version=version,
        ),
        tuple(assumed),
    )


def defaults_source(job: ResolvedJob, framework_version: str | None) -> str:
    """Whose defaults were filled in; ``framework_version`` as the job gives it. Only versions that were read are named."""
    newest, given = READ_VERSIONS["transformers"], framework_version
    if has_own_defaults(job.framework):
        read, major = READ_VERSIONS[job.framework], transformers_major(job.framework, job.framework_version)
        other = f" (for {job.framework} {given})" if given not in (None, read) else ""
        return f"{job.framework} {read} over transformers {newest if major == 5 else major}{other}"
    if job.framework in READ_VERSIONS or (given and job.framework not in OWN_KERNEL_FRAMEWORKS):
        return f"{job.framework} {job.framework_version}"
    return f"transformers {newest} (for {' '.join(filter(None, (job.framework, given)))})"


def _refuse_contradictions(job: Job) -> None:
    if job.bf16 and job.fp16:  # again: a job that other settings were put on is not validated as a whole
        raise CostModelError(TWO_AUTOCASTS)
    if job.method == "full":
        given = [name for name in _LORA_FIELDS if getattr(job, name) not in (None, False)]
        if given:
            raise CostModelError(
                f"method full trains every weight and takes no {', '.join(given)}; leave them out, or use method lora"
            )
    # packed rows are full whatever the padding, so there it contradicts nothing
    if job.padding_free and job.padding == "max_length" and not job.packing:
        raise CostModelError("padding_free has no padding and padding max_length pads every sample; leave one of them out")
    if job.save_strategy == "best" and job.eval_strategy in (None, "no"):
        raise CostModelError("save_strategy best needs evaluations to compare; set eval_strategy to steps or epoch")


def _method(job: Job, assumed: list[str]) -> tuple[str, str | None]:
    """(method, quantization): what says LoRA is LoRA, and on a quantised base QLoRA."""
    says_lora = any(value is not None for value in (job.lora_r, job.lora_target_modules, job.lora_target_parameters))
    method, quantization = job.method, job.quantization
    if method is None:
        assumed.append("method")
        method = "qlora" if quantization else "lora" if says_lora else "full"
    if method == "qlora" and quantization is None:
        assumed.append("quantization")
        quantization = "nf4"
    if method == "lora" and quantization in FOUR_BIT | {"int8"}:
        method = "qlora"
    if method == "full" and quantization in BITSANDBYTES:
        raise CostModelError(f"a base quantised to {quantization} cannot be fully fine-tuned; use method qlora")
    return method, quantization


def _adapter_dtype(
    job: Job, framework: str, version: str, method: str, quantization: str | None, dtype: str, assumed: list[str]
) -> str:
    """peft keeps the adapters of a 16-bit base in fp32 (``autocast_adapter_dtype``); TRL 1.x casts those of a quantised base
    to bf16 (sft_trainer.py); litgpt's are of the type of its weights."""
    if job.adapter_dtype is not None:
        return job.adapter_dtype
    if method != "full":
        assumed.append("adapter_dtype")
    if framework == "litgpt":
        return dtype
    is_cast = framework == "trl" and quantization and major_and_minor(version)[0] >= 1
    return "bfloat16" if is_cast else "float32"


def _prepares_for_kbit(
    job: Job, framework: str, quantization: str | None, own: Mapping[str, Any], assumed: list[str]
) -> bool:
    """Whether peft's own preparation is called; TRL 1.x does not call it."""
    if job.prepare_model_for_kbit_training is not None:
        return job.prepare_model_for_kbit_training
    if quantization not in BITSANDBYTES:
        return False
    assumed.append("prepare_model_for_kbit_training")
    return bool(own.get("prepare_model_for_kbit_training", framework != "trl"))


def _autocast(job: Job, framework: str, quantization: str | None, has_bf16: bool, assumed: list[str]) -> str | None:
    if job.fp16:
        return "float16"
    if job.bf16 is None:
        assumed.append("bf16")
        # SFTConfig 1.x turns bf16 on, TrainingArguments leaves it off; Unsloth turns on what the card has and its weights
        # are of (models/rl.py). litgpt's default is bf16-mixed, which it refuses for a quantised base (finetune/lora.py).
        if framework == "unsloth" and (job.dtype == "float16" or not has_bf16):
            return "float16"
        if framework == "axolotl":  # bf16 is auto (utils/config/__init__.py: resolve_dtype)
            return "bfloat16" if has_bf16 else "float16"
        is_mixed = framework == "litgpt" and job.dtype is None and not quantization
        return "bfloat16" if framework in ("trl", "unsloth") or is_mixed else None
    return "bfloat16" if job.bf16 else None


def _loaded_in(
    job: Job, model: ModelSpec, framework: str, method: str, quantization: str | None, generation: int, half: str
) -> str:
    """What the weights are loaded in where the job does not say it.

    ``half``: the 16-bit type it computes in (Axolotl: fp32 where it does not autocast).

    transformers 5: dtype="auto" is the default of from_pretrained; 4 loads fp32, but fp16 under 4- and 8-bit. TRL 1.x loads
    a model named by a string in fp32 (trainer/utils.py, create_model_from_path). LLaMA-Factory lifts what full tuning
    trains to fp32, which DeepSpeed takes back (model/adapter.py). Axolotl loads what it computes in
    (utils/config/__init__.py). Unsloth loads 16 bit (models/loader.py). litgpt's precision is mixed, and without mixing for
    a quantised base (finetune/lora.py).
    """
    if framework == "llamafactory":
        is_lifted = method == "full" and not (job.deepspeed and (job.bf16 or job.fp16))
        return "float32" if is_lifted else half
    if framework == "axolotl" or (framework == "unsloth" and method != "full"):
        return half
    if framework == "litgpt":
        return half if quantization else "float32"
    if framework == "trl" and not quantization:
        return "float32"
    if generation >= 5:
        return model.checkpoint_dtype or "float32"
    return "float16" if quantization in BITSANDBYTES else "float32"


def _loads_towers(job: Job, model: ModelSpec, framework: str, assumed: list[str]) -> bool:
    if not model.wrapper:
        if job.load_towers:
            raise CostModelError(
                f"load_towers is for multimodal models, and the config of {model.name} has no vision_config or audio_config "
                "beside a text_config; leave it out"
            )
        return False
    if job.load_towers is not None:
        return job.load_towers
    assumed.append("load_towers")
    return loads_towers(framework, model.wrapper)


def _targets(
    job: Job, model: ModelSpec, own: Mapping[str, Any], assumed: list[str], load_towers: bool
) -> str | tuple[str, ...]:
    if job.lora_target_modules is not None:
        return job.lora_target_modules
    if job.lora_target_parameters:
        return ()
    assumed.append("lora_target_modules")
    names = sorted({linear.leaf for layer, _ in model.layers for linear in layer.linears})
    loaded = model.wrapper if load_towers else model.family  # peft looks up the model_type of the class that is loaded
    targets: str | tuple[str, ...] | None = own.get("lora_target_modules")
    if targets is None or (job.framework == "litgpt" and not set(targets) & set(names)):
        targets = peft_targets(loaded)
    if targets is None and job.framework == "litgpt":  # its LoRA is on the one projection that queries and values share
        targets = tuple(name for name in names if name in FUSED_QUERY_KEY_VALUE) or None
    if targets is not None:
        return targets
    if not set(QUERY_AND_VALUE) & set(names):
        is_peft = job.framework not in ("litgpt", "torchtune", "other")
        why = f"peft has no default for {loaded} and stops without" if is_peft else f"none is known for {model.family}"
        raise CostModelError(
            f"lora_target_modules is required: {why}; give all-linear, or some of its linears: {', '.join(names)}"
        )
    return QUERY_AND_VALUE


def _is_reentrant(kwargs: Mapping[str, Any] | None, generation: int) -> bool:
    if kwargs and "use_reentrant" in kwargs:
        return bool(kwargs["use_reentrant"])
    return generation < 5  # transformers 5 checkpoints without re-entering, 4.x with
