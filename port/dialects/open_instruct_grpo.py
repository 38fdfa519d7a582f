"""open-instruct's reinforcement learning (grpo_fast.py and grpo.py): its loss, completions and verifiers.

A row names its verifier in the column `dataset`, and what the verifier compares with in `ground_truth`. A
recipe's rewards score every row alike, so that all rows of a port have one verifier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.wording import listing
from recipec.port.engine import Says, Statements
from recipec.port.keys import Keys, table
from recipec.port.meaning import datasets, reinforcement
from recipec.port.meaning.conversion import FILE, TRANSFORM, literal
from recipec.port.refusals import E1149, E1160, E1163

if TYPE_CHECKING:
    from recipec.port.dialects.open_instruct import OpenInstruct

GRPO = reinforcement.GRPO
OF_ADAPTERS = (
    *("use_peft", "lora_r", "lora_target_modules", "lora_modules_to_save", "lora_task_type", "load_in_8bit"),
    *("load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
)
"""Keys of a class that grpo_fast.py parses; it reads none of them."""
DATA: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("ai2-adapt-dev/rlvr_gsm8k_zs", "allenai/RLVR-GSM"), ("gsm8k",)),
    **dict.fromkeys(
        (
            *("ai2-adapt-dev/math_ground_truth_zs", "allenai/RLVR-MATH", "allenai/Dolci-RLZero-Math-7B"),
            *("ai2-adapt-dev/rlvr_open_reasoner_math", "hamishivi/DAPO-Math-17k-Processed_filtered"),
        ),
        ("math",),
    ),
    **dict.fromkeys(("allenai/RLVR-IFeval", "allenai/IF_multi_constraints_upto5"), ("ifeval",)),
    "allenai/RLVR-GSM-MATH-IF-Mixed-Constraints": ("gsm8k", "math", "ifeval"),
    **dict.fromkeys(("vwxyzjn/rlvr_acecoder", "saurabh5/rlvr_acecoder"), ("code",)),
}
"""The verifiers that the rows of published data sets name."""
VERIFIERS: Mapping[str, str] = {
    "gsm8k": "recipec compares numbers, and the tool their texts",
    "math": "recipec compares numbers and texts, without a library of symbols",
    "code": "recipec runs the tests in a sandbox of its own",
}
"""The verifiers with a counterpart, with the differences."""
FORM = r".*?</think>\s*<answer>.*?</answer>"
ESTIMATES = {0: {"kl": "k1", "kl_bias_correction": False}, 2: {"kl": "k3", "kl_bias_correction": False}}
ESTIMATES[3] = {"kl": "k1", "kl_bias_correction": True}
"""The divergence by the number of kl_estimator; 1 is a squared difference."""
NAMED = {"kl1": 0, "kl2": 1, "kl3": 2, "kl4": 3}
"""The names of these numbers in earlier versions."""
ROUNDS = 10

OF_GROUPS = table("""
speed pack_length single_gpu_mode num_learners_per_node num_nodes deepspeed_stage deepspeed_zpg
    deepspeed_offload_param deepspeed_offload_optimizer deepspeed_checkpoint_load_universal gather_whole_model
    backend_timeout enable_queue_dashboard queue_dashboard_port vllm_num_engines vllm_tensor_parallel_size
    vllm_enforce_eager vllm_attention_backend vllm_sync_backend vllm_gpu_memory_utilization
    vllm_enable_prefix_caching
log record_entropy save_traces rollouts_save_path world_size num_training_steps
evaluation local_eval_every eval_on_step_0 eval_pass_at_k eval_top_p eval_response_length
    dataset_mixer_eval_list dataset_mixer_eval_list_splits
checkpoints save_freq checkpoint_state_freq checkpoint_state_dir gs_checkpoint_state_dir
exact use_rho_correction rho_clamp_lower_bound rho_clamp_upper_bound rho_mask_lower_bound rho_mask_upper_bound
    rho_mask_sequence_level rho_mask_tv_divergence use_vllm_logprobs: recipec draws with the model that it
    trains, so that there is nothing to correct
