"""Tunix's command for GRPO (tunix.cli.grpo_main), with the same file as its supervised fine-tuning.

`rl_training_config` and `lora_config` of a file replace those of base_config.yaml; other sections are merged
with them. The roles' sections inherit what they lack from `model_config`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from recipec.compiler.wording import listing
from recipec.port.engine import Says, Statements
from recipec.port.keys import REASONS, table
from recipec.port.meaning import datasets, reinforcement, rows, sharding
from recipec.port.meaning.rows import Rows
from recipec.port.refusals import E1143, E1144, E1145, E1149, E1163

if TYPE_CHECKING:
    from recipec.port.dialects.tunix import Tunix

GROUPS = {"num_generations": 2, "num_iterations": 1, "beta": 0.08, "epsilon": 0.2}
ROLLOUT = {
    "total_generation_steps": 768,
    "max_prompt_length": 256,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
}
"""The values of base_config.yaml."""
AGENTIC = ("agentic_grpo_config", "agentic_ppo_config", "agent_class_path", "env_class_path", "agent_kwargs")
LOSSES = {
    "sequence-mean-token-mean": {"loss": "grpo"},
    "token-mean": {"loss": "dapo"},
    "sequence-mean-token-scale": {"loss": "dr_grpo"},
    "seq-mean-token-sum": {"loss": "luspo", "ratio": "token"},
}
"""The values of loss_agg_mode."""
KL = {"kl": "k1", "low_var_kl": "k3"}
OF_GROUPS = table("""
learned algo_variant=grpo advantage_estimator=grpo policy_loss_fn=grpo reward_manager=sequence-level
    kl_clamp_value=null
""")
OF_ROLLOUT = table("""
speed kv_cache_size tensor_parallel_size data_parallel_size expert_parallel_size return_logprobs
    rollout_vllm_max_num_seqs rollout_vllm_max_num_batched_tokens rollout_vllm_hbm_utilization
lost eos_tokens: recipec ends a completion at the ends of the chat template and of generation_config.json
exact seed data_type rollout_mapping_config: recipec draws with the model that it trains
""")
OF_TRAINING = table("""
speed rollout_micro_batch_size compute_logps_micro_batch_size
exact critic_optimizer_config critic_optimizer: GRPO has no critic
""")
OTHERS = ("ppo_config", "critic_model_config", "optimizer_config", "training_config", "max_target_length")
ROLES = ("actor_model_config", "reference_model_config", "rollout_model_config")
DEVIATION = "recipec adds 1e-4 to a group's deviation, as TRL does, and Tunix 1e-6"
NOISE = (
    "recipec draws other noise in each step and trains the end of an answer; Tunix's own rollout does neither"
)
ASKED = """\
    "You are given a problem. Think about the problem and provide your reasoning. "
    "Place it between <reasoning> and </reasoning>. Then, provide the final answer "
    "(i.e., just one numerical value) between <answer> and </answer>."
