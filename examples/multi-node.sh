#!/bin/bash
# Two nodes: shards within a node, copies across them. On each node: NODE_RANK=0|1 MASTER_ADDR=first-node bash ...
set -euo pipefail
export NNODES=2 MASTER_PORT="${MASTER_PORT:-29500}" NODE_RANK MASTER_ADDR

ebbtide sft \
    --model Qwen/Qwen3-8B \
    --dataset 'tatsu-lab/alpaca#2000' \
    --bf16 true \
    --fsdp_strategy hybrid_shard \
    --nproc_per_node 8 \
    --activation_cpu_offload true \
    --max_length 8192 \
    --packing true \
    --save_steps 100 \
    --resume_from_checkpoint latest \
    --output_dir runs/multi-node
