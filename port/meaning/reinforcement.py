"""The keys of TRL's GRPO and RLOO, for every tool that runs its trainers, and where reward functions are."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipec.compiler.wording import listing
from recipec.port.engine import Says, Statements
from recipec.port.keys import Keys, as_number, table
from recipec.port.meaning.scripts import Reward, module_of
from recipec.port.refusals import E1142, E1144, E1145, E1160, E1163
from recipec.runtime.reinforcement.loss_types import LOSS_TYPES
from recipec.spec.codes import Code
from recipec.spec.load import read_text

GRPO = "train.grpo"
OF_GROUPS = table("""
integer num_generations -> train.grpo.num_generations
integer num_iterations -> train.grpo.iterations
integer max_completion_length -> train.grpo.max_completion_length
number epsilon -> train.grpo.epsilon
learned repetition_penalty=null/1/1.0: recipec draws tokens by their probabilities alone
learned sync_ref_model=false: recipec's reference stays the model that training starts from
setting ref_model_mixup_alpha ref_model_sync_steps -> sync_ref_model
learned entropy_coef=null/0/0.0 use_adaptive_entropy=null/false: recipec's loss has no term of entropy
exact entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target: only use_adaptive_entropy reads it
learned top_entropy_quantile=null/1/1.0: recipec trains on all tokens of a completion
learned delta=null: recipec's ratio has no further bound for negative advantages
learned off_policy_mask_threshold=null: recipec trains on all completions
learned vllm_structured_outputs_regex=null vllm_guided_decoding_regex=null: recipec does not constrain what is
    drawn
learned max_tool_calling_iterations=null tools=null/[] environment_factory=null rollout_func=null: recipec
    draws one answer to each prompt, without tools or environments
exact use_vllm vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
    vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_max_model_len
    vllm_tensor_parallel_size vllm_model_impl vllm_enable_sleep_mode vllm_device vllm_dtype
    vllm_enable_prefix_caching vllm_lora_sync: recipec draws completions on the training's own chips
exact vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min: recipec draws with the model that it
    trains, so that there is nothing to correct
speed ds3_gather_for_generation cache_implementation use_transformers_paged
    use_transformers_continuous_batching transformers_continuous_batching_config use_liger_loss
    reward_num_workers
log log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
    wandb_log_unique_prompts
padding pad_to_multiple_of
evaluation num_generations_eval
exact cast_lm_head_to_fp32: recipec computes log-probabilities in float32
exact sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg: a
    setting of a loss that the run does not have