learned ref_policy_update_freq=null: recipec's reference stays the model that training starts from
setting alpha -> ref_policy_update_freq
lost no_resampling_pass_rate=null: recipec draws prompts again that were solved
learned apply_evolving_rubric_reward=false only_reward_good_outputs=false reward_aggregator=last
setting max_active_rubrics cache_evolving_rubric_data_dir -> apply_evolving_rubric_reward
exact llm_judge_model llm_judge_max_tokens llm_judge_max_context_length llm_judge_temperature
    llm_judge_timeout code_api_url max_length_verifier_max_length: of a verifier that the run does not have
exact max_possible_score reward_model_multiplier: it follows from the rewards
exact max_token_length: the lengths of prompts and completions apply
setting tool_call_names tool_configs tool_parser_type per_turn_max_tokens max_steps
    pass_tools_to_chat_template pool_size mask_tool_use -> tools
""")
ASYNC = "recipec draws with the weights before the step; the tool's may be {steps} steps older"


def say_rows(run: OpenInstruct, names: Sequence[str], key: str) -> Says:
    """State the rows of prompts, the verifiers that they name, and the rewards.

    Args:
        names: of the data sets.
        key: the key that names them.
    """
    keys = run.keys
    remap = dict([str(keys.value("remap_verifier") or "=").split("=", 1)])
    verifiers: set[str | None] = set()
    for name in names:
        row = datasets.first_row(name, keys.source.path.parent)
        named = (_only(row.get("dataset")),) if row is not None else DATA.get(name, (None,))
        verifiers |= {remap.get(str(verifier), verifier) for verifier in named}
    yield keys.same("remap_verifier", note="part of the rewards")
    rewards = yield from _rewards(run, verifiers)
    known = [verifier for verifier in verifiers if verifier is not None]
    system = yield from _system(keys)
    yield keys.sets("data.format", "prompt")
    messages, truth = str(keys.value("sft_messages_key")), str(keys.value("ground_truths_key"))
    checked = known[0] if len(known) == 1 and not keys.given("remap_verifier") else None
    yield keys.file(FILE, _file(messages, truth, checked, system))
    yield keys.sets("data.transform", TRANSFORM, "open-instruct makes prompts of conversations")
    yield from keys.passive(("sft_messages_key", "ground_truths_key"), f"part of {FILE}")
    if rewards:
        yield keys.sets("rewards", rewards)
    longest = keys.integer("max_prompt_token_length") or 1
    sets = {f"{GRPO}.max_prompt_length": longest, "data.overlong": "drop"}
    yield keys.say("max_prompt_token_length", sets)
    completion = keys.integer("response_length") or 1
    yield keys.say("response_length", {f"{GRPO}.max_completion_length": completion})
    yield keys.sets("data.max_length", longest + completion)


def _only(value: Any) -> str | None:
    """Return the one name in a row's column; None if there are several."""
    names = value if isinstance(value, list) else [value]
    return str(names[0]).lower() if len(names) == 1 and names[0] is not None else None


def _rewards(run: OpenInstruct, verifiers: set[str | None]) -> Statements[list[dict[str, Any]]]:
    """Return the recipe's rewards, and state the keys of the tool's."""
    keys, rewards = run.keys, list[dict[str, Any]]()
    key, form = "apply_verifiable_reward", "apply_r1_style_format_reward"
    verifier = next(iter(verifiers)) if len(verifiers) == 1 else None
    formed = keys.flag(form) and keys.flag(key) and not keys.flag("additive_format_reward")
    if keys.flag(key) and verifier in VERIFIERS:
        entry = yield from _verified(keys, str(verifier), formed)
        rewards.append({**entry, "weight": keys.number("verification_reward") or 0.0})
        note = "" if formed and verifier == "gsm8k" else f"{verifier}: {VERIFIERS[str(verifier)]}"
        yield keys.say(key, {"rewards": [*rewards]}, note)
    elif keys.flag(key):
        named = [*sorted(str(name) for name in verifiers if name is not None)]
        named += ["others that no file names"] if None in verifiers and named else []
        why = f"the rows name {listing(named)}" if named else "no file says which verifier the rows name"
        message = f"recipec cannot take over the verifiable reward: {why}; it has {listing(VERIFIERS)}"
        help = "a data set whose rows name one of these; or --partial, and write `rewards` yourself"
        yield keys.refuse(key, reinforcement.E1189, message, help)
    yield keys.same(key, note="off")
    yield keys.say("verification_reward", {"rewards": [*rewards]} if rewards else {})
    names = ("code_pass_rate_reward_threshold", "code_max_execution_time")
    yield from keys.passive(names, "part of the rewards")
    yield keys.learned("code_apply_perf_penalty", (False,), "recipec scores no times")
    if formed:
        yield keys.same(form, {"rewards": [*rewards]}, "the verifier scores only completions of the form")
    elif keys.flag(form):
        scale = keys.number("r1_style_format_reward") or 0.0
        rewards.append({"format_match": {"pattern": f"{FORM}.*"}, "weight": scale})
        yield keys.say(form, {"rewards": [*rewards]})
    yield keys.same(form, note="off")
    yield from keys.passive(("r1_style_format_reward", "additive_format_reward"), "part of the rewards")
    penalty, value = "non_stop_penalty", keys.number("non_stop_penalty_value") or 0.0
    if keys.flag(penalty) and value:
        note = f"recipec scores a completion without an end like any other, and the tool {value:g}"
        yield keys.learned(penalty, (), note)
    elif keys.flag(penalty):
        yield keys.say(penalty, {}, "recipec scores a completion without an end too, and the tool gives it 0")
    yield from keys.passive((penalty, "non_stop_penalty_value"), "off")
    return rewards


