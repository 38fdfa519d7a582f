"""How a run was distributed over its GPUs: accelerate's file, and the settings of FSDP and DeepSpeed.

A recipe's mesh is chosen for its TPU. These files still affect the run by the number of data-parallel
devices, which multiplies the batch, and by precision, clipping and rematerialization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipec.port.engine import Says, Statements
from recipec.port.keys import REASONS, Keys, as_number, notes, table, words
from recipec.port.ledger import Ledger
from recipec.port.source import Source, join
from recipec.spec.codes import Code

MESH = REASONS["mesh"]
UNSAID = "the files do not give the number of GPUs of the run: {}; --devices N sets another number"


def assumed(keys: Keys, launch: Launch, rows: Mapping[str, Any]) -> Says:
    """State the number of GPUs of a run whose files do not say it."""
    count = devices(keys.ledger, launch)
    group = f"recipec assumes {count}, which share each row" if count > 1 else "recipec assumes one"
    yield keys.defaulted("--devices", count, rows, UNSAID.format(group))


def sharing(size: int) -> str:
    """Return the note on an axis whose devices work on the same rows."""
    return f"{size} devices share their rows: they are not data-parallel"


@dataclass(frozen=True)
class Launch:
    """How the run was started, according to the files.

    Attributes:
        processes: all GPUs; None if the files do not say.
        shared: GPUs that work on the same rows: tensor, context and sequence parallelism.
        mixed_precision: "no", "fp16", "bf16", "fp8"; None if the files do not say.
        remat: whether FSDP rematerializes activations.
        fsdp, deepspeed: whether FSDP or DeepSpeed runs the training.
    """

    processes: int | None = None
    shared: int = 1
    mixed_precision: str | None = None
    remat: bool = False
    fsdp: bool = False
    deepspeed: bool = False

    def with_(self, fsdp: Any, deepspeed: Any) -> Launch:
        """Return a copy, with FSDP or DeepSpeed on if the value of its key switches it on."""
        return replace(self, fsdp=self.fsdp or bool(fsdp), deepspeed=self.deepspeed or bool(deepspeed))

    def masters(self, float32: bool, mixed: bool) -> tuple[bool, str]:
        """Return whether full fine-tuning keeps float32 weights next to the ones it computes with, and why.

        Under mixed precision, accelerate converts FSDP's trained weights to float32. ZeRO keeps its own
        float32 copies in any precision.

        Args:
            float32: whether the weights are loaded in float32.
            mixed: whether the run uses mixed precision.
        """
        if float32:
            return True, ""
        if self.deepspeed or (self.fsdp and mixed):
            runs = "DeepSpeed" if self.deepspeed else "FSDP with mixed precision"
            return True, f"{runs} keeps float32 weights, and computes with them in 16 bits"
        return False, "the weights are trained directly in bfloat16, as in the tool"


@dataclass(frozen=True)
class DeepSpeed:
    """Settings that a DeepSpeed configuration overrides in the trainer.

    Attributes:
        optimizer: the optimizer's class ("AdamW"); None keeps the trainer's.
        scheduler: the scheduler's class ("WarmupDecayLR"); None keeps the trainer's.
        shared: devices that work on the same rows.
    """

    optimizer: str | None = None
    scheduler: str | None = None
    shared: int = 1


def devices(ledger: Ledger, launch: Launch) -> int:
    """Return the number of GPUs of the run: --devices, the files' number, or the fewest that it can have."""
    return ledger.devices or launch.processes or launch.shared


def ray(keys: Keys, launch: Launch) -> Statements[Launch]:
    """State `ray_num_workers`: Ray starts this many processes, each with one GPU."""
    count = keys.integer("ray_num_workers") if keys.given("ray_num_workers") else None
    if count is None or count < 1 or (keys.stands("use_ray") and not keys.flag("use_ray")):
        yield keys.same("ray_num_workers", note=REASONS["launch"])
        return launch
    yield keys.same("ray_num_workers", note=f"{count} processes, which multiply the rows of a step")
    return replace(launch, processes=count)


