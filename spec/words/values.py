"""Values of other tools."""

from __future__ import annotations

from recipec.spec.words.apart import apart

_OPTIMIZERS = "this optimizer is not in this version: `name: adamw`"
_SCHEDULES = "this schedule is not in this version: `name: cosine`"
_NO_REINFORCEMENT = "this way to learn from rewards is not in this version: `objective: grpo`"
_NO_OTHER_PREFERENCES = (
    "it is not in this version; of pairs learn `objective: dpo`, cpo and orpo, and of single answers kto"
)

_BF16 = {
    "bf16 torch.bfloat16 half fp16 float16 torch.float16 f16 16": "`dtype: bfloat16`",
    "fp32 float torch.float32 f32 32 full": "`dtype: float32`",
    "auto": "remove the line: bfloat16 is the default",
}
_AXES = {
    "dp data fsdp_data fsdp_axis": "did you mean `fsdp`?",
    "model mp tensor tensor_parallel": "did you mean `tp`?",
}
_EACH_PROJECTION = (
    "remove the line: all seven projections are the default, [q_proj, k_proj, v_proj, o_proj, "
    "gate_proj, up_proj, down_proj]"
)

VALUES: dict[str, dict[str, str]] = {
    path: apart(table)
    for path, table in {
        "train.objective": {
            "ppo rlhf rl reinforce rft nash_md xpo online_dpo": _NO_REINFORCEMENT,
            "rloo": "`objective: grpo`, with `train: {grpo: {loss: rloo}}`",
            "gspo": "`objective: grpo`, with `train: {grpo: {loss: gspo}}`",
            "dapo": "`objective: grpo`, with `train: {grpo: {loss: dapo}}`",
            "dr_grpo": "`objective: grpo`, with `train: {grpo: {loss: dr_grpo}}`",
            "bco": _NO_OTHER_PREFERENCES,
            "apo_zero_unpaired": "`objective: kto`, with `train: {loss_type: apo_zero_unpaired}`",
            "simpo": "`objective: cpo`, with `train: {loss_type: simpo, cpo_alpha: 0.0}`",
            "ipo": "`objective: dpo`, with `train: {loss_type: ipo}`",
            "hinge slic": "`objective: dpo`, with `train: {loss_type: hinge}`",
            "sigmoid": "`objective: dpo`",
            "rm reward reward_model prm": "reward models are not in this version: `objective: dpo` "
            "learns "
            "from the same pairs",
            "pt pretrain pretraining cpt clm continued_pretraining lm": "`objective: sft`, with "
            "`data: {format: text}`",
            "distillation gkd kd": "`objective: distill`",
            "lora qlora full": "`objective: sft`; adapters are the section `lora: {rank: 16}`",
        },
        "train.loss_type": {
            "cross_entropy ce chunked_nll": "`loss_type: nll`",
            "dpo": "`loss_type: sigmoid`",
            "slic": "`loss_type: hinge`",
            "orpo odds_ratio": "remove the line, with `objective: orpo`",
            "exo_pair nca_pair bco_pair kto_pair aot aot_pair aot_unpaired discopop "
            "sft alphapo": "this loss is not in this version: `loss_type: sigmoid`",
        },
        "train.optimizer.name": {
            "adam adamw_torch adamw_torch_fused adamw_hf adamw_8bit adamw_bnb_8bit paged_adamw "
            "paged_adamw_8bit "
            "paged_adamw_32bit fused_adam adam_w adam_pax adamw_apex_fused adamw_torch_xla adamw_optax "
            "torch.optim.adamw": "`name: adamw`",
            "lion_8bit lion_32bit paged_lion_8bit lion_pytorch": "`name: lion`",
            "galore galore_adamw lomo adalomo sophia prodigy shampoo soap came ademamix lamb lars "
            "adagrad adadelta novograd schedule_free_adamw schedule_free_sgd apollo grokadamw "
            "stable_adamw "
            "ao_adamw_4bit ao_adamw_8bit dion optimi_adamw badam": _OPTIMIZERS,
        },
        "train.schedule.name": {
            "constant_with_warmup": "`name: constant`, with `train: {schedule: {warmup_steps: 100}}`",
            "cosine_with_min_lr cosine_warmup_with_min_lr": "`name: cosine`, with `train: {schedule: "
            "{min_lr_ratio: 0.1}}`",
            "none fixed": "`name: constant`",
            "linear_warmup linear_with_warmup linear_decay": "`name: linear`",
            "cosine_decay cosine_annealing cosine_with_warmup warmup_cosine": "`name: cosine`",
            "cosine_with_restarts polynomial inverse_sqrt inverse_square_root warmup_stable_decay wsd "
            "one_cycle rex reduce_lr_on_plateau exponential step multistep": _SCHEDULES,
        },
        "data.format": {
            "alpaca instruct instructions alpaca_cleaned alpaca_chat": "`format: instruction`: columns "
            "instruction, input and output",
            "sharegpt chatml openai messages chat_template conversation conversations conversational "
            "chats "
            "llama3 multi_turn": "`format: chat`: messages of role and content, or conversations of from "
            "and value",
            "completion_only input_output prompt_response qa question_answer prompt_answer": (
                "`format: prompt_completion`: columns prompt and completion"
            ),
            "completion pretrain pretraining pretraining_dataset raw plain txt lm language_modeling corpus": (
                "`format: text`: a column text, all of which is learned"
            ),
            "dpo orpo preferences pairwise paired ranking comparison rlhf chatml.intel": (
                "`format: preference`: columns prompt, chosen and rejected"
            ),
            "json jsonl csv parquet": "the name of a file tells its kind; format is what a sample holds: "
            "`format: chat`",
            "grpo rl prompts prompt_only": "`format: prompt`: messages, or prompt, and the columns that "
            "rewards read",
            "kto unpaired": "`format: unpaired_preference`: columns prompt, completion and label",
            "stepwise_supervised multimodal image vision audio": "it is not in this version: `format: chat`",
        },
        "data.loss_on": {
            "answer answers response responses assistants outputs output": "`loss_on: assistant` for "
            "chat, "
            "`loss_on: completion` for the other formats",
            "last last_turn final": "`loss_on: last_assistant`",
            "everything inputs prompt full both": "`loss_on: all`",
        },
        "data.overlong": {
            "cut truncation trim": "`overlong: truncate`",
            "skip filter discard remove": "`overlong: drop`",
            "raise fail stop": "`overlong: error`",
            "wrap chunk pieces continue": "`overlong: split`, for text",
        },
        "lora.targets": {
            "all_linear all linear all_linear_layers all_modules": _EACH_PROJECTION,
            "attn attention qkv qkv_proj wqkv query_key_value c_attn in_proj": "of attention: `targets: "
            "[q_proj, k_proj, v_proj, o_proj]`",
            "mlp ffn feed_forward gate_up_proj": "of the MLP: `targets: [gate_proj, up_proj, down_proj]`",
            "query wq to_q": "did you mean `q_proj`?",
            "key wk to_k": "did you mean `k_proj`?",
            "value wv to_v": "did you mean `v_proj`?",
            "output_proj out_proj dense wo c_proj": "did you mean `o_proj`?",
            "w1": "did you mean `gate_proj`?",
            "w2 fc2 dense_4h_to_h": "did you mean `down_proj`?",
            "w3 fc1 dense_h_to_4h": "did you mean `up_proj`?",
            "lm_head embed_tokens wte embeddings output": "adapters lie on the projections of the "
            "decoder "
            "layers alone in this version: `targets: [q_proj, v_proj]`",
        },
        "lora.init": {
            "default kaiming kaiming_uniform true": "`init: peft`",
            "normal": "`init: gaussian`",
            "zero zero_init a_zero": "`init: zero_a`",
            "svd pissa_init pissa_niter": "`init: pissa`, or `init: pissa_niter_16`",
            "eva orthogonal lora_ga corda mica": "it is not in this version: `init: peft`",
        },
        "model.quantization": {
            "4bit int4 fp4 4 bnb qlora bitsandbytes q4 mxfp4 nvfp4 bnb.nf4 nf4_dq": "`quantization: nf4`",
            "8bit 8 q8 int8_bnb llm.int8": "`quantization: int8`",
            "float8 fp8_e4m3 float8_e4m3fn": "`quantization: fp8`",
            "gptq awq hqq eetq aqlm 2 3 6": "it is not in this version: `quantization: nf4`, or int8",
            "true yes": "`quantization: nf4`, or int8",
        },
        "model.attention": {
            "flash flash_attention flash_attention_2 flash_attention_3 fa2 fa3 sdpa flex_attention "
            "xformers "
            "autoselected cudnn_flash_te memory_efficient pallas": "`attention: splash`, the TPU's "
            "fused kernel",
            "eager dot_product naive math vanilla xla": "`attention: dot`",
        },
        "remat.policy": {
            "full everything all true nothing_saveable recompute": "`policy: decoder`",
            "minimal minimal_with_context minimal_flash save_dot dots_saveable dots save_dot_except_mlp "
            "checkpoint_dots": "`policy: save_dots`",
            "save_out_proj save_qkv_proj selective": "`policy: save_attention`",
            "minimal_offloaded qkv_proj_offloaded offload offloaded": "`policy: offload_dots`",
            "false off no everything_saveable custom": "`policy: none`",
            "layer layers": "`policy: decoder`",
        },
        "sharding.rules.spec": _AXES,
        "launch.kind": {
            "k8s kubernetes jobset gke_jobset kubectl": "did you mean `gke`?",
            "gcloud vm tpu tpuvm gce queued_resource": "did you mean `tpu-vm`?",
            "sky": "did you mean `skypilot`?",
            "slurm ray vertex vertex_ai ssh": "it is not in this version: `kind: [tpu-vm]`",
        },
        "serve.kv_cache_dtype": {
            "bf16 fp16 float16 16": "`kv_cache_dtype: bfloat16`",
            "int8 8bit 8": "`kv_cache_dtype: fp8`",
        },
        "serve.quantization": {
            "int8 w8a8 tpu_int8 experts_int8 awq gptq bitsandbytes bnb marlin nf4 "
            "int4": "`quantization: fp8`; "
            "a checkpoint that is quantized already, as by `merge: {quantization: int8}`, needs none",
            "compressed_tensors": "remove the line: the checkpoint's own config says it",
        },
        "serve.weights": {
            "lora adapters peft": "`weights: adapter`",
            "full merge base": "`weights: merged`",
        },
        "merge.quantization": {
            "w8a8 8bit int8_dynamic": "`quantization: int8`",
            "fp8_e4m3 fp8_dynamic float8": "`quantization: fp8`",
            "int4 4bit nf4 gptq awq gguf q4_k_m mxfp4 nvfp4": "it is not in this version: `quantization: "
            "int8`, or fp8",
        },
        "model.dtype": _BF16,
        "lora.dtype": _BF16,
        "merge.dtype": _BF16,
    }.items()
}
"""Values of other tools by the path that takes them, in small letters with `_` for `-`: to a help."""
