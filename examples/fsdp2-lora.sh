#!/bin/bash
# As ms-swift's users write FSDP2 with adapters.
set -euo pipefail

NPROC_PER_NODE=2 ebbtide sft \
    --model Qwen/Qwen3-8B \
    --train_type lora \
    --dataset 'tatsu-lab/alpaca#1000' \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --learning_rate 1e-4 \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --gradient_accumulation_steps 16 \
    --split_dataset_ratio 0.01 \
    --eval_steps 50 \
    --save_steps 50 \
    --save_total_limit 2 \
    --logging_steps 5 \
    --max_length 2048 \
    --warmup_ratio 0.05 \
    --dataloader_num_workers 4 \
    --activation_cpu_offload true \
    --fsdp fsdp2 \
    --output_dir output/fsdp2-lora
