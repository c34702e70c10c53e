#!/bin/bash
# Rows with images: {"messages": [{"role": "user", "content": "<image>What is this?"}, ...], "images": ["cat.png"]}
set -euo pipefail

NPROC_PER_NODE=2 ebbtide sft \
    --model Qwen/Qwen2.5-VL-7B-Instruct \
    --dataset "${ROWS:-rows.jsonl}" \
    --train_type lora \
    --freeze_vit true \
    --torch_dtype bfloat16 \
    --fsdp_strategy full_shard \
    --activation_cpu_offload true \
    --max_length 4096 \
    --num_train_epochs 1 \
    --output_dir runs/vision-language
