"""TRL's SFTTrainer, Mixtral in 4 bits with LoRA: look before you launch, then train with the cost in view.

    python examples/sft_qlora_mixtral.py --dataset train.jsonl --usd-per-gpu-hour 3.50     # no GPU has run this line yet
    python examples/sft_qlora_mixtral.py --tiny

transformers 5 keeps Mixtral's experts in one 16-bit tensor a layer, which 4-bit loading does not touch: the estimate says so
(some 90 GiB), and the script stops before it would. Needs peft, trl, bitsandbytes, datasets.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from peft import LoraConfig
from tiny import data_of, options, tiny_model, tokenizer_of
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from ftcost_callback import FTCostCallback, estimate_trainer


def main() -> int:
    given = options(__doc__, model="mistralai/Mixtral-8x7B-v0.1").parse_args()
    tokenizer = tokenizer_of(given)
    name = given.model
    if given.tiny:
        name = tempfile.mkdtemp()
        tiny_model("mixtral", tokenizer).save_pretrained(name)
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(name, quantization_config=four_bits, dtype=torch.bfloat16),
        args=SFTConfig(
            output_dir=str(given.output_dir),
            per_device_train_batch_size=4,
            max_length=128 if given.tiny else 1024,
            max_steps=6 if given.tiny else -1,
            num_train_epochs=1,
            bf16=torch.cuda.is_available(),
            gradient_checkpointing=True,
            logging_steps=2 if given.tiny else 10,
            save_strategy="no" if given.tiny else "epoch",
            report_to="none" if given.tiny else "wandb",
        ),
        train_dataset=data_of(given),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
        callbacks=[FTCostCallback(usd_per_gpu_hour=given.usd_per_gpu_hour)],
    )
    answer = estimate_trainer(trainer, usd_per_gpu_hour=given.usd_per_gpu_hour)
    print(answer)
    if answer.verdict == "does_not_fit":
        return 3
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
