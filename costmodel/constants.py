"""The fitted and adopted constants, each with its unit, where it comes from and how well it is known."""

from __future__ import annotations

from typing import Final

from costmodel.units import MIB

CONSTANTS_VERSION: Final = "2026.11"

# --- memory -----------------------------------------------------------------------------------------------------------

# One workspace of cuBLAS (a memory snapshot shows it). Larger on Hopper (32 MiB is what NVIDIA recommends there).
CUBLAS_WORKSPACE_BYTES: Final = 8_519_680

# CUDA context, kernels and libraries of a torch process, outside torch's allocator: one constant, since no public row gives
# both torch's figure and the driver's, by card or version. Published: 140 MiB (T4) to 1.4 GiB; see the interval below.
CUDA_CONTEXT_BYTES: Final = 480 * MIB

# What the caching allocator holds beyond the allocated peak, as a share of what comes and goes in a step (weights and states
# lie densely): gaps between the loss tensors, and states created in the gaps of the first step. Medians of replayed
# allocation logs of 24 jobs (accuracy/replays.csv): LoRA 0.09 to 0.14, LoRA checkpointed 0.22 to 0.9 (the more, the smaller
# the vocabulary), full 0.03 to 0.5. No measured run was used.
ALLOCATOR_OVERHEAD: Final[dict[str, float]] = {"lora": 0.10, "lora_checkpointed": 0.30, "full": 0.17}
# ... of checkpointed GPTQ, whose weights are unpacked by operators of torch into blocks of five sizes: the median of 24
# replays (accuracy/qwen_replays.csv), 0.15 to 1.4.
GPTQ_ALLOCATOR_OVERHEAD: Final = 0.54

# Lengths that differ from batch to batch: cached blocks that the next batch does not fit into, at most (90 % of the replays
# of accuracy/replays.csv, orders and spreads of lengths mixed), as a multiple of the loss's bytes. Given back when the card
# is full, so they count in what the card shows and not in what fits.
VARIABLE_LENGTH_HOLES: Final[dict[str, float]] = {"lora": 4.0, "lora_checkpointed": 4.6, "full": 2.6}

# Positions whose logits exist at once where a loss of plain operators goes through them in chunks. Assumed; TRL's and
# Liger's own chunks follow from their code (head_memory.py).
LOSS_CHUNK_TOKENS: Final = 2048

# --- step time --------------------------------------------------------------------------------------------------------
# Six fitted constants and some adopted ones. Fitted on 178 public measured runs (10 cards, 9 sources) with equal weight for
# each class of job; a range is what leaving a source, a card or a series out moves them to. How to refit: docs/accuracy.md.