def _verified(keys: Keys, verifier: str, formed: bool) -> Statements[dict[str, Any]]:
    """Return the entry of a verifier: a ready reward, or a function in a file of the port.

    Args:
        formed: whether only completions of FORM are scored.
    """
    if verifier == "code" and not formed:
        threshold = keys.number("code_pass_rate_reward_threshold") or 0.0
        options = {"column": "ground_truth", "seconds": keys.number("code_max_execution_time") or 1.0}
        return {"code_tests": {**options, **({"all_tests": True} if threshold >= 1 else {})}}
    if verifier == "code":
        yield keys.learned("apply_r1_style_format_reward", (), "recipec's tests run on any completion")
        return {"code_tests": {"column": "ground_truth"}}
    if verifier == "gsm8k" and not formed:
        return {"numeric_match": {"column": "ground_truth"}}
    asks = "_FORM.match(text) is not None and " if formed else ""
    head = FORM_OF.format(pattern=FORM) if formed else ""
    head += "\n\n" if formed and verifier == "gsm8k" else ""
    body = NUMBERS if verifier == "gsm8k" else ANSWERS
    text = SCORES.format(verifier=verifier, head=head, body=body.strip("\n"), asks=asks)
    yield keys.file(reinforcement.FILE, text)
    return {"function": f"{reinforcement.FILE}:verified"}


SCORES = '''"""The reward that stands for open-instruct's verifier {verifier}."""

import re

{head}{body}


def verified(completions, ground_truth, **columns):
    """1 for a completion with the right answer, else 0."""
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    pairs = zip(texts, map(str, ground_truth), strict=True)
    return [float({asks}right(text, wanted)) for text, wanted in pairs]
'''
FORM_OF = '_FORM = re.compile(r"{pattern}", re.DOTALL)\n'
NUMBERS = r'''
def right(text, wanted):
    """Whether the last number of a text is written as the answer."""
    numbers = re.findall(r"[-+]?(?:\d*\.\d+|\d+)", re.sub(r"(\d),(\d)", r"\1\2", text))
    return (numbers[-1] if numbers else text).lower() == wanted.lower()
'''
ANSWERS = r'''
_FINAL = re.compile(r"Final Answer: The final answer is(.*?)\.? I hope it is correct")
_IDLE = re.compile(r"\s|\\[,;:! ]|\\left|\\right|\\text|\$|,(?=\d{3}(?!\d))")


def right(text, wanted):
    """Whether the last box, the final answer or else the last formula of a text is the answer."""
    found = [boxed(text), *(match.strip() for match in _FINAL.findall(text))]
    if found == [None]:
        found = re.findall(r"\$([^$]+)\$", text)[-1:] or [text]
    return any(answer is not None and plain(answer) == plain(wanted) for answer in found)


def boxed(text):
    """What is in the last box of a text, or None."""
    start = text.rfind("\\boxed{")
    depth = 0
    for at in range(start + 6, len(text) if start >= 0 else 0):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start + 7 : at]
    return None


def plain(answer):
    """An answer without spacing and signs of LaTeX: a number as a number."""
    answer = _IDLE.sub("", re.sub(r"\\[dt]frac", r"\\frac", answer)).rstrip(".")
    try:
        return float(answer)
    except ValueError:
        return answer
'''


