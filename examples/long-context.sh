#!/bin/bash
# Sequences of 32k tokens: both flags together ask for the memory of checkpointing, by ebbtide.
set -euo pipefail

# Lengths vary, and offloading changes the order of sizes: fewer gaps between blocks of device memory.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

ebbtide sft \
    --model Qwen/Qwen3-8B \
    --dataset 'Yukang/LongAlpaca-12k#2000' \
    --train_type lora \
    --torch_dtype bfloat16 \
    --attn_impl flash_attention_2 \
    --fsdp_strategy full_shard \
    --nproc_per_node 8 \
    --activation_cpu_offload true \
    --gradient_checkpointing true \
    --max_length 32768 \
    --packing true \
    --max_steps 100 \
    --save_steps 50 \
    --save_total_limit 2 \
    --output_dir runs/long-context
