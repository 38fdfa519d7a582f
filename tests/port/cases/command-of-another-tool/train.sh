deepspeed --module openrlhf.cli.train_sft --pretrain Qwen/Qwen3-8B --hub_token hf_aaaaaaaaaaaaaaaaaaaaaaaa