# Share of a card's matmul ceiling that the large matrix products of a training step reach. Not fitted: a free fit runs to
# its bound, that is, "ceiling" means what large products reach.
GEMM_EFFICIENCY: Final = 0.95
# Rows of a matrix product at which half the ceiling is reached: u(M) = M / (M + this). From the expert products of
# arXiv:2408.04693, Fig. 6 data (320 to 1,280 rows on an A40); insensitive.
GEMM_HALF_ROWS: Final = 128.0
# Attention kernels against large products.
ATTENTION_EFFICIENCY: Final = 0.6
# ... and the most that FlashAttention 2 reaches on Hopper, whose own instructions it does not use: FLOP/s, forward and
# backward, on an H100 (arXiv:2307.08691, section 4.1; arXiv:2407.08608 has "35 % utilization"). torch's sdpa runs the same
# kernels. FlashAttention 3 and cuDNN's attention use those instructions. Not fitted.
FLASH_2_ON_HOPPER_FLOPS_PER_SECOND: Final = 335e12
# Blackwell's data-centre cards have instructions of their own again, which it does not use either: taken to be no faster
# there. Which kernels sdpa takes there was not read, so it is left as fast as on other cards.
FLASH_2_IMPLEMENTATIONS: Final[dict[str, frozenset[str]]] = {
    "9.0": frozenset({"flash_attention_2", "sdpa"}),
    "10.0": frozenset({"flash_attention_2"}),
    "10.3": frozenset({"flash_attention_2"}),
}
# Share of the data-sheet bandwidth that streaming kernels reach (aiconfigurator 0.8; llm-analysis 0.9).
BANDWIDTH_EFFICIENCY: Final = 0.8
# Matmul ceiling over data-sheet peak where nobody measured it (A100 0.87, H100 0.80, B200 0.78 where somebody did).
CEILING_OVER_PEAK: Final = 0.87
# ... of generations that reach less, by compute capability. Volta: 83 of a V100's 125 TFLOP/s (arXiv:1803.04014). Adopted.
CEILING_OVER_PEAK_OF_GENERATION: Final[dict[str, float]] = {"7.0": 0.66}
# Cards that hold their matmul rate down to stay inside their power limit reach sqrt(peak * watts * this), FLOP/s for each
# watt, by compute capability. From one card each: A100 SXM and H100 SXM as measured, A40, L40S and RTX PRO 6000 Workstation
# from their rows (108, 210 and 408 TFLOP/s). A faster clock needs a higher voltage, so a watt buys less the more there are:
# the rate follows the power by an exponent of a third (voltage follows the clock) to one (voltage at its floor). A half is
# what one die under two limits shows, measured by one and the same programme: MI300X (750 W) 668, MI325X (1,000 W) 785
# TFLOP/s, 0.56; A100 PCIe to SXM, B200 to GB200 and H100 to GH200, less held down, 0.2. Adopted.
POWER_LIMITED_FLOPS_PER_SECOND_PER_WATT: Final[dict[str, float]] = {
    "8.0": 0.589e12,
    "8.6": 0.260e12,
    "8.9": 0.348e12,
    "9.0": 0.912e12,
    "12.0": 0.551e12,
}
# ... and of Turing, which nobody measured here, the rate itself for each watt: an older process (12 nm against 8 nm) does no
# more for one than an A40. That is what the base clocks say, which NVIDIA promises under load: T4 585 of 1,590 MHz (24 of 65
# TFLOP/s), Quadro RTX 6000 1,440 and TITAN RTX 1,350 of 1,770 (106 and 100 of 130). Adopted. A lower clock is one of integer
# units too, so 4-bit weights are taken out at it.
CEILING_FLOPS_PER_SECOND_PER_WATT: Final[dict[str, float]] = {"7.5": 0.36e12}
# GeForce cards are not held down: their matrix units do half of what the same die does elsewhere. They run above their
# data-sheet rate, which is at a boost clock that the card itself exceeds while power and temperature allow (an RTX 4090 of
# 2,520 MHz at 2.7 GHz and more). In the generations where somebody measured some: RTX 4070 Ti SUPER, 4090, 5060 Ti, 5090,
# of whose nine runs eight were 2 to 13 % too slow at 1.02; 1.08 was chosen by looking at left-out errors.
GEFORCE_ABOVE_PEAK: Final = frozenset({"8.6", "8.9", "12.0"})
GEFORCE_CEILING_OVER_PEAK: Final = 1.08

# Element-wise traffic: real bytes over bytes counted by hand from the eager operators. Fitted; 0.9 to 1.1.
ELEMENTWISE_FACTOR: Final = 1.0
# Cache rule: tensors of w bytes reach DRAM with share w / (w + this * L2), and no less than the floor.
# Chosen from 0.05, 0.1, 0.2, 0.3 by the left-out errors, which differ by a point.
L2_SHARE: Final = 0.1
L2_FLOOR: Final = 0.25

