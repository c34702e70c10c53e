#!/bin/bash
# All weights of an 8B model on eight devices. MODE=plain|checkpointing|ebbtide
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
    --train_type full \
    --torch_dtype bfloat16 \
    --fsdp_strategy full_shard \
    --nproc_per_node 8 \
    --activation_cpu_offload "$offload" \
    --gradient_checkpointing "$checkpointing" \
    --max_length 8192 \
    --packing true \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 4 \
    --learning_rate 1e-5 \
    --max_steps 50 \
    --save false \
    --output_dir "runs/8b-full-${MODE:-ebbtide}"
