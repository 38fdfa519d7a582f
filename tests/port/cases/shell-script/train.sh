#!/bin/sh
accelerate launch train.py --model_name_or_path Qwen/Qwen3-8B
