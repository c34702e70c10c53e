#!/bin/bash
# ms-swift's activation offloading on two Ascend NPUs. Not run on NPUs by us; copies are synchronous there.
set -euo pipefail

# What torch_npu's users set; docs/guides/from-ms-swift-and-verl.md, Environment.
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True TASK_QUEUE_ENABLE=2 COMBINED_ENABLE=1
export CPU_AFFINITY_CONF=1 TORCH_HCCL_ZERO_COPY=1

ASCEND_RT_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 ebbtide sft \
    --model Qwen/Qwen3-8B \
    --train_type lora \
    --use_hf false \
    --dataset 'AI-ModelScope/LongAlpaca-12k#2000' \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --learning_rate 1e-4 \
    --lora_rank 8 \
    --lora_alpha 32 \
    --gradient_checkpointing false \
    --weight_decay 0.1 \
    --target_modules all-linear \
    --gradient_accumulation_steps 16 \
    --split_dataset_ratio 0.01 \
    --eval_steps 100 \
    --save_steps 5 \
    --save_total_limit 2 \
    --logging_steps 5 \
    --max_length 4096 \
    --output_dir output/ascend \
    --system 'You are a helpful assistant.' \
    --warmup_ratio 0.05 \
    --dataloader_num_workers 4 \
    --fsdp examples/ascend/fsdp2.json