learned chat_template_kwargs=null/{}: recipec's template gets no variables
learned disable_dropout=null/false/true
""")
"""Keys of the loss, the completions and vLLM."""

PER_MICRO = {
    "bnpo": "a mean over the tokens of a whole step; TRL's bnpo has one over each micro-batch",
}
SCALES: Mapping[Any, str] = {True: "group", False: "none", "True": "group", "False": "none"}
SEVERAL = "a step in recipec draws its own completions; TRL takes several optimizer steps on one draw"


def say_loss(keys: Keys, rloo: bool = False) -> Says:
    """State the loss, its ratio and the divergence from the reference.

    Args:
        rloo: whether the trainer is RLOO's, whose loss has no type.
    """
    beta = keys.number("beta") or 0.0
    if rloo:
        yield from _rloo(keys, beta)
    else:
        yield from _loss_type(keys)
        yield keys.say("beta", {f"{GRPO}.beta": beta})
    corrected = keys.value("use_bias_correction_kl")
    off = beta and corrected is not None and not keys.flag("use_bias_correction_kl")
    yield keys.same(
        "use_bias_correction_kl",
        {f"{GRPO}.kl_bias_correction": False} if off else None,
        "" if beta else "there is no divergence in the loss",
    )
    if (high := keys.number("epsilon_high")) is not None:
        yield keys.say("epsilon_high", {f"{GRPO}.epsilon_high": high})
    yield keys.same("epsilon_high", note="epsilon applies to both sides")
    yield from _truncated(keys)


def _truncated(keys: Keys) -> Says:
    """State whether completions without an end are trained on."""
    key, on = "mask_truncated_completions", keys.flag("mask_truncated_completions")
    if on:
        yield keys.say(key, {f"{GRPO}.mask_truncated": True})
    yield keys.same(key, note="completions without an end are trained on too")


def _loss_type(keys: Keys) -> Says:
    level = keys.choice("importance_sampling_level", ("token", "sequence")) or "token"
    name = str(keys.value("loss_type") or "dapo").lower()
    if name not in LOSS_TYPES or name in ("gspo", "rloo"):
        losses = listing(loss for loss in LOSS_TYPES if loss not in ("gspo", "rloo"))
        message = f"the loss {name} has no counterpart: recipec's grpo has {losses}"
        yield keys.refuse("loss_type", E1163, message, "loss_type: dapo")
        name = "dapo"
    sets: dict[str, Any] = {f"{GRPO}.loss": name}
    if level != LOSS_TYPES[name].ratio:
        sets[f"{GRPO}.ratio"] = level
    if name == "grpo" and level == "sequence":
        sets = {f"{GRPO}.loss": "gspo"}
    yield keys.say("loss_type", sets, PER_MICRO.get(name, ""))
    yield keys.same("importance_sampling_level", sets if level == "sequence" else None, f"{level} ratios")
    scale = keys.value("scale_rewards")
    scale = SCALES.get(scale, scale) if isinstance(scale, bool | str) else scale
    if scale not in ("group", "batch", "none"):
        keys_help = "scale_rewards: group"
        message = f"`scale_rewards` is {json.dumps(scale)}, not group, batch or none"
        yield keys.refuse("scale_rewards", E1160, message, keys_help)
        scale = "group"
    yield keys.say("scale_rewards", {f"{GRPO}.scale_rewards": scale})
    note = "recipec adds the weighted rewards first, and then scales them"
    yield keys.learned("multi_objective_aggregation", (None, "sum_then_normalize"), note)


def _rloo(keys: Keys, beta: float) -> Says:
    """State what RLOO's trainer has in place of a loss type."""
    yield keys.sets(f"{GRPO}.loss", "rloo", "RLOOTrainer's loss")
    normalized = keys.flag("normalize_advantages")
    scale = "batch" if normalized else "none"
    yield keys.sets(f"{GRPO}.scale_rewards", scale, "a reward is compared with the mean of the others")
    yield keys.same("normalize_advantages", {f"{GRPO}.scale_rewards": scale} if normalized else None)
    yield keys.say("beta", {f"{GRPO}.beta": beta})
    yield keys.learned("reward_clip_range", (None,), "recipec does not clip rewards")


def say_sampling(keys: Keys) -> Says:
    """State how tokens are drawn. `generation_kwargs` overrides the keys of its names."""
    sampling = keys.mapping("generation_kwargs")
    for key, idle in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = as_number(sampling.get(key, keys.value(key))) or idle
        value = 0 if key == "top_k" and value < 0 else int(value) if key == "top_k" else value
        sets = {f"{GRPO}.{key}": value} if value != idle else None
        yield keys.same(key, sets, "" if sets else "all tokens may be drawn")
        if key in sampling and sets:
            yield keys.sets(f"{GRPO}.{key}", value, "generation_kwargs")
    temperature = as_number(sampling.get("temperature"))
    if temperature is not None:
        yield keys.sets(f"{GRPO}.temperature", temperature, "generation_kwargs")
        yield keys.same("temperature", note="generation_kwargs has another one")
    else:
        yield keys.say("temperature", {f"{GRPO}.temperature": keys.number("temperature")})
    alike: Mapping[str, Any] = {"do_sample": True, "repetition_penalty": 1.0}
    names = ("temperature", "top_p", "top_k", "min_p")
    others = [name for name, value in sampling.items() if name not in names and value != alike.get(name, ())]
    if others:
        yield keys.learned("generation_kwargs", (), f"recipec has no setting for {listing(others)}")
    yield keys.same("generation_kwargs", note="part of train.grpo" if sampling else "none")


CORRECTION = "importance_sampling_"
EVERYWHERE = "0.0.0.0"


