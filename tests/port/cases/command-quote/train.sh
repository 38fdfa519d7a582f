trl sft --model_name_or_path "Qwen/Qwen3-8B
