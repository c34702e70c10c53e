#!/bin/bash
# Adapters of an 8B model on two devices. MODE=plain|checkpointing|ebbtide
set -euo pipefail
case "${MODE:-ebbtide}" in
  plain)         offload=false checkpointing=false ;;
  checkpointing) offload=false checkpointing=true ;;
  ebbtide)       offload=true  checkpointing=false ;;
  *) echo "MODE is ${MODE}; expected plain, checkpointing or ebbtide" >&2; exit 2 ;;
esac

ebbtide sft \
    --model Qwen/Qwen3-8B \
    --dataset 'tatsu-lab/alpaca#2000' \
    --train_type lora \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --torch_dtype bfloat16 \
    --fsdp_strategy full_shard \
    --nproc_per_node 2 \
    --activation_cpu_offload "$offload" \
    --gradient_checkpointing "$checkpointing" \
    --max_length 4096 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 16 \
    --num_train_epochs 1 \
    --output_dir "runs/8b-lora-${MODE:-ebbtide}"