def say_server(keys: Keys) -> Says:
    """State the vLLM server that draws completions, with its correction.

    Without a server, or without adapters, the rows of OF_GROUPS hold.
    """
    if not keys.flag("use_vllm") or keys.choice("vllm_mode", ("colocate", "server")) != "server":
        return
    if keys.ledger.value("lora.rank") is None:
        note = "recipec's server takes only adapters, so the chips that train draw completions"
        yield keys.differs("vllm_mode", {}, note)
        return
    yield keys.say("use_vllm", {"rollout.engine": "vllm"})
    yield keys.same("vllm_mode", {"rollout.engine": "vllm"}, "rollout/serve.sh starts the server")
    url, host = keys.text("vllm_server_base_url"), keys.text("vllm_server_host")
    if url:
        yield keys.say("vllm_server_base_url", {"rollout.url": url.rstrip("/")})
        yield from keys.passive(("vllm_server_host", "vllm_server_port"), "vllm_server_base_url is given")
    else:
        here = "127.0.0.1" if host in (None, EVERYWHERE) else host
        url = f"http://{here}:{keys.integer('vllm_server_port') or 8000}"
        for key in ("vllm_server_host", "vllm_server_port"):
            yield keys.say(key, {"rollout.url": url})
    if keys.given("vllm_server_timeout"):
        seconds = math.ceil(keys.number("vllm_server_timeout") or 1)
        yield keys.say("vllm_server_timeout", {"rollout.wait_seconds": seconds})
    yield keys.same("vllm_group_port", note="recipec hands adapters over in files")
    corrects, mode = f"vllm_{CORRECTION}correction", f"vllm_{CORRECTION}mode"
    yield keys.say(corrects, {f"rollout.{CORRECTION}correction": keys.flag(corrects)})
    if keys.flag(corrects):
        yield keys.say(mode, {f"rollout.{CORRECTION}mode": keys.text(mode)})
        older = f"vllm_{CORRECTION}cap"
        most = older if keys.value(older) is not None else f"vllm_{CORRECTION}clip_max"
        yield keys.say(most, {f"rollout.{CORRECTION}clip_max": keys.number(most)})
        least = f"vllm_{CORRECTION}clip_min"
        yield keys.say(least, {f"rollout.{CORRECTION}clip_min": keys.number(least)})


