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
    if recipe.train.grpo is None:
        return []
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
