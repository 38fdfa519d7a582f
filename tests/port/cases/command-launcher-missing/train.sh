#!/bin/bash
accelerate launch --config_file fsdp.yaml --main_process_port 29501 \
    -m trl.scripts.sft --model_name_or_path Qwen/Qwen3-8B --dataset_name example/notes \
    --dtype bfloat16 --assistant_only_loss --packing notes