def accelerate(
    ledger: Ledger, source: Source, expected: Mapping[str, Any] | None = None
) -> Statements[Launch]:
    """State every key of accelerate's file (`accelerate launch --config_file`)."""
    keys = Keys(ledger, source, "accelerate", {"num_machines": 1, "mixed_precision": "no"})
    kind = str(keys.value("distributed_type") or "NO").upper()
    single = kind in ("NO", "NONE")
    launch = Launch(1 if single else None, fsdp=kind == "FSDP", deepspeed=kind == "DEEPSPEED")
    if kind in ("MEGATRON_LM", "XLA", "TPU"):
        note = f"{kind} is another trainer; recipec reads batches as in data parallelism"
        yield keys.unless("distributed_type", (), note)
    yield keys.same("distributed_type", note=MESH)
    if keys.given("num_processes") and (count := keys.integer("num_processes")) is not None:
        if count < 1:
            yield keys.same("num_processes", note="the launcher's own number: give it with --devices")
        elif single:
            yield keys.same("num_processes", note="one process: distributed_type is NO")
        else:
            launch = replace(launch, processes=count)
            yield keys.same("num_processes", note=f"{count} processes, which multiply the rows of a step")
    yield keys.same("num_processes", note="the launcher's own number: give it with --devices")
    launch = replace(launch, mixed_precision=keys.text("mixed_precision"))
    yield keys.same("mixed_precision", note="the trainer's own bf16 and fp16 override it")
    launch = replace(launch, remat=(yield from fsdp(keys.below("fsdp_config"))))
    launch = replace(launch, shared=(yield from parallelism(keys.below("parallelism_config"))))
    section = keys.below("deepspeed_config")
    if keys.given("deepspeed_config"):
        settings = yield from deepspeed(section, expected or {})
        launch = replace(launch, shared=launch.shared * settings.shared)
    for name in ("fp8_config", "megatron_lm_config"):
        if keys.mapping(name):
            yield keys.unless(name, (), "it changes the arithmetic or the trainer, and has no counterpart")
    yield from keys.follow(_CLUSTER)
    return launch


_CLUSTER = table("""
exact num_machines: num_processes counts the processes of all machines
speed dynamo_config dynamo_backend
launch compute_environment debug use_cpu machine_rank gpu_ids main_process_ip main_process_port rdzv_backend
    same_network main_training_function enable_cpu_affinity mpirun_config downcast_bf16 tpu_name tpu_zone
    tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env fp8_config megatron_lm_config fp16
    deepspeed_config fsdp_config parallelism_config ec2_instance_type iam_role_name image_uri profile region
    base_job_name pytorch_version transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file
    additional_args
    max_restarts tee log_dir role rdzv_conf rdzv_id rdzv_endpoint monitor_interval quiet module
    m no_python standalone start_method local_addr local_ranks_filter logs_specs num_cpu_threads_per_process
    include exclude hostfile launcher launcher_args no_ssh no_ssh_check no_local_rank force_multi save_pid
    enable_each_rank_log bind_cores_to_rank bind_core_list autotuning use_env cpu tpu vm env tpu_cluster
    no_tpu_cluster mpirun_hostfile multi_gpu use_parallelism_config use_megatron_lm
""")


def fsdp(keys: Keys) -> Statements[bool]:
    """State the keys of an `fsdp_config`, with or without the prefix fsdp_."""
    remat = False
    for name in (yield from _names(keys)):
        bare = name.removeprefix("fsdp_")
        if bare in ("activation_checkpointing", "xla_fsdp_grad_ckpt"):
            remat = remat or keys.flag(name)
            yield keys.same(
                name, {"remat.policy": "decoder"} if keys.flag(name) else None, "the same numbers"
            )
        elif bare in _FSDP:
            yield keys.same(name, note=_FSDP[bare])
    return remat


_FSDP = notes("""
mesh version fsdp sharding_strategy reshard_after_forward auto_wrap_policy transformer_layer_cls_to_wrap
    min_num_params use_orig_params sync_module_states xla xla_fsdp_v2 xla_fsdp_settings
    final_reshard_after_forward final_state_dict_type
speed offload_params cpu_offload cpu_offload_pin_memory cpu_ram_efficient_loading
    activation_checkpointing_offload backward_prefetch forward_prefetch limit_all_gathers
checkpoints state_dict_type
exact mixed_precision_policy: model.dtype sets the precision
""")


def parallelism(keys: Keys) -> Statements[int]:
    """State the keys of a `parallelism_config`, with or without accelerate's prefix."""
    shared = 1
    for name in (yield from _names(keys)):
        bare = str(name).removeprefix("parallelism_config_")
        if bare in ("tp_size", "cp_size", "sp_size"):
            size = keys.integer(name) or 1
            shared *= max(size, 1)
            yield keys.same(name, note=sharing(size))
        elif bare in ("dp_replicate_size", "dp_shard_size"):
            yield keys.same(name, note=MESH)
        elif bare.startswith(("cp_", "sp_")):
            yield keys.same(name, note=REASONS["speed"])
    return shared