def _system(keys: Keys) -> Statements[str | None]:
    """Return the system prompt of a file next to the config."""
    path = keys.text("system_prompt_override_file")
    if path is None:
        return None
    places = (folder / path for folder in (keys.source.path.parent, Path.cwd()))
    place = next((place for place in places if place.is_file()), None)
    text = place.read_text(encoding="utf-8").strip() if place else None
    if text is None:
        message = f"the file of the system prompt, {path}, is not next to the command"
        yield keys.refuse("system_prompt_override_file", E1160, message, "copy it there")
    yield keys.same("system_prompt_override_file", note=f"part of {FILE}")
    return text


def _file(messages: str, truth: str, verifier: str | None, system: str | None) -> str:
    """Return the file that makes prompts of open-instruct's rows.

    Args:
        messages, truth: the columns of the conversation, and of what the verifier compares with.
        verifier: the verifier of all rows; None if it is not known.
        system: the system prompt that replaces those of the rows.
    """
    constants = {"VERIFIER": verifier, "SYSTEM": system}
    lines = [f"{name} = {literal(text)}" for name, text in constants.items() if text is not None]
    head = "\n".join([*(["\nimport json"] if verifier == "code" else []), "", *lines, ""])
    answer = f'only(row["{truth}"])'
    if verifier == "code":
        answer = f"json.loads(told) if isinstance(told := {answer}, str) else told"
    checks = CHECKED if verifier else ""
    tells = TOLD if system else ""
    names = {"messages": messages, "truth": truth, "answer": answer}
    return MODULE.format(head=head, checks=checks, tells=tells, **names)


MODULE = '''"""Prompts of open-instruct's rows, and what their verifier compares completions with."""
{head}

def only(value):
    """The one value of a list, or the value itself."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def convert(row):
    """A row of `{messages}`, `{truth}` and `dataset`."""
{checks}    messages = row["{messages}"]
    prompt = messages if len(messages) == 1 else messages[:-1]
{tells}    return {{"prompt": prompt, "ground_truth": {answer}}}
'''
CHECKED = """    if (named := str(only(row["dataset"])).lower()) != VERIFIER:
        raise ValueError(f"a row is for the verifier {named}, and the reward stands for {VERIFIER}")
"""
TOLD = """    prompt = [turn for turn in prompt if turn["role"] != "system"]
    prompt = [{"role": "system", "content": SYSTEM}, *prompt]
"""


def say_batch(run: OpenInstruct) -> Says:
    """State the completions of a step, and the steps of the episodes."""
    keys = run.keys
    prompts = keys.integer("num_unique_prompts_rollout") or 1
    group = keys.integer("num_samples_per_prompt_rollout") or 1
    whole = {"train.global_batch_size": prompts * group}
    yield keys.say("num_unique_prompts_rollout", whole)
    yield keys.say("num_samples_per_prompt_rollout", {f"{GRPO}.num_generations": group})
    yield keys.say(
        "per_device_train_batch_size",
        {"train.micro_batch_size": keys.integer("per_device_train_batch_size") or 1},
        "rows of recipec have one completion; the tool's up to pack_length tokens",
    )
    steps = (keys.integer("total_episodes") or 0) // (prompts * group)
    yield keys.say("total_episodes", {"train.steps": max(steps, 1)})
    mini = keys.integer("num_mini_batches") or 1
    note = f"a step in recipec draws its own completions; the tool takes {mini} steps on one draw"
    yield keys.learned("num_mini_batches", (1,), note)
    yield keys.say("num_epochs", {f"{GRPO}.iterations": keys.integer("num_epochs") or 1})
    yield keys.same("gradient_accumulation_steps", note="a step's completions are all of a draw")
    yield from keys.passive(("max_train_steps", "max_seq_length"), "grpo_fast.py does not read it")


