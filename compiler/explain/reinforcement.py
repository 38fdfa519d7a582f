"""Describe reinforcement learning: groups of completions, rewards and rollouts."""

from __future__ import annotations

from recipec.compiler.lowering.program import Program
from recipec.compiler.pages.numbers import gib_number
from recipec.compiler.roofline.rollout import rollout_need
from recipec.compiler.wording import listing, mesh_axes, plural
from recipec.spec.core_schema import flow


def groups(program: Program) -> list[str]:
    """Describe the completions of a step, and their lengths."""
    train, grpo = program.recipe.train, program.recipe.train.grpo
    assert grpo is not None
    prompts = train.global_batch_size // grpo.num_generations
    again = f", for {plural(grpo.iterations, 'step')}" if grpo.iterations > 1 else ""
    return [
        f"{plural(prompts, 'prompt')} x {plural(grpo.num_generations, 'completion')} = "
        f"{plural(train.global_batch_size, 'completion')} a step{again}, sampled at temperature "
        f"{grpo.temperature:g}",
        f"prompts of at most {plural(grpo.max_prompt_length, 'token')}, and completions of at most "
        f"{plural(grpo.max_completion_length, 'token')}",
    ]


def rewards(program: Program) -> list[str]:
    """Describe what scores completions."""
    limits, out = program.recipe.reward_limits, []
    for reward in program.recipe.rewards:
        if reward.function is not None:
            what = f"{reward.function}, which is copied into the artifact and locked"
        else:
            what = f"{reward.kind} {flow(getattr(reward, reward.kind).model_dump(exclude_unset=True))}"
        out.append(f"{reward.weight:g} x {what}")
    if out:
        out.append(
            f"each runs in a process of its own, with {limits.seconds:g} s for all completions of a step and "
            f"{limits.memory_mebibytes:,} MiB"
        )
    return out


def rollout(program: Program) -> list[str]:
    """Describe the layout in which completions are generated."""
    recipe = program.recipe
    if program.generated is None:
        return []
    if recipe.rollout.engine == "vllm":
        return _served(program)
    axes = recipe.rollout.axes
    where = "the mesh that trains" if axes is None else mesh_axes(axes)
    rows = recipe.rollout.rows or recipe.train.global_batch_size
    need = rollout_need(program)
    out = [f"{plural(rows, 'completion')} at once on {where}"]
    if (reason := program.automatic.get("rollout.axes")) is not None:
        out.append(f"chosen by the compiler: {reason}")
    parts = {"state": need.state, "weights in this layout": need.weights, "keys and values": need.cache}
    sizes = listing(f"{gib_number(size, 2)} GiB of {what}" for what, size in parts.items() if size)
    out.append(f"by calculation, a device holds {sizes}")
    return out


def _served(program: Program) -> list[str]:
    """Describe the server that generates, and the correction for its log-probabilities."""
    recipe, rollout = program.recipe, program.recipe.rollout
    rows = rollout.rows or recipe.train.global_batch_size
    folder = rollout.adapter_path or "rollout-adapters in the checkpoint directory"
    seen = f", which the server sees as {rollout.server_adapter_path}" if rollout.server_adapter_path else ""
    out = [
        f"the vLLM server at {rollout.url}, asked for {plural(rows, 'completion')} at once",
        f"adapters of each step in {folder}{seen}",
        f"the run waits up to {rollout.wait_seconds:,} s for the server",
    ]
    if not rollout.importance_sampling_correction:
        return [*out, "the loss is not corrected for the server's other log-probabilities"]
    bounds = {"from": rollout.importance_sampling_clip_min, "to": rollout.importance_sampling_clip_max}
    within = " ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
    mode = rollout.importance_sampling_mode
    return [*out, f"the loss is corrected by {mode}, with weights {within or 'without bounds'}"]
