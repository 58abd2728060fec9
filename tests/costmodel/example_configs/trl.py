"""TRL SFT and plain TrainingArguments, as YAML, by the fields of their dataclasses."""

from __future__ import annotations

from collections.abc import Iterator

from example_configs import combined

MODELS = (
    "model_name_or_path: Qwen/Qwen2.5-0.5B\nmodel_revision: main\ndtype: bfloat16\n",
    "model_name_or_path: meta-llama/Llama-3.1-8B\ntorch_dtype: auto\nattn_implementation: flash_attention_2\n",
    "model_name_or_path: mistralai/Mixtral-8x7B-v0.1\n",
    "model_name_or_path: google/gemma-2-9b\nattn_implementation: kernels-community/vllm-flash-attn3\n",
)

METHODS = {
    "full": "learning_rate: 2.0e-5\n",
    "lora": "use_peft: true\nlora_r: 32\nlora_alpha: 16\nlora_target_modules: all-linear\nlearning_rate: 2.0e-4\n",
    "lora-modules": """\
use_peft: true
lora_r: 8
lora_dropout: 0.0
lora_target_modules: [q_proj, v_proj]
lora_modules_to_save: [lm_head]
lora_task_type: CAUSAL_LM
use_rslora: true
""",
    "dora": "use_peft: true\nuse_dora: true\nlora_target_modules:\n  - down_proj\n",
    "qlora": """\
use_peft: true
load_in_4bit: true
bnb_4bit_quant_type: nf4
use_bnb_nested_quant: true
lora_r: 16
lora_alpha: 16
""",
    "lora-8bit": "use_peft: true\nload_in_8bit: true\nlora_r: 64\n",
    "experts": """\
use_peft: true
lora_target_modules: [q_proj, k_proj]
lora_target_parameters: [mlp.experts.gate_up_proj]
router_aux_loss_coef: 0.0
""",
    "init": """\
model_init_kwargs:
  dtype: float16
  attn_implementation: eager
  use_cache: false
""",
}

DATA = (
    "dataset_name: trl-lib/Capybara\ndataset_train_split: train\ndataset_test_split: test\nmax_length: 2048\n",
    """\
datasets:
  - path: HuggingFaceH4/ultrachat_200k
    split: train_sft
  - {path: json, data_files: data/train.jsonl}
test_split_size: 0.05
max_length: 4096
packing: true
""",
    "dataset_name: imdb\ndataset_text_field: text\nmax_seq_length: 512\ndataset_num_proc: 8\n",
    "dataset_name: my/prompts\ncompletion_only_loss: true\npadding_free: true\neos_token: <|im_end|>\n",
)

SETTINGS = {
    "plain": """\
output_dir: out
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
num_train_epochs: 1
logging_steps: 25
eval_strategy: steps
eval_steps: 100
push_to_hub: true
""",
    "long": """\
output_dir: out
bf16: true
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
per_device_train_batch_size: 1
per_device_eval_batch_size: 1
num_train_epochs: 3
lr_scheduler_type: cosine
warmup_ratio: 0.03
optim: paged_adamw_8bit
save_strategy: epoch
report_to: [wandb, tensorboard]
run_name: long
seed: 100
""",
    "fp16": """\
output_dir: out
fp16: true
gradient_checkpointing: false
evaluation_strategy: epoch
group_by_length: true
optim: adamw_8bit
max_steps: 1000
save_steps: 250
save_total_limit: 2
""",
    "liger": """\
output_dir: out
use_liger_kernel: true
torch_compile: true
per_device_train_batch_size: 4
optim: adamw_torch_fused
activation_offloading: true
pad_to_multiple_of: 16
loss_type: dft
assistant_only_loss: true
""",
    "zero3": "output_dir: out\naccelerate_config: zero3\nnum_processes: 4\nper_device_train_batch_size: 1\n",
    "zero2": """\
output_dir: out
deepspeed: configs/zero2.json
gradient_accumulation_steps: 4
eval_strategy: steps
dataloader_num_workers: 2
neftune_noise_alpha: 5
""",
    "fsdp": """\
output_dir: out
fsdp: full_shard auto_wrap
fsdp_config:
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_offload_params: true
activation_checkpointing: true
eval_packing: false
tf32: true
""",
    "adafactor": """\
output_dir: out
optim: adafactor
use_cache: false
eval_strategy: no
save_strategy: no
env: {WANDB_MODE: offline}
logging_first_step: true
packing_strategy: wrapped
""",
}


def configs() -> Iterator[tuple[str, str]]:
    return combined(MODELS, METHODS, SETTINGS, DATA)
