"""Axolotl YAML, by the keys of its configuration reference."""

from __future__ import annotations

from collections.abc import Iterator

from example_configs import combined

MODELS = (
    "base_model: meta-llama/Llama-3.1-8B\n",
    "base_model: mistralai/Mistral-7B-v0.1\nmodel_type: MistralForCausalLM\ntokenizer_type: LlamaTokenizer\n",
    "base_model: Qwen/Qwen2.5-7B\ntrust_remote_code: false\nhub_model_id: me/my-qwen\n",
    "base_model: mistralai/Mixtral-8x7B-v0.1\nmodel_type: AutoModelForCausalLM\nis_mistral_derived_model: false\n",
    "base_model: NousResearch/Llama-2-7b-hf\ntokenizer_use_fast: true\nspecial_tokens:\n  pad_token: <pad>\n",
)

METHODS = {
    "full": "gradient_checkpointing: true\nlearning_rate: 2.0e-5\n",
    "lora": """\
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_checkpointing: true
learning_rate: 2e-4
""",
    "lora-modules": """\
adapter: lora
lora_model_dir:
lora_r: 16
lora_alpha: 32
lora_dropout: 0.1
lora_target_modules:
  - q_proj
  - k_proj
  - v_proj
  - o_proj
lora_modules_to_save: [embed_tokens, lm_head]
peft_use_rslora: true
learning_rate: 0.0002
""",
    "lora-8bit": """\
load_in_8bit: true
load_in_4bit: false
strict: false
adapter: lora
lora_r: 64
lora_alpha: 32
lora_target_linear: true
lora_fan_in_fan_out:
learning_rate: 0.0002
""",
    "qlora": """\
load_in_8bit: false
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
learning_rate: 0.0002
""",
    "qlora-bnb": """\
load_in_4bit: true
adapter: qlora
bnb_config_kwargs:
  bnb_4bit_quant_type: fp4
  bnb_4bit_use_double_quant: false
lora_r: 8
lora_alpha: 16
lora_target_modules: [gate_proj, up_proj, down_proj]
peft_use_dora: true
loraplus_lr_ratio: 16
learning_rate: 1e-4
""",
    "gptq": """\
gptq: true
gptq_disable_exllama: true
adapter: lora
lora_r: 8
lora_alpha: 32
lora_target_modules: [q_proj, v_proj]
learning_rate: 0.00017
""",
    "unfrozen": """\
unfrozen_parameters:
  - ^lm_head.weight$
  - model.layers.2[0-9]+.block_sparse_moe.experts
gradient_checkpointing: offload
learning_rate: 1e-5
""",
}

DATA = (
    """\
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/out
""",
    """\
chat_template: llama3
datasets:
  - path: fozziethebeat/alpaca_messages_2k_test
    type: chat_template
    field_messages: messages
    message_property_mappings: {role: role, content: content}
    roles: {user: [user], assistant: [assistant]}
val_set_size: 0.0
output_dir: ./out
shuffle_merged_datasets: true
""",
    """\
datasets:
  - {path: data/train.jsonl, ds_type: json, type: completion, field: text}
  - {path: data/more.jsonl, ds_type: json, type: completion}
val_set_size: 500
train_on_inputs: true
dataset_processes: 16
output_dir: /tmp/out
""",
)

SETTINGS = {
    "packed": """\
sequence_len: 4096
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
flash_attention: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
bf16: auto
tf32: false
warmup_steps: 10
evals_per_epoch: 4
eval_table_size:
saves_per_epoch: 1
weight_decay: 0.0
logging_steps: 1
""",
    "padded": """\
sequence_len: 2048
sample_packing: false
pad_to_sequence_len: false
group_by_length: true
gradient_accumulation_steps: 8
micro_batch_size: 1
eval_batch_size: 1
num_epochs: 1
optimizer: paged_adamw_32bit
lr_scheduler: linear
bf16: true
fp16:
flash_attention:
xformers_attention:
sdp_attention: true
save_steps: 200
save_total_limit: 3
early_stopping_patience: 3
wandb_project: tune
wandb_entity: me
wandb_watch: gradients
wandb_name: run-1
wandb_log_model: checkpoint
""",
    "zero": """\
sequence_len: 8192
sample_packing: true
attn_implementation: flash_attention_2
deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_params.json
gradient_accumulation_steps: 2
micro_batch_size: 1
num_epochs: 2
optimizer: adamw_torch
bf16: full
warmup_ratio: 0.1
save_strategy: epoch
save_only_model: true
""",
    "fsdp": """\
sequence_len: 4096
flash_attention: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 4
optimizer: adamw_torch_fused
fsdp:
  - full_shard
  - auto_wrap
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_offload_params: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
bf16: auto
max_steps: 500
eval_steps: 50
""",
    "fsdp2": """\
sequence_len: 16384
flex_attention: true
torch_compile: true
micro_batch_size: 1
gradient_accumulation_steps: 1
num_epochs: 1
dp_shard_size: 4
context_parallel_size: 2
fsdp_version: 2
fsdp_config:
  offload_params: false
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  reshard_after_forward: true
optimizer: ao_adamw_8bit
bf16: true
seed: 42
resume_from_checkpoint:
""",
    "liger": """\
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
liger_rms_norm: true
liger_glu_activation: true
liger_fused_linear_cross_entropy: true
sequence_len: 4096
sample_packing: true
flash_attention: true
micro_batch_size: 4
gradient_accumulation_steps: 1
num_epochs: 1
optimizer: paged_adamw_8bit
adam_beta2: 0.95
adam_epsilon: 0.00001
max_grad_norm: 1.0
bf16: auto
use_tensorboard: true
""",
    "cce": """\
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
cut_cross_entropy: true
sequence_len: 2048
eager_attention: true
micro_batch_size: 8
batch_size: 32
num_epochs: 1
optimizer: muon
bf16: false
fp16: true
neftune_noise_alpha: 5
debug:
local_rank:
""",
    "short": """\
micro_batch_size: 16
optimizer: lion_pytorch
xformers_attention: true
activation_offloading: false
excess_length_strategy: truncate
save_first_step: true
profiler_steps: 5
mlflow_tracking_uri: http://localhost:5000
mlflow_experiment_name: tune
comet_mode: offline
use_trackio: false
""",
}


def configs() -> Iterator[tuple[str, str]]:
    return combined(MODELS, METHODS, SETTINGS, DATA)