def say_draws(keys: Keys, accumulation: int, per_step: int) -> Says:
    """State how many optimizer steps one draw of completions is for.

    Args:
        accumulation: the micro-batches of an optimizer step.
        per_step: completions of a micro-batch on all devices.
    """
    steps, size = keys.integer("steps_per_generation"), keys.integer("generation_batch_size")
    if steps is not None and size is not None:
        message = "`steps_per_generation` and `generation_batch_size` exclude each other in TRL"
        yield keys.refuse("generation_batch_size", E1145, message, "generation_batch_size: null")
    key = "steps_per_generation" if steps is not None else "generation_batch_size"
    if steps is None and size is not None:
        if size % max(per_step, 1):
            message = f"`generation_batch_size: {size}` is not a multiple of a micro-batch's {per_step} rows"
            yield keys.refuse(key, E1145, message, f"generation_batch_size: {per_step * accumulation}")
        steps = max(size // max(per_step, 1), 1)
    if steps is not None and steps > accumulation:
        yield keys.learned(key, (), f"{SEVERAL} ({steps} micro-batches for steps of {accumulation})")
    elif steps is not None and accumulation % steps:
        yield keys.learned(key, (), "a step's completions come from several weights")
    elif steps is not None and steps < accumulation:
        yield keys.say(key, {}, "recipec normalizes over a whole step; the tool over each draw of it")
    note = "a step's completions are drawn at once, as in recipec"
    yield from keys.passive(("steps_per_generation", "generation_batch_size"), note)


def say_groups(keys: Keys, rows: int) -> Says:
    """Refuse a number of completions that TRL refuses.

    Args:
        rows: completions of an optimizer step.
    """
    size = keys.integer("num_generations") or 0
    if size < 2:
        yield keys.withdraw("num_generations")
        message = f"`num_generations: {size}`: TRL compares at least two completions of a prompt"
        yield keys.refuse("num_generations", E1145, message, "num_generations: 8")
    elif rows % size:
        fitting = max(number for number in range(1, min(size, rows) + 1) if rows % number == 0)
        yield keys.withdraw("num_generations")
        message = f"a step's {rows} completions are not whole groups of `num_generations: {size}`"
        help = f"num_generations: {fitting}" if fitting > 1 else "a batch of a multiple of num_generations"
        yield keys.refuse("num_generations", E1145, message, help)


LONGEST_PROMPT = 512
"""The length of a prompt for a tool that has none; TRL's max_prompt_length was this before it was removed."""
CUT = "TRL cut off the beginning of a longer prompt, until it removed the key; recipec leaves the row out"
ANY = "TRL reads prompts of any length; recipec needs the longest length"


def say_prompts(keys: Keys, row: Mapping[str, Any] | None, where: tuple[Keys, str], longest: int) -> Says:
    """State the format of prompts and the lengths.

    Args:
        row: the first row, if it is at hand.
        where: the keys, and the key that names the data.
        longest: the longest prompt if no key gives one.
    """
    if row is not None and not {"prompt", "messages"} & row.keys():
        message = f"the rows have no column `prompt`, but {listing(row)}"
        yield where[0].withdraw(where[1])
        help = 'a column `prompt`: [{"role": "user", "content": "..."}], or a text'
        yield where[0].refuse(where[1], E1142, message, help)
    yield keys.sets("data.format", "prompt")
    yield from say_lengths(keys, longest)


def say_lengths(keys: Keys, longest: int) -> Says:
    """State the longest prompt and the longest completion. Together they are a row."""
    if keys.given("max_prompt_length"):
        longest = keys.integer("max_prompt_length") or longest
        sets = {f"{GRPO}.max_prompt_length": longest, "data.overlong": "drop"}
        yield keys.say("max_prompt_length", sets, CUT)
    else:
        yield keys.same("max_prompt_length", note=ANY)
        yield keys.sets(f"{GRPO}.max_prompt_length", longest, ANY)
        yield keys.sets("data.overlong", "error", "it stops at a longer prompt")
    completion = keys.integer("max_completion_length") or 0
    yield keys.sets("data.max_length", longest + completion)


E1189 = Code(
    "E1189",
    "reward function that cannot be taken over",
    cause="A reward function is in no file next to the config, is of a library that recipes do not have, or "
    "needs what the script has loaded.",
    cure="Write it into a Python file next to the config, and name it as FILE.FUNCTION. Or port without it, "
    "and write `rewards` into the recipe.",
)

THINKS = r"<think>(?!.*<think>).*?</think>.*"
READY: Mapping[str, tuple[dict[str, Any], str]] = {
    "think_format_reward": (
        {"format_match": {"pattern": THINKS}},
        "recipec also accepts white space before the first tag",
    ),
    "accuracy_reward": (
        {"boxed_answer": {"column": "solution"}},
        "recipec compares numbers and texts, without a library of symbols, and scores every row",
    ),
}
"""Functions of trl.rewards that a ready reward stands for, with the difference."""
OVERLONG = "get_soft_overlong_punishment"


@dataclass(frozen=True)
class Entry:
    """A reward of a run.

    Attributes:
        value: the recipe's entry, None if there is none.
        note: how it differs, or why there is none.
        penalty: tokens of the overlong penalty, which is no entry.
        problem: why there is no entry, and what to write; None if there is one.
    """

    value: dict[str, Any] | None
    note: str = ""
    penalty: int | None = None
    problem: tuple[str, str] | None = None


def say_rewards(keys: Keys, rewards: Sequence[Reward] | None = None) -> Says:
    """State the reward functions and their weights.

    Args:
        rewards: those of a Python script, in the order of `reward_funcs`; None for names of functions.
    """
    key = "reward_funcs"
    names = keys.listed(key)
    if not names:
        message = "the run has no reward functions"
        help = "--set 'reward_funcs=[rewards.NAME]', for the function NAME of rewards.py next to the config"
        yield keys.refuse(key, E1144, message, help)
        return
    entries = []
    for number, name in enumerate(names):
        reward = rewards[number] if rewards is not None else None
        entries.append((yield from _entry(keys, name, reward)))
    problems = [entry.problem for entry in entries if entry.problem is not None]
    if problems:
        messages, helps = ("; ".join(dict.fromkeys(texts)) for texts in zip(*problems, strict=True))
        yield keys.refuse(key, E1189, f"recipec cannot take over {messages}", helps)
    if copies := [reward.copy for reward in rewards or () if reward.copy is not None]:
        yield keys.file(FILE, module_of(f"Reward functions of {keys.source.file}.", copies))
    weights = keys.value("reward_weights")
    weights = [as_number(weight) for weight in weights] if isinstance(weights, list) else [1.0] * len(names)
    if len(weights) != len(names) or None in weights:
        message = f"`reward_weights` has {len(weights)} numbers for {len(names)} reward functions"
        yield keys.refuse("reward_weights", E1145, message, f"reward_weights: {[1.0] * len(names)}")
        weights = [1.0] * len(names)
    functions = []
    for entry, weight in zip(entries, weights, strict=True):
        if entry.value is not None:
            functions.append({**entry.value, **({"weight": weight} if weight != 1 else {})})
        elif entry.penalty and weight != 1:
            yield keys.learned("reward_weights", (), "recipec's overlong penalty has the weight 1")
    notes = "; ".join(dict.fromkeys(entry.note for entry in entries if entry.note))
    if functions:
        yield keys.say(key, {"rewards": functions}, notes)
    if keys.given("reward_weights"):
        yield keys.same("reward_weights", {"rewards": functions} if functions else None)
    yield keys.same("reward_weights", note="each reward has the weight 1")


def _entry(keys: Keys, name: str, reward: Reward | None) -> Statements[Entry]:
    """Return the recipe's entry of a function, by its name or by its code in a script."""
    if name in READY:
        value, note = READY[name]
        return Entry(dict(value), f"{name}: {note}")
    if name.partition("(")[0] == OVERLONG:
        return (yield from _overlong(keys, name))
    if reward is not None and reward.copy is not None:
        return Entry({"function": f"{FILE}:{reward.copy.name}"})
    if reward is not None and not reward.named:
        return _lost(name, reward.why)
    module, _, function = name.rpartition(".")
    if "/" in name:
        return _lost(name, "it looks like a model that scores completions")
    if not module:
        return _lost(name, f"it is neither {', '.join([*READY, OVERLONG])} nor MODULE.NAME")
    return (yield from of_file(keys, f"{module.replace('.', '/')}.py", function))


def _lost(name: str, why: str) -> Entry:
    function = re.sub(r"\W+", "_", name.rpartition("/")[2].rpartition(".")[2] or name).strip("_") or "correct"
    return Entry(None, problem=(f"the reward function `{name}`: {why}", OTHERWISE.format(name=function)))


FILE = "rewards.py"
OTHERWISE = (
    "write {name}(completions, **columns) into rewards.py next to the config, and name it as rewards.{name}"
)


def of_file(keys: Keys, path: str, function: str) -> Statements[Entry]:
    """Return the entry for a function of a file next to the config, which is copied next to the recipe."""
    text, why = file_text(keys, path)
    if text is not None and function not in functions_of(text):
        names = listing((f"`{name}`" for name in functions_of(text)), "or") or "no function"
        why = f"{path} has {names}"
    if why or text is None:
        name = path.removesuffix(".py").replace("/", ".")
        help = f"write it as {function}(completions, **columns) into {path} next to the config"
        return Entry(None, problem=(f"the reward function `{name}.{function}`: {why}", help))
    yield keys.file(Path(path).name, text)
    return Entry({"function": f"{Path(path).name}:{function}"})


def file_text(keys: Keys, path: str) -> tuple[str | None, str]:
    """Return the text of a Python file next to the config, or None and the reason."""
    place = keys.source.path.parent / path
    if not place.is_file():
        return None, f"{path} is not next to the config"
    text, problem = read_text(place, "a module of reward functions", 1 << 20, "a Python file", marked=True)
    return (text, "") if problem is None else (None, problem.message)


def functions_of(text: str) -> list[str]:
    """Return the names of a module's functions, [] if it is not valid Python."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return []
    return [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


_TRLS_PENALTY = {"max_completion_len": 1280, "soft_punish_cache": 256}
"""The penalty's arguments in TRL's command line."""


def _overlong(keys: Keys, name: str) -> Statements[Entry]:
    """Return the penalty for long completions, with the arguments that a script gives, as JSON."""
    _, _, written = name.partition("(")
    arguments = json.loads(written.removesuffix(")")) if written else _TRLS_PENALTY
    longest, buffer = (arguments.get(key) for key in _TRLS_PENALTY)
    whole = keys.integer("max_completion_length")
    if longest != whole or not isinstance(buffer, int):
        why = f"its penalty ends at {longest} tokens, and recipec's ends at max_completion_length, {whole}"
        help = f"max_completion_length: {longest}, or the same penalty as a function of rewards.py"
        return Entry(None, problem=(f"the reward function `{OVERLONG}`: {why}", help))
    yield keys.sets(f"{GRPO}.overlong_penalty", buffer, "a penalty before max_completion_length")
    return Entry(None, penalty=buffer)