"""
SUMS = f'''"""Rows of GSM8K as Tunix asks them: a prompt, and the number that the answer ends with."""

SYSTEM = (
{ASKED})


def convert(row):
    """A row of `question` and `answer`."""
    answer = row["answer"].split("####")[1].strip().replace(",", "") if "####" in row["answer"] else None
    return {{
        "prompt": [{{"role": "system", "content": SYSTEM}}, {{"role": "user", "content": row["question"]}}],
        "question": row["question"],
        "answer": answer,
    }}
'''
TEXTS = '''


def texts(score):
    """Let a function of Tunix score the texts of completions."""
    from functools import wraps

    @wraps(score)
    def scored(*, completions, **columns):
        answers = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
        return score(completions=answers, **columns)

    return scored


'''


def command(run: Tunix) -> Says:
    """Learn whether the file is for GRPO. Agents and critics have no counterpart."""
    keys = run.keys
    agentic = next((key for key in AGENTIC if keys.given(key) and keys.value(key) not in ("", {})), None)
    if agentic is None and str(keys.value("training_mode") or "grpo") != "grpo":
        agentic = "training_mode"
    if agentic is not None:
        message = (
            f"`{agentic}` is for agents, which act in several turns; recipec draws one answer to a prompt"
        )
        yield keys.refuse(agentic, E1149, message, "port a config of grpo_main with training_mode: grpo")
    elif keys.given("ppo_config") and not keys.given("grpo_config"):
        message = "this is a run of Tunix's ppo_main, which trains a critic; recipes have none"
        yield keys.refuse("ppo_config", E1149, message, "port a config of grpo_main")
    run.reinforces = keys.given("rl_training_config") and not keys.given("training_config")
    if run.reinforces:
        run.objective = "grpo"
        yield keys.sets("train.objective", "grpo", "the keys are those of grpo_main")
        reference = keys.below("reference_model_config")
        named = reference.given("model_id") or reference.given("model_name")
        run.of_model = "reference_model_config" if named else "model_config"
        run.of_actor = "actor_model_config"


def roles(run: Tunix) -> Says:
    """State what the sections of the roles say besides the model: one mesh holds all."""
    if run.of_actor != "model_config":
        shared = run.section("model_config")
        yield from shared.below("mesh").passive(shared.mapping("mesh"), REASONS["mesh"])
        yield shared.same("lora_config", note="part of the model")
    for role in ROLES:
        section = run.section(role)
        for key in run.keys.mapping(role):
            note = REASONS["mesh"] if key in ("mesh", "same_mesh_as") else "part of the model"
            yield section.same(key, note=note)


def batch(run: Tunix) -> Says:
    """State the completions of a step: prompts, times the completions of each."""
    keys, training = run.keys, run.training
    group = run.groups.integer("num_generations") or 2
    axes = yield from run.mesh()
    prompts = keys.integer("batch_size") or 1
    mini = training.integer("mini_batch_size") or prompts
    micro = training.integer("train_micro_batch_size") or mini
    if mini != prompts:
        note = f"{reinforcement.SEVERAL} ({prompts} prompts for steps of {mini})"
        yield training.learned("mini_batch_size", (), note)
    yield training.same("mini_batch_size", note="all prompts of a draw")
    completions = {"train.global_batch_size": prompts * group}
    yield keys.same("batch_size", completions, f"{prompts} prompts x {group} completions")
    yield keys.sets("train.global_batch_size", prompts * group)
    yield keys.sets("train.micro_batch_size", max(micro * group // axes.get("fsdp", 1), 1))
    yield training.same("train_micro_batch_size", note=f"{micro * group} completions at once")
    note = "Tunix's GRPO stops at it: the batch sizes give the micro-batches"
    if training.given("gradient_accumulation_steps"):
        yield training.refuse(
            "gradient_accumulation_steps", E1145, note, "remove gradient_accumulation_steps"
        )
    tp, count = axes.get("tp", 1), math.prod(axes.values())
    if tp > 1 and (keys.ledger.tpus or count) == count:
        yield keys.sets("mesh.axes", {"fsdp": axes.get("fsdp", 1), "tp": tp}, sharding.sharing(tp))


def loss(run: Tunix) -> Says:
    """State the loss, the groups and the divergence."""
    section = run.groups
    yield section.say(
        "num_generations",
        {f"{reinforcement.GRPO}.num_generations": section.integer("num_generations")},
        DEVIATION,
    )
    iterations = section.integer("num_iterations") or 1
    yield section.say("num_iterations", {f"{reinforcement.GRPO}.iterations": iterations})
    beta = section.number("beta") or 0.0
    yield section.say("beta", {f"{reinforcement.GRPO}.beta": beta})
    yield section.say("epsilon", {f"{reinforcement.GRPO}.epsilon": section.number("epsilon")})
    if section.given("epsilon_high"):
        message = "Tunix's GRPOConfig has no `epsilon_high`, and stops at it"
        yield section.refuse("epsilon_high", E1145, message, "--set grpo_config.epsilon_high=null")
    mode = str(section.value("loss_agg_mode") or "sequence-mean-token-mean")
    sets = dict(LOSSES.get(mode, {}))
    if not sets:
        message = f"the aggregation {mode} has no counterpart: recipec has {listing(LOSSES)}"
        yield section.refuse("loss_agg_mode", E1163, message, "loss_agg_mode: token-mean")
        sets = {"loss": "grpo"}
    if section.choice("loss_algo", ("grpo", "gspo-token")) == "gspo-token":
        sets = {"loss": "gspo"} if sets == {"loss": "grpo"} else {**sets, "ratio": "sequence"}
    values = {f"{reinforcement.GRPO}.{key}": value for key, value in sets.items()}
    yield section.default("loss_agg_mode", "sequence-mean-token-mean", values)
    yield section.say("loss_agg_mode", values)
    yield section.same("loss_algo", values if section.given("loss_algo") else None)
    kind = str(section.value("kl_loss_mode") or "kl")
    if beta and kind not in KL:
        message = f"the divergence {kind} has no counterpart: recipec has those of {listing(KL)}"
        yield section.refuse("kl_loss_mode", E1163, message, "kl_loss_mode: low_var_kl")
    if beta:
        estimate = {
            f"{reinforcement.GRPO}.kl": KL.get(kind, "k3"),
            f"{reinforcement.GRPO}.kl_bias_correction": False,
        }
        why = "its gradient has expectation 0" if kind == "kl" else ""
        yield section.default("kl_loss_mode", "kl", estimate, why and f"Tunix's default: {why}")
        yield section.same("kl_loss_mode", estimate, why)
    yield section.same("kl_loss_mode", note="there is no divergence in the loss")
    yield from section.follow(OF_GROUPS)


def rollout(run: Tunix) -> Says:
    """State how completions are drawn. The first value of a key is that of base_config.yaml."""
    keys, section = run.keys, run.keys.below("rollout_config", ROLLOUT)
    longest, completion = (
        section.integer("max_prompt_length") or 1,
        section.integer("total_generation_steps") or 1,
    )
    prompts = {f"{reinforcement.GRPO}.max_prompt_length": longest, "data.overlong": "drop"}
    yield section.say("max_prompt_length", prompts)
    yield keys.sets("data.max_length", longest + completion)
    yield section.say("total_generation_steps", {f"{reinforcement.GRPO}.max_completion_length": completion})
    temperature = section.number("temperature") or 1.0
    iterates = (run.groups.integer("num_iterations") or 1) > 1 and temperature != 1
    note = "Tunix compares probabilities at this temperature with those at 1" if iterates else ""
    yield section.say("temperature", {f"{reinforcement.GRPO}.temperature": temperature}, note)
    yield section.say("top_p", {f"{reinforcement.GRPO}.top_p": section.number("top_p") or 1.0})
    yield section.say("top_k", {f"{reinforcement.GRPO}.top_k": max(section.integer("top_k") or 0, 0)})
    yield from section.follow(OF_ROLLOUT)
    engine = str(keys.value("rollout_engine") or "vanilla")
    yield keys.say("rollout_engine", {}, NOISE if engine == "vanilla" else "")
    names = ("vllm_config", "sglang_jax_config", "offload_to_cpu")
    yield from keys.passive(names, "recipec draws completions on the training's own chips")


def data(run: Tunix) -> Says:
    """State the prompts. Tunix reads GSM8K by itself, and other rows by a module."""
    keys = run.keys
    name, module = str(keys.value("dataset_name")), keys.text("data_module")
    split = keys.text("train_split") or keys.text("split") or "train"
    if module or name.partition(":")[0] not in ("gsm8k", "openai/gsm8k"):
        key = "data_module" if module else "dataset_name"
        why = "a module of Python makes its rows" if module else f"Tunix reads gsm8k alone, not {name}"
        help = "--set dataset_name=gsm8k, or --partial: then set data, with rows that have a column `prompt`"
        yield keys.refuse(key, E1143, f"recipec cannot read the data: {why}", help)
    source = datasets.source("hf://openai/gsm8k", None if split == "train" else split, "main")
    yield keys.say("dataset_name", {"data.train": [source]})
    yield from rows.say(keys, "dataset_name", [Rows("prompt", transform=SUMS)])
    yield from keys.passive(("train_split", "split", "data_source", "data_module"), "part of data.train")
    yield keys.sets("data.shuffle_seed", 42, "Tunix shuffles once; recipec again in each epoch")
    yield keys.same("apply_chat_template_to_dataset", note="the chat template writes the prompt")
    yield from keys.passive(("num_test_batches",), REASONS["evaluation"])
    yield run.training.same("eval_every_n_steps", note=REASONS["evaluation"])
    fraction = keys.number("train_fraction")
    yield keys.unless(
        "train_fraction", (None, 1, 1.0), f"recipec draws from all rows, not from {fraction} of them"
    )


def batches(run: Tunix) -> Says:
    """State the steps: max_steps, or the batches of the epochs."""
    keys, batches = run.keys, run.keys.integer("num_batches") or 0
    if batches and not run.training.integer("max_steps"):
        epochs = keys.integer("num_train_epochs") or 1
        steps = int(batches * epochs * (keys.number("train_fraction") or 0.8))
        yield keys.say("num_batches", {"train.steps": steps})
        run.training.defaults = {**run.training.defaults, "max_steps": steps}
    yield keys.same("num_batches", note="max_steps sets the length of the run")


def rewards(run: Tunix) -> Says:
    """State the files of reward functions. All their functions without an underscore count."""
    keys, entries, problems = run.keys, [], []
    if keys.flag("verl_compatible"):
        yield keys.learned("verl_compatible", (), "recipec calls functions as TRL does")
    yield keys.same("verl_compatible", note="off")
    for path in keys.listed("reward_functions"):
        text, why = reinforcement.file_text(keys, path)
        names = [name for name in reinforcement.functions_of(text or "") if not name.startswith("_")]
        if text is None or not names:
            problems.append(why or f"{path} has no function")
            continue
        file = path.rpartition("/")[2]
        wrapped = "\n".join(f"{name} = texts({name})" for name in names)
        yield keys.file(file, f"{text.rstrip()}{TEXTS}{wrapped}\n")
        entries += [{"function": f"{file}:{name}"} for name in names]
    if problems or not entries:
        message = f"recipec cannot take over the reward functions: {'; '.join(problems) or 'there are none'}"
        help = "copy the file from Tunix's repository to the same path next to the config"
        yield keys.refuse("reward_functions", reinforcement.E1189, message, help)
    yield keys.say("reward_functions", {"rewards": entries} if entries else {})


def computed(run: Tunix) -> Statements[dict[str, Any]]:
    """Return the values that grpo_main computes for the schedule: its length, and a tenth as warm-up."""
    steps = run.steps
    if steps is None:
        key, help = "max_steps", "rl_training_config: {max_steps: 100}"
        yield run.training.refuse(
            key, E1144, "max_steps is missing: recipec needs the length of the schedule", help
        )
        return {}
    share = run.keys.number("warmup_ratio")
    warmup = run.keys.integer("warmup_steps")
    computed = int((0.1 if share is None else share) * steps) if warmup is None else warmup
    yield from run.keys.passive(("warmup_ratio", "warmup_steps"), "part of the schedule")
    return {"decay_steps": steps, "warmup_steps": computed}
