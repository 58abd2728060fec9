"""LLaMA-Factory YAML, by the argument groups of its hparams."""

from __future__ import annotations

from collections.abc import Iterator

from example_configs import combined

MODELS = (
    "### model\nmodel_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct\ntrust_remote_code: false\n",
    "model_name_or_path: Qwen/Qwen2.5-7B-Instruct\nuse_fast_tokenizer: true\ncache_dir: /data/hub\n",
    "model_name_or_path: mistralai/Mixtral-8x7B-v0.1\nmodel_revision: main\n",
    "model_name_or_path: saves/base\nadapter_name_or_path: saves/first\nrope_scaling: linear\n",
)

METHODS = {
    "lora": """\
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
""",
    "lora-modules": """\
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_alpha: 64
lora_dropout: 0.1
lora_target: q_proj,v_proj
additional_target: embed_tokens,lm_head
use_rslora: true
loraplus_lr_ratio: 16.0
""",
    "dora": "stage: sft\ndo_train: true\nlora_rank: 32\nuse_dora: true\npissa_init: false\n",
    "qlora": """\
quantization_bit: 4
quantization_method: bnb
double_quantization: false
stage: sft
do_train: true
finetuning_type: lora
lora_target: q_proj,k_proj,v_proj,o_proj
upcast_layernorm: true
""",
    "qlora-8bit": "quantization_bit: 8\nstage: sft\nfinetuning_type: lora\nlora_target: all\nuse_unsloth_gc: true\n",
    "full": "stage: sft\ndo_train: true\nfinetuning_type: full\n",
    "freeze": """\
stage: sft
do_train: true
finetuning_type: freeze
freeze_trainable_layers: 8
freeze_trainable_modules: all
""",
    "pretrain": "stage: pt\ndo_train: true\nfinetuning_type: full\npure_bf16: true\nuse_badam: true\nbadam_mode: layer\n",
    "dpo": "stage: dpo\ndo_train: true\nfinetuning_type: lora\nlora_target: all\npref_beta: 0.1\npref_loss: sigmoid\n",
}

DATA = (
    """\
### dataset
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
""",
    """\
dataset: my_chats
dataset_dir: data
template: qwen
cutoff_len: 4096
packing: true
neat_packing: true
val_size: 0.1
enable_thinking: false
""",
    """\
dataset: wiki_demo
eval_dataset: wiki_eval
template: default
train_on_prompt: true
mix_strategy: concat
tokenized_path: saves/tokens
""",
)

SETTINGS = {
    "plain": """\
### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
""",
    "eval": """\
output_dir: saves/b
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
num_train_epochs: 1
fp16: true
flash_attn: sdpa
per_device_eval_batch_size: 2
eval_strategy: steps
eval_steps: 200
load_best_model_at_end: true
metric_for_best_model: eval_loss
optim: adamw_bnb_8bit
""",
    "zero3": """\
output_dir: saves/c
deepspeed: examples/deepspeed/ds_z3_offload_config.json
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
flash_attn: fa2
save_strategy: epoch
""",
    "zero2": """\
output_dir: saves/d
deepspeed: examples/deepspeed/ds_z2_config.json
per_device_train_batch_size: 2
max_steps: 300
bf16: true
enable_liger_kernel: true
use_swanlab: true
swanlab_project: tune
""",
    "fsdp": """\
output_dir: saves/e
fsdp: full_shard auto_wrap
fsdp_config: {fsdp_offload_params: false}
per_device_train_batch_size: 1
disable_gradient_checkpointing: true
bf16: true
flash_attn: auto
""",
    "kernels": """\
output_dir: saves/f
flash_attn: disabled
use_reentrant_gc: false
torch_compile: true
neftune_noise_alpha: 5
optim: paged_adamw_8bit
bf16: true
per_device_train_batch_size: 8
warmup_steps: 20
weight_decay: 0.1
max_grad_norm: 1.0
seed: 7
""",
    "ray": """\
output_dir: saves/g
ray_num_workers: 4
ray_run_name: tune
resources_per_worker: {GPU: 1}
placement_strategy: PACK
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
include_num_input_tokens_seen: true
push_to_hub: false
hub_strategy: every_save
""",
}


def configs() -> Iterator[tuple[str, str]]:
    return combined(MODELS, METHODS, SETTINGS, DATA)
