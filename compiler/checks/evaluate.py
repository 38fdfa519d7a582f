"""Check evaluation: the file of prompts, the samples, and whether answers fit the server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from recipec.compiler import catalog
from recipec.compiler.lowering import pins
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.references import asks_chats, escapes, leads_out
from recipec.compiler.wording import line
from recipec.runtime.clients.evaluate_prompts import parse
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.key_paths import join

E0650 = Code(
    "E0650",
    "prompts that cannot be read",
    cause="evaluate.prompts names a UTF-8 file below the recipe's folder, which is copied into the "
    "artifact. The file is missing, empty or too large, or the value is an address.",
    cure="Correct the path, or copy the file there.",
)

E0651 = Code(
    "E0651",
    "malformed line of prompts",
    cause='Each line must be {"prompt": ..., "expected": ...} or {"messages": [...], "expected": '
    "...}, and no two lines may ask the same.",
    cure="Correct the line that the message names.",
)

E0652 = Code(
    "E0652",
    "expected is not a regular expression",
    cause="Python's re module refuses the expression. In JSON, write each backslash twice.",
    cure="Correct the line that the message names.",
)

CODES = {"file": E0650, "line": E0651, "regex": E0652}
"""Diagnostic codes by kind of fault in a file of prompts."""

SHOWN = 5
"""The number of faults of a file that are reported one by one."""

TASK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+*:@-]*")
"""Names of lm-eval's tasks and groups."""


W0654 = Code(
    "W0654",
    "several samples at temperature 0",
    cause="At temperature 0 the model always picks the likeliest token, so all samples of a prompt "
    "are the same and pass@k equals pass@1.",
    cure="Write num_generations: 1, or use a temperature above 0.",
)

E0655 = Code(
    "E0655",
    "answers as long as the context",
    cause="A prompt and an answer of evaluate.max_tokens together must fit serve.max_model_len. vLLM "
    "refuses the requests.",
    cure="Use a smaller max_tokens or a larger max_model_len.",
)

N0656 = Code(
    "N0656",
    "evaluation without a server",
    cause="eval.sh sends requests to the server that the serve section describes. Without that "
    "section it is not written.",
    cure="Add a serve section, or remove the evaluate section.",
)

N0665 = Code(
    "N0665",
    "benchmark without a server",
    cause="`benchmark` measures the server of the section serve. Without that section there is no "
    "server, and no `bench.sh`.",
    cure="Add `serve`, or remove `benchmark`.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    evaluate, serve = facts.recipe.evaluate, facts.recipe.serve
    if serve is None:
        if "benchmark" in facts.recipe.model_fields_set:
            yield Diagnostic(
                N0665,
                "without a serve section there is no server to measure, and bench.sh is not written",
                "benchmark",
                "serve: {accelerator: v6e-8}, or remove the section",
                at_key=True,
            )
        if evaluate.prompts or evaluate.tasks:
            yield Diagnostic(
                N0656,
                "without a serve section there is no server to evaluate, and eval.sh is not written",
                "evaluate",
                "serve: {accelerator: v6e-8}",
            )
    elif evaluate.max_tokens >= serve.max_model_len and (evaluate.prompts or evaluate.tasks):
        place = facts.first_given("evaluate.max_tokens", "serve.max_model_len")
        yield Diagnostic(
            E0655,
            f"max_tokens {evaluate.max_tokens:,} leaves no room for a prompt: the server takes "
            f"{serve.max_model_len:,} tokens of prompt and answer (serve.max_model_len)",
            place,
            line("evaluate.max_tokens", max(1, serve.max_model_len // 2), place),
        )
    if evaluate.num_generations > 1 and evaluate.temperature == 0:
        yield Diagnostic(
            W0654,
            f"at temperature 0 all {evaluate.num_generations} samples of a prompt are the same answer",
            "evaluate.num_generations",
            "num_generations: 1, or temperature: 0.8",
        )
    yield from _tasks(facts)
    yield from _prompts(facts)


E0657 = Code(
    "E0657",
    "malformed task name",
    cause="Names of lm-eval's tasks contain letters, digits and a few signs. A comma or a space "
    "separates several names.",
    cure="Write one name in each entry of evaluate.tasks.",
)

W0658 = Code(
    "W0658",
    "tasks that can crash the server",
    cause="If data.format has no turns, lm-eval asks for log probabilities of prompts in tasks that "
    "score given answers. tpu-inference then raises an error in its engine if the model is "
    "multimodal.",
    cure="Use tasks that generate their answers.",
)


def _tasks(facts: Facts) -> Iterator[Diagnostic]:
    for index, task in enumerate(facts.recipe.evaluate.tasks):
        if not TASK.fullmatch(task):
            yield Diagnostic(
                E0657,
                f"`{task}` is not the name of a task of lm-eval",
                join(("evaluate", "tasks", index)),
                "write one name for each entry, for example gsm8k; `lm_eval ls tasks` lists them",
            )
    entry = catalog.entry_of(facts.recipe.model.id)
    vision = facts.recipe.serve is not None and entry is not None and "text_config" in entry["config"]
    if facts.recipe.evaluate.tasks and not asks_chats(facts.recipe) and vision:
        yield Diagnostic(
            W0658,
            "tasks that score given answers by log probabilities, such as mmlu, crash the server: in "
            f"tpu-inference {pins.sets()['serve']['tpu-inference']} multimodal models return none for "
            "prompts",
            "evaluate.tasks",
            "use tasks that generate their answers, such as gsm8k",
        )


W0653 = Code(
    "W0653",
    "expected that matches any answer",
    cause="The expression also matches an empty answer, so every answer passes.",
    cure="Use an expression that a wrong answer does not match.",
)


def _prompts(facts: Facts) -> Iterator[Diagnostic]:
    path = facts.recipe.evaluate.prompts
    where = "evaluate.prompts"
    if path is None or escapes(path) or leads_out(facts.folder, path):
        return
    if "://" in path:
        yield Diagnostic(
            E0650,
            f"`{path}` is an address: the prompts must be a local file, which is copied into the artifact",
            where,
            "copy the file below the recipe's folder",
        )
        return
    prompts, faults = parse(facts.folder / path, asks_chats(facts.recipe))
    for fault in faults[:SHOWN]:
        place = path if fault.line is None else f"{path}:{fault.line}"
        help = fault.help
        if not os.path.exists(facts.folder / path):
            help = "the path is relative to the recipe's folder"
        yield Diagnostic(CODES[fault.kind], f"{place}: {fault.message}", where, help)
    if len(faults) > SHOWN:
        yield Diagnostic(
            E0651, f"{path}: {len(faults) - SHOWN} more lines have errors", where, "correct the first ones"
        )
    for prompt in prompts:
        if prompt.matches_nothing:
            yield Diagnostic(
                W0653,
                f"{path}:{prompt.line}: `expected` also matches an empty answer, so every answer passes",
                where,
                "use an expression that no wrong answer matches, for example \\b42\\b",
            )
            return