def say(run: OpenInstruct) -> Says:
    """State the loss, the advantages and how completions are drawn."""
    keys = run.keys
    if tools := keys.listed("tools"):
        message = f"`tools` lets a model act in several turns ({listing(tools)}); recipec draws one answer"
        yield keys.refuse("tools", E1149, message, "port a run without tools")
    yield keys.same("tools", note="none")
    name = str(keys.value("loss_fn"))
    epsilon = keys.number("clip_lower")
    high = keys.number("clip_higher") or 0.0
    high = 1 + high if name == "cispo" else high
    yield keys.say("clip_lower", {f"{GRPO}.epsilon": epsilon})
    yield keys.say("clip_higher", {f"{GRPO}.epsilon_high": high})
    yield from _denominator(run, name)
    beta = keys.number("beta") or 0.0
    yield keys.say("beta", {f"{GRPO}.beta": beta})
    written = keys.value("kl_estimator")
    number = NAMED.get(written) if isinstance(written, str) else keys.integer("kl_estimator")
    number = 0 if number is None else number
    if beta and number not in ESTIMATES:
        message = "kl_estimator 1, a squared difference, has no counterpart: recipec has 0, 2 and 3"
        yield keys.refuse("kl_estimator", E1163, message, "kl_estimator: 2")
    elif beta:
        sets = {f"{GRPO}.{key}": value for key, value in ESTIMATES[number].items()}
        yield keys.say("kl_estimator", sets)
    yield keys.same("kl_estimator", note="there is no divergence in the loss")
    yield keys.same("load_ref_policy", note="beta says whether the loss has a reference")
    scale = keys.choice("advantage_normalization_type", ("standard", "centered")) or "centered"
    note = "recipec's deviation is that of a sample (n - 1), plus 1e-4" if scale == "standard" else ""
    sets = {f"{GRPO}.scale_rewards": "group" if scale == "standard" else "none"}
    yield keys.say("advantage_normalization_type", sets, note)
    if keys.flag("active_sampling"):
        note = f"recipec draws other groups at most {ROUNDS} times a step"
        yield keys.say("active_sampling", {f"{GRPO}.dynamic_sampling": ROUNDS}, note)
        yield keys.same("filter_zero_std_samples", note="part of active_sampling")
    yield keys.same("active_sampling", note="off")
    counted = "recipec counts the tokens of groups without a difference; the tool leaves them out of the mean"
    if keys.flag("filter_zero_std_samples"):
        yield keys.say("filter_zero_std_samples", {}, counted)
    yield keys.same("filter_zero_std_samples", note="off")
    if keys.flag("mask_truncated_completions"):
        note = "their rewards count in recipec's groups; the tool leaves them out before"
        yield keys.say("mask_truncated_completions", {f"{GRPO}.mask_truncated": True}, note)
    yield keys.same("mask_truncated_completions", note="off")
    yield keys.say("temperature", {f"{GRPO}.temperature": keys.number("temperature")})
    top = keys.number("vllm_top_p") or 1.0
    yield keys.same("vllm_top_p", {f"{GRPO}.top_p": top} if top != 1 else None, "all tokens may be drawn")
    if stop := keys.listed("stop_strings"):
        note = "in recipec each must be a single token of the model"
        yield keys.say("stop_strings", {f"{GRPO}.stop": stop}, note)
    yield keys.same("stop_strings", note="none")
    late = ASYNC.format(steps=keys.integer("async_steps") or 1)
    yield keys.say("async_steps", {}, late)
    if keys.flag("inflight_updates"):
        yield keys.say("inflight_updates", {}, "recipec changes no weights while it draws")
    yield keys.same("inflight_updates", note="off")
    yield from keys.follow(OF_GROUPS)


def _denominator(run: OpenInstruct, name: str) -> Says:
    """State the loss's name by what its sum is divided by: the tokens of a step, or a constant."""
    keys = run.keys
    constant = str(keys.value("loss_denominator"))
    ledger = keys.ledger
    most = (ledger.value("train.global_batch_size") or 0) * (keys.integer("response_length") or 0)
    loss = name
    if constant != "token" and name == "dapo" and float(constant) == most:
        loss = "dr_grpo"
        yield keys.same("loss_denominator", {f"{GRPO}.loss": loss})
    note = f"recipec divides by the step's tokens, or by {most:,}, its completions times response_length"
    yield keys.learned("loss_denominator", ("token",), note)
    yield keys.say("loss_fn", {f"{GRPO}.loss": loss})
