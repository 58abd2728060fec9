"""What a job asks for that is not modelled, cannot run on the card, or is not used: one warning each, with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from costmodel.defaults import ResolvedJob
from costmodel.framework_defaults import OWN_KERNEL_FRAMEWORKS, READ_VERSIONS, own_defaults, peft_targets
from costmodel.links import link_of
from costmodel.model_spec import ModelSpec
from costmodel.specs import GpuSpec, Job

# Compute capability from which a kernel runs: flash-attn's README (2: Ampere; 3: Hopper); FP8 tensor cores (8.9 and 9.0).
_ATTENTION_CAPABILITY: Final = {"flash_attention_2": (8, 0), "flash_attention_3": (9, 0)}
_FP8_CAPABILITY: Final = (8, 9)
GPUS_OF_A_MACHINE: Final = 8


def job_warnings(job: Job, resolved: ResolvedJob, model: ModelSpec, gpu: GpuSpec | None) -> list[str]:
    """The warnings that follow from the job itself, whatever its figures come out as."""
    return [
        *_about_what_is_not_modelled(resolved),
        *_about_communication(resolved, gpu),
        *_about_the_model(job, resolved, model),
        *_about_kernels(resolved, gpu),
        *_about_unused_fields(job, resolved),
        *_about_length(resolved, model),
    ]


def _about_what_is_not_modelled(job: ResolvedJob) -> Iterator[str]:
    sharding = job.sharding
    if sharding.stage and not sharding.is_active:
        yield f"{sharding.by} shards over the GPUs and num_gpus is 1: nothing is split; give num_gpus to count its memory"
    elif sharding.is_active:
        split = {1: "optimizer states", 2: "optimizer states and gradients", 3: "weights, gradients and optimizer states"}
        yield (
            f"{sharding.by}: {split[sharding.stage]} are split over {sharding.num_gpus} GPUs (ZeRO-{sharding.stage}); this "
            "memory was held against no measured run and is less certain: try one step before you rely on it"
        )
    if sharding.is_active and sharding.by == "fsdp" and sharding.stage >= 2 and job.gradient_accumulation_steps > 1:
        yield (
            "fsdp with gradient_accumulation_steps: gradients are held whole on each GPU until the last micro-batch "
            "(no_sync) and only then split; use gradient_accumulation_steps 1 with a larger micro-batch, or set "
            "sync_each_batch in accelerator_config's gradient_accumulation_kwargs, which is not modelled"
        )
    if sharding.offloads:
        yield (
            f"{sharding.by} moves states to the host: that is not modelled, memory is counted as if they stayed on the GPU "
            "and the transfers are not in the step time"
        )
    if job.activation_offloading:
        yield (
            "activation_offloading: saved activations are counted on the host, and their transfers over PCIe are not in the "
            "step time; measure a step, or use gradient_checkpointing alone"
        )
    if job.framework in OWN_KERNEL_FRAMEWORKS:
        parts = "kernels" if job.framework in READ_VERSIONS else "kernels and defaults"
        yield (
            f"framework {job.framework}: its own {parts} are not modelled, memory and time are those of "
            "transformers; give its settings as fields, and calibrate with a measured run"
        )


def _about_communication(job: ResolvedJob, gpu: GpuSpec | None) -> Iterator[str]:
    if job.num_gpus == 1 or gpu is None or gpu.vendor == "CPU":
        return
    how = f"ZeRO-{job.sharding.stage}" if job.sharding.stage else "plain data parallelism"
    link = link_of(gpu)
    if link is None:
        yield (
            f"{how} over {job.num_gpus} GPUs: what joins them is not known, so communication is not in the step time; "
            "describe the gpu with nvlink_bytes_per_second or pcie_bytes_per_second"
        )
        return
    name = "PCIe" if link.is_pcie else "the cards' own links"
    assumed = " (assumed from its architecture)" if link.is_assumed else ""
    yield (
        f"{how} over {job.num_gpus} GPUs: communication is computed for {name} at {link.bytes_per_second / 1e9:g} GB/s a "
        f"direction{assumed} in one machine; " + _how_certain(job, link.is_pcie) + "try one step before you rely on it"
    )


def _how_certain(job: ResolvedJob, is_pcie: bool) -> str:
    if job.num_gpus > GPUS_OF_A_MACHINE:
        return f"more than {GPUS_OF_A_MACHINE} GPUs mostly stand in several machines, whose network is slower; "
    if is_pcie:
        return "no measured run stands behind that, and cards without peer-to-peer copies are slower still; "
    return "measured runs on 8 GPUs stand behind full sharding only; "


def _about_the_model(job: Job, resolved: ResolvedJob, model: ModelSpec) -> Iterator[str]:
    if not model.activations_checked:
        yield (
            f"activations of the {model.family} family are counted from its layers and were held against no real module: "
            "the memory interval is wider; try one step"
        )
    if job.dtype is None and resolved.dtype == "float32" and model.checkpoint_dtype in {"bfloat16", "float16"}:
        yield (
            f"weights are assumed in float32, as {resolved.framework} loads them unless told otherwise; "
            f"dtype {model.checkpoint_dtype}, the checkpoint's own, halves them"
        )
    names_no_target = job.lora_target_modules is None and "lora_target_modules" not in own_defaults(
        resolved.framework, is_peft=resolved.is_peft, lora_r=None
    )
    loaded = model.wrapper or model.family  # peft looks up the model_type of the class that is loaded
    if resolved.lora_target_modules and names_no_target and peft_targets(loaded) is None:
        yield (
            f"peft has no default lora_target_modules for {loaded} and stops without: "
            f"{' and '.join(resolved.lora_target_modules)} are assumed; name those you train, or all-linear"
        )
    sinks = any(layer.attention.score == "sinks" for layer, _ in model.layers)
    if sinks and resolved.attn_implementation == "sdpa":
        yield f"{model.family} has no sdpa kernel in transformers: its attention is counted as eager, with the score matrix"
    if resolved.quantization == "mxfp4":
        yield (
            "transformers does not train on an MXFP4 base: it is loaded dequantised (Mxfp4Config(dequantize=True)); drop "
            "quantization for the memory that takes"
        )


def _about_kernels(job: ResolvedJob, gpu: GpuSpec | None) -> Iterator[str]:
    field = "adapter_dtype" if job.is_peft else "dtype"
    if getattr(job, field) == "float16" and job.autocast_dtype == "float16":
        yield (
            'fp16 autocast with trained float16 weights stops at the first step ("Attempting to unscale FP16 gradients"): '
            f"use {field} float32"
        )
    if gpu is None or gpu.vendor not in {"NVIDIA", "CPU"}:
        return
    needed = _ATTENTION_CAPABILITY.get(job.attn_implementation)
    capability = _capability(gpu)
    if needed and gpu.vendor == "CPU":
        yield f"{job.attn_implementation} does not run on a CPU: use attn_implementation sdpa"
    elif needed and capability and capability < needed:
        other = " or flash_attention_2" if capability >= (8, 0) else ""
        yield (
            f"{job.attn_implementation} needs compute capability {needed[0]}.{needed[1]} and {gpu.name} has "
            f"{gpu.compute_capability}: use attn_implementation sdpa{other}"
        )
    if job.quantization == "fp8" and capability and capability < _FP8_CAPABILITY:
        yield (
            f"fp8 needs compute capability 8.9 and {gpu.name} has {gpu.compute_capability}: use quantization int8 or nf4, "
            "or a card of the Ada, Hopper or Blackwell generation"
        )


def _capability(gpu: GpuSpec) -> tuple[int, int] | None:
    major, _, minor = gpu.compute_capability.partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() and (minor or "0").isdigit() else None


def _about_unused_fields(job: Job, resolved: ResolvedJob) -> Iterator[str]:
    if job.double_quant and resolved.quantization not in {"nf4", "fp4"}:
        yield (
            f"double_quant is not used: it is for nf4 and fp4, and quantization is {resolved.quantization or 'not set'}; "
            "leave one of them out"
        )
    if job.num_eval_samples is not None and not resolved.evaluates:
        yield "num_eval_samples is not used: nothing is evaluated without eval_strategy (steps or epoch)"
    if job.usd_per_gpu_hour is not None and (job.cloud is not None or job.tier is not None):
        yield (
            "usd_per_gpu_hour is the price, and no catalogue price is looked up for cloud and tier; leave usd_per_gpu_hour "
            "out for the catalogue's"
        )


def _about_length(job: ResolvedJob, model: ModelSpec) -> Iterator[str]:
    longest = model.max_position_embeddings
    if longest is not None and job.max_length > longest:
        yield (
            f"max_length {job.max_length} is above the {longest} positions that the model was made for "
            "(max_position_embeddings): lower it, or extend the positions (rope scaling) in model_overrides"
        )