# Exponent of the sum of device and host time: 1 adds them, infinity takes the larger.
OVERLAP_EXPONENT: Final = 3.0
# Seconds Python and torch take to dispatch one operator. Fitted; 3.3e-6 to 3.5e-6.
SECONDS_PER_OPERATOR: Final = 3.35e-6
# One call into a 4- or 8-bit linear (bitsandbytes, GPTQ; 2023-24), in dispatched operators: an autograd function of Python,
# two or three library calls and the product. A fit of its seconds alone gives 0.05e-3 to 0.11e-3, that is 15 to 32.
OPERATORS_PER_QUANTIZED_CALL: Final = 25.0
# Cost of an operator inside a Python loop over experts, over that of another: each expert waits for the number of its
# tokens, so the queue is empty and every small kernel is waited for. Fitted on two loops, transformers 4's of Mixtral and
# BlackMamba's own; 2.0 to 2.3, the upper end with all of Mixtral left out.
LOOP_OPERATOR_FACTOR: Final = 2.0
# Experts that a padding token seems to pass through where more than its top-k: a finding, not an explanation. BlackMamba's
# code on samples of different lengths takes longer than on equal ones, by the same time for each padding token in both data
# sets of arXiv:2408.04693, with two experts a token and hardly with eight. Fitted; 6.5 to 7.4. No other family is seen to.
EXPERTS_OF_PADDING: Final[dict[str, float]] = {"blackmamba": 7.0}
# On a probed processor, in dispatched operators: what the Trainer and accelerate do in a step beside the model and the
# optimizer (batch, schedule, callbacks, gradients to None: 2.3 to 3.1 ms where an operator took 2.2 us, inside runs, whose
# own work leaves nothing of it in the caches), and what each expert adds to a grouped product, which is a loop over the
# experts inside one kernel (8 us: two views, a product). Measured on the models of benchmarks/cpu_proof.py --shapes choose;
# not fitted.
TRAINER_OPERATORS: Final = 1200.0
GROUP_OPERATORS: Final = 5.0
# Dequantisation of one weight, each pass: bytes moved (codes and scales read, 16 bits written). GPTQ fitted (21 to 22, one
# source): the 2023 code unpacks through wider intermediates, 16.5 counted from it; AWQ is taken to be as slow.
DEQUANTISATION_BYTES: Final[dict[str, float]] = {
    "nf4": 2.56,
    "fp4": 2.56,
    "int8": 3.0,
    "fp8": 3.0,
    "mxfp4": 2.53,
    "gptq-int4": 22.0,
    "awq-int4": 22.0,
}
# ... and integer instructions, of bitsandbytes before 0.48, which walks a tree of comparisons. Not fitted: 359 us for 4096 x
# 14336 weights on an A40, which has 9.35e12 integer instructions a second (arXiv:2408.04693, Fig. 6 data). FP4 by the length
# of its kernel against that of NF4 (640 and 960 machine instructions for 16 weights, sm_86 of the wheel of 0.45.5).
TREE_DEQUANTISATION_INSTRUCTIONS: Final[dict[str, float]] = {"nf4": 57.0, "fp4": 38.0}
# ... and from 0.48 on, which looks the value up in a table: by the length of its kernels (440 and 528, wheel of 0.48.2).
# Never timed.
TABLE_DEQUANTISATION_INSTRUCTIONS: Final[dict[str, float]] = {"nf4": 26.0, "fp4": 31.0}

# Bytes moved for each trained element by one optimizer step: (16-bit parameters, fp32 parameters). foreach makes 26 passes
# over a tensor; a fused kernel reads and writes each once.
OPTIMIZER_BYTES_FOREACH: Final = (52.0, 104.0)
OPTIMIZER_BYTES_FUSED: Final = (16.0, 28.0)
# ... of transformers' Adafactor, which lifts gradient and parameter to fp32 and goes through them with plain operators:
# squares, means by row and column, their product, clipping (5.24, optimization.py). Counted by hand.
OPTIMIZER_BYTES_ADAFACTOR: Final = (102.0, 84.0)
# Bytes moved for each logit by the loss, forward and backward: stock loss, chunked head. Counted by hand.
LOSS_BYTES_PER_LOGIT: Final[dict[str, float]] = {"stock": 44.0, "chunked": 30.0, "fused": 12.0}

# Host time of other stacks over that of a plain Trainer loop. Fitted; litgpt of 2023 1.2 to 1.3. A new stack is 1 to 2.5.
HOST_FACTOR: Final[dict[str, float]] = {"litgpt": 1.25}
# Stacks whose layers copy from the host in the forward (litgpt's fused query/key/value adapter, 2023): host and device take
# turns, so their times add.
WAITING_FRAMEWORKS: Final = frozenset({"litgpt"})
# Share of the data sheet's link that a large collective reaches (NCCL's bus bandwidth inside one machine, as commonly
# reported; PCIe goes through a switch or the processor). Adopted.
NVLINK_EFFICIENCY: Final = 0.8
PCIE_EFFICIENCY: Final = 0.5
# torch.compile: share of dispatched operators that is assumed to remain. Its element-wise bytes are counted as fused.
COMPILED_HOST_SHARE: Final = 0.3