_FROM_TRAINER = words(
    """train_micro_batch_size_per_gpu gradient_accumulation_steps train_batch_size gradient_clipping
    optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay
    scheduler.params.warmup_max_lr fp16.enabled bf16.enabled"""
)
"""Keys that the Trainer compares with its own arguments: `auto` copies them, other values must be equal."""

_DEEPSPEED = notes("""
mesh zero_optimization zero_stage zero3_init_flag zero3_save_16bit_model deepspeed_moe_layer_cls_names
speed offload_optimizer_device offload_param_device offload_optimizer_nvme_path aio offload_param_nvme_path
    activation_checkpointing zero_force_ds_cpu_optimizer communication_data_type
    seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor sparse_gradients
    disable_allgather compile hybrid_engine dataloader_drop_last tensor_parallel zero_quantized_weights
launch deepspeed_config_file deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter
    deepspeed_multinode_launcher
log steps_per_print wall_clock_breakdown dump_state memory_breakdown flops_profiler tensorboard wandb
    csv_monitor comms_logger
checkpoints checkpoint
exact fp16 bf16 amp torch_autocast: loss scaling and casts are part of the precision, which model.dtype sets
exact optimizer scheduler: the trainer's own argument applies
exact zero_allow_untested_optimizer: DeepSpeed's own check
exact data_types: recipec accumulates gradients in float32
""")


def deepspeed(keys: Keys, expected: Mapping[str, Any]) -> Statements[DeepSpeed]:
    """State the keys of a DeepSpeed configuration, or of accelerate's deepspeed_config."""
    config = keys.source.get(keys.prefix.rstrip(".")) if keys.prefix else keys.source.data
    optimizer = scheduler = None
    shared = 1
    for leaf in _leaves(config):
        first = leaf.partition(".")[0]
        if leaf in _FROM_TRAINER:
            yield from _agree(keys, leaf, expected)
        elif leaf in ("optimizer.type", "scheduler.type"):
            name = keys.text(leaf)
            optimizer, scheduler = (name, scheduler) if first == "optimizer" else (optimizer, name)
            yield keys.same(leaf, note=f"it replaces the trainer's {first}")
        elif leaf in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
            size = keys.integer(leaf) or 1
            shared *= max(size, 1)
            yield keys.same(leaf, note=sharing(size))
        elif first in _DEEPSPEED:
            yield keys.same(leaf, note=_DEEPSPEED[first])
        elif first in ("data_efficiency", "compression_training", "elasticity", "curriculum_learning"):
            yield keys.unless(
                leaf, (False,), f"{first} has no counterpart: recipec trains on all rows equally"
            )
    return DeepSpeed(optimizer, scheduler, shared)


def _names(keys: Keys) -> Statements[list[str]]:
    """Return the keys of a section. Record the section itself if it is empty or a file name."""
    path = keys.prefix.rstrip(".")
    value = keys.source.get(path)
    if isinstance(value, dict) and value:
        return [str(name) for name in value]
    if keys.source.has(path):
        yield Keys(keys.ledger, keys.source, keys.tool).same(path, note=MESH)
    return []


E1161 = Code(
    "E1161",
    "DeepSpeed contradicts the trainer",
    cause="A DeepSpeed setting differs from the Trainer's setting. The tool would stop with an error.",
    cure="Write `auto` there, or the same number in both.",
)


def _agree(keys: Keys, leaf: str, expected: Mapping[str, Any]) -> Says:
    value = keys.source.get(keys.prefix + leaf)
    wanted = expected.get(leaf)
    same = value == wanted or (as_number(value) is not None and as_number(value) == as_number(wanted))
    if value in ("auto", None) or leaf not in expected or same:
        note = "auto: the trainer's own" if value == "auto" else "the same as the trainer's own"
        yield keys.same(leaf, note=note)
        return
    stops = "the Trainer stops at that"
    message = f"DeepSpeed's {leaf} is {value}, and the trainer's own is {wanted}: {stops}"
    yield keys.refuse(leaf, E1161, message, f"{leaf.rpartition('.')[2]}: auto")


def _leaves(node: Any, path: str = "") -> list[str]:
    if isinstance(node, dict) and node:
        return [leaf for key, value in node.items() for leaf in _leaves(value, join(path, str(key)))]
    return [path] if path else []