# --- from a step to a run ----------------------------------------------------------------------------------------------
# Rules of thumb, no measurement: the answer shows them as startup_seconds and save_seconds, and its totals halve and double
# them in their interval. A run's own measurements replace them.
STARTUP_SECONDS: Final = 45.0  # imports, CUDA start, data set mapping
# Where no card is started: imports of torch, transformers and peft. Our own measurement, of small Trainers on a shared
# machine with two processors: 7 s of a processor's work, 16 s on the clock, 18 to 30 s beside other heavy work.
CPU_STARTUP_SECONDS: Final = 16.0
LOAD_BYTES_PER_SECOND: Final = 1.0e9  # checkpoint from a local or network disk into the device
SAVE_BYTES_PER_SECOND: Final = 0.8e9
FIRST_STEP_FACTOR: Final = 5.0  # the first step against the others: kernel selection, allocator growth
COMPILE_SECONDS: Final = 60.0

# --- intervals ---------------------------------------------------------------------------------------------------------
# Half widths of the 80 % interval, as a log ratio, by regime: the quantile of the errors with a whole source left out, each
# source weighing the same (docs/accuracy.md), rounded up.
STEP_INTERVAL: Final[dict[str, float]] = {
    "device": 0.14,
    "mixed": 0.18,
    "host": 0.17,
    "moe_device": 0.30,
    "moe_mixed": 0.14,
    "moe_host": 0.20,
}
# ... and of a step inside the range of a calibration with two factors: the 80 % quantile over the runs between two measured
# batches, every pair that is allowed in each series of the paper and of Qwen 1's lengths, each series weighing the same:
# 0.086 (tests/test_calibration_accuracy.py).
CALIBRATED_STEP_INTERVAL: Final = 0.09
UNMEASURED_CARD_FACTOR: Final = 1.4
UNKNOWN_STACK_FACTOR: Final = 1.6
SEVERAL_GPUS_FACTOR: Final = 1.5  # assumed
# The width grows with the distance of the nearest measured run beyond 1, up to a limit. Assumed.
WIDENING_PER_DISTANCE: Final = 0.15
MAX_DISTANCE_FACTOR: Final = 1.5
# Families whose Python loop over experts a measured run covers. No run covers grouped products of stacked experts.
MEASURED_EXPERT_LOOPS: Final = frozenset({"mixtral", "blackmamba"})
# Cards that measured step times cover.
MEASURED_CARDS: Final = frozenset(
    {
        "A40",
        "A100-SXM4-40GB",
        "A100-SXM4-80GB",
        "H100 SXM",
        "L40S",
        "RTX 4090",
        "RTX 5090",
        "RTX 5060 Ti 16GB",
        "RTX 4070 Ti SUPER",
        "RTX PRO 6000 Blackwell Workstation",
    }
)
# Memory: what the card shows over what is computed, (low, high) of the 80 % interval by what is known of the job. From the
# errors on public rows with each source weighing the same (docs/accuracy.md). "unread": stacks whose code was not read, and
# remote code; its width is that of the rows of Qwen 1, whose figures do not say what they measure.
MEMORY_INTERVAL: Final[dict[str, tuple[float, float]]] = {
    "plain": (0.99, 1.045),
    "quantised": (0.99, 1.045),
    "unread": (0.95, 1.13),
}
# ... and of what a stack with kernels of its own (Unsloth) may save of activations, logits and temporary buffers, which are
# counted as transformers'. Assumed from Unsloth's own claim (its README: up to 70 % less memory).
OWN_KERNELS_SAVE_AT_MOST: Final = 0.7
# ... and of the activations of a family that no real module was held against. Assumed.
UNCHECKED_ACTIVATIONS_SHARE: Final = 0.3
# From published figures: 141 MiB (a T4 process; fitcheck), 500 MiB and 650 MB (fitcheck's and gpu_poor's defaults),
# 1,000 MiB (vram-calculator), 1.4 GiB "all overhead" (Unsloth). No public row gives both torch's figure and the driver's.
CUDA_CONTEXT_INTERVAL_BYTES: Final = (140 * MIB, 1400 * MIB)
