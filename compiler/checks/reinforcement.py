"""Check reinforcement learning: rewards and their columns, groups of completions, lengths and the rollout."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from recipec.compiler import catalog
from recipec.compiler.checks.formats import module_of
from recipec.compiler.checks.samples import first_at_hand
from recipec.compiler.checks.train import W0511
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.references import escapes, functions, leads_out, schemas
from recipec.compiler.packages import missing_packages
from recipec.compiler.vllm import features
from recipec.compiler.wording import divisors, listing, plural
from recipec.runtime.data.formats import prompt_column
from recipec.runtime.data.tokenizer import TOKENIZER, token_ids
from recipec.runtime.errors import UserError
from recipec.runtime.model.adapters import principal
from recipec.runtime.reinforcement.loss_types import LOSS_TYPES
from recipec.runtime.reinforcement.ready_rewards import READY_REWARDS
from recipec.runtime.settings import REWARD_ARGUMENTS
from recipec.runtime.training.objectives import generated
from recipec.spec import words
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.language import Reward
from recipec.spec.language.reinforcement import OF_SERVER, Grpo


def check(facts: Facts) -> Iterator[Diagnostic]:
    recipe, grpo = facts.recipe, facts.recipe.train.grpo
    if recipe.train.objective != "grpo" or grpo is None:
        read = ("rollout",) if generated(recipe.train, recipe.data.max_length) is not None else ()
        for name in ("rewards", "reward_limits", "rollout"):
            if name in recipe.model_fields_set and name not in read:
                message, other = f"{name} has no effect with {recipe.train.objective}", "objective: grpo"
                if name == "rollout" and recipe.train.objective == "distill":
                    message, other = f"{message} and lmbda 0", "train: {distill: {lmbda: 0.5}}"
                yield Diagnostic(W0511, message, name, f"remove the section, or {other}", at_key=True)
        return
    yield from _rewards(facts)
    yield from _columns(facts)
    yield from _plain(facts)
    yield from _data(facts)
    yield from _groups(facts, grpo)
    yield from _loss(facts, grpo)
    yield from _lengths(facts, grpo)
    yield from _ends(facts, grpo)
    yield from _rollout(facts)


E0534 = Code(
    "E0534",
    "no rewards",
    cause="The objective grpo learns from rewards of the model's own completions, and the recipe has none.",
    cure="Add `rewards`, with a function of your own or a ready reward.",
)

E0535 = Code(
    "E0535",
    "reward cannot be used",
    cause="The file of a reward function or of a JSON Schema is missing or malformed, it has no such "
    "function, it imports a file that the artifact does not have, or a pattern is no regular expression.",
    cure="Correct the file or the pattern. The form of a function is file.py:function.",
)

E0536 = Code(
    "E0536",
    "reward function with other parameters",
    cause="A reward function is called with prompts, completions, completion_ids and all other columns of "
    "the data, each as a keyword argument. It must take them all.",
    cure="Define it as `def NAME(completions, **columns)`, with the columns that it reads by name.",
)


def _rewards(facts: Facts) -> Iterator[Diagnostic]:
    recipe = facts.recipe
    if not recipe.rewards:
        yield Diagnostic(
            E0534,
            "grpo learns from rewards, and the recipe has none",
            "train.objective",
            "rewards: [{function: rewards.py:correct}], or a ready one: rewards: [{numeric_match: {column: "
            "answer}}]",
        )
    reward_functions = {
        place: name for place, name in functions(recipe).items() if place.startswith("rewards")
    }
    for path in dict.fromkeys(function.partition(":")[0] for function in reward_functions.values()):
        yield from _imports(
            facts,
            path,
            next(place for place in reward_functions if reward_functions[place].startswith(f"{path}:")),
        )
    for place, function in reward_functions.items():
        yield from _function(facts, place, function)
    for place, path in schemas(recipe).items():
        if not escapes(path) and not leads_out(facts.folder, path):
            yield from _schema(facts, place, path)
    for index, reward in enumerate(recipe.rewards):
        if reward.format_match is not None:
            try:
                re.compile(reward.format_match.pattern, re.DOTALL)
            except re.error as error:
                yield Diagnostic(
                    E0535,
                    f"the pattern is no regular expression: {error}",
                    f"rewards[{index}].format_match.pattern",
                    "correct it; see Python's re",
                )


def _function(facts: Facts, place: str, function: str) -> Iterator[Diagnostic]:
    path, _, name = function.partition(":")
    module = module_of(facts, path, place, E0535)
    if not isinstance(module, ast.Module):
        yield from () if module is None else (module,)
        return
    defined = _defined(module)
    if name not in defined:
        names = [key for key, node in defined.items() if node is not None]
        close = words.slip(name, names)
        hint = f"did you mean `{path}:{close}`? " if close else ""
        has = f"it has {listing(f'`{name}`' for name in names)}" if names else "it has none"
        yield Diagnostic(E0535, f"`{path}` has no function `{name}`", place, f"{hint}{has} at its top level")
        return
    node = defined[name]
    if node is not None:
        yield from _parameters(facts, place, path, node)


def _imports(facts: Facts, path: str, place: str) -> Iterator[Diagnostic]:
    """Report files next to a reward function that it imports, and that the artifact does not have."""
    module = module_of(facts, path, place, E0535)
    copied = {facts.folder / function.partition(":")[0] for function in functions(facts.recipe).values()}
    for name in dict.fromkeys(_imported(module)) if isinstance(module, ast.Module) else ():
        file = (facts.folder / path).parent / f"{name}.py"
        if file.is_file() and file not in copied:
            yield Diagnostic(
                E0535,
                f"`{path}` imports `{name}.py`, which is not copied into the artifact",
                place,
                f"put what it needs of it into `{path}`",
            )


def _imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _defined(module: ast.Module) -> dict[str, Function | None]:
    """Return the names that a module defines at its top level, each with its function if it is one."""
    names: dict[str, Function | None] = {}
    for node in module.body:
        if isinstance(node, Function):
            names[node.name] = node
        elif isinstance(node, ast.ClassDef):
            names[node.name] = None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= dict.fromkeys((alias.asname or alias.name) for alias in node.names)
        else:
            targets = (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
            names |= {target: None for target in targets if target not in names}
    return names


def _parameters(facts: Facts, place: str, path: str, node: Function) -> Iterator[Diagnostic]:
    """Report a function that cannot be called with the arguments of every reward function."""
    if node.decorator_list:
        return  # the decorator may change the parameters
    arguments = node.args
    by_name = [arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)]
    taken = f"it is called with {listing(f'`{name}`' for name in REWARD_ARGUMENTS)} and the data's columns"
    way = f"def {node.name}(completions, **columns)"
    missing = [argument for argument in REWARD_ARGUMENTS if argument not in by_name]
    if arguments.posonlyargs:
        what = f"`{node.name}` of `{path}` takes `{arguments.posonlyargs[0].arg}` only by position: {taken}"
    elif arguments.kwarg is None and missing:
        what = f"`{node.name}` of `{path}` does not take {listing(f'`{name}`' for name in missing)}: {taken}"
    else:
        return
    yield Diagnostic(E0536, what, place, way)


def _schema(facts: Facts, place: str, path: str) -> Iterator[Diagnostic]:
    file = facts.folder / path
    try:
        if not file.is_file():
            raise ValueError("it does not exist next to the recipe")
        schema = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        message = f"the JSON Schema `{path}` cannot be read: {error}"
        yield Diagnostic(E0535, message, place, "the path is relative to the recipe's folder")
        return
    if missing_packages(("jsonschema",)):
        return
    try:
        READY_REWARDS["json_schema"].make(schema)
    except UserError as error:
        yield Diagnostic(E0535, f"`{path}`: {error.message}", place, error.help)


E0471 = Code(
    "E0471",
    "column that a reward needs is missing",
    cause="A reward compares with a column, or its function has a parameter, that the rows of a local file "
    "do not have.",
    cure="Name a column of the data, rename one with `data.fields`, or make it with a `data.transform`.",
)

E0472 = Code(
    "E0472",
    "answers that a reward cannot compare with",
    cause="A ready reward needs values of a certain kind in its column: numeric_match numbers, code_tests "
    "lists of statements.",
    cure="Name another column, or use another reward.",
)


def _columns(facts: Facts) -> Iterator[Diagnostic]:
    """Check the columns that rewards read against the first rows of local files."""
    data = facts.recipe.data
    needed = [
        (i, reward, name) for i, reward in enumerate(facts.recipe.rewards) for name in _needs(facts, reward)
    ]
    parts = {"train": data.train, "eval": data.eval}
    sources = {f"data.{part}[{i}]": source for part in parts for i, source in enumerate(parts[part])}
    for at, source in sources.items():
        section = data.of(source)
        rows = [] if section.transform is not None else first_at_hand(facts, source.path)[: source.limit]
        roles = {source: role for role, source in section.fields.items()}
        for column in dict.fromkeys(column for row in rows for column in row):
            if roles.get(column, column) in REWARD_ARGUMENTS:
                yield Diagnostic(
                    E0476,
                    f"`{source.path}` has a column `{column}`, which is an argument of every reward function",
                    at,
                    f"data: {{fields: {{own_{column}: {column}}}}} renames it",
                )
        for number, reward, name in needed:
            column = section.fields.get(name, name)
            lacking = sum(row.get(column) is None for row in rows)
            place = f"rewards[{number}].{reward.kind}" + ("" if reward.function else ".column")
            if rows and lacking:
                columns = [
                    str(column) for column in rows[0] if column != prompt_column(rows[0], section.fields)
                ]
                close = None if column in columns else words.slip(column, columns)
                of = plural(len(rows), "row")
                yield Diagnostic(
                    E0471,
                    f"{lacking} of the first {of} of `{source.path}` {'has' if lacking == 1 else 'have'} no "
                    f"`{column}`, which {_name(reward)} needs",
                    place,
                    f"did you mean `{close}`?"
                    if close
                    else f"leave rows without `{column}` out: a data.transform returns None for them"
                    if lacking < len(rows)
                    else f"the columns of {at} are {listing(columns)}"
                    if columns
                    else f"{at} has only prompts",
                )
            elif rows and (fault := _fault(reward, [row[column] for row in rows])):
                yield Diagnostic(E0472, f"`{source.path}`, column `{column}`: {fault[0]}", place, fault[1])


E0476 = Code(
    "E0476",
    "column with the name of a reward's argument",
    cause="A reward function is called with prompts, completions and completion_ids of the run, and with the "
    "other columns of the data by their names.",
    cure="Rename the column with `data.fields`, as in the help, or leave it out with `data.transform`.",
)

N0475 = Code(
    "N0475",
    "prompts without the chat template",
    cause="A prompt of plain text is tokenized as it is. The model has a chat template, and a server puts "
    "what it is asked into that.",
    cure="Give rows with `messages`, or make them with `data.transform`. Nothing, if the model is meant to "
    "complete plain text.",
)


def _plain(facts: Facts) -> Iterator[Diagnostic]:
    """Report prompts of plain text for a model with a chat template."""
    model, data = facts.model, facts.recipe.data
    if model is None or model.chat is False:
        return
    for index, source in enumerate(data.train):
        section = data.of(source)
        rows = [] if section.transform is not None else first_at_hand(facts, source.path)[:1]
        prompts = [row.get(prompt_column(row, section.fields)) for row in rows]
        if any(isinstance(prompt, str) and not prompt.lstrip().startswith("[") for prompt in prompts):
            yield Diagnostic(
                N0475,
                f"the prompts of `{source.path}` are plain text, which gets no chat template, and "
                f"{model.title} has one",
                f"data.train[{index}].path",
                'rows with messages: [{"role": "user", "content": ...}], as a data.transform can make them',
            )


def _name(reward: Reward) -> str:
    return f"`{reward.function}`" if reward.function else reward.kind


def _needs(facts: Facts, reward: Reward) -> list[str]:
    """Return the columns that a reward reads, as far as its section or its parameters say."""
    if reward.function is None:
        column = getattr(getattr(reward, reward.kind), "column", None)
        return [] if column is None else [column]
    path, _, name = reward.function.partition(":")
    module = module_of(facts, path, "", E0535)
    node = _defined(module).get(name) if isinstance(module, ast.Module) else None
    if node is None or node.decorator_list:
        return []
    arguments = node.args
    plain = arguments.args[: len(arguments.args) - len(arguments.defaults)]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required = [*plain, *(parameter for parameter, default in named if default is None)]
    return [parameter.arg for parameter in required if parameter.arg not in REWARD_ARGUMENTS]


def _fault(reward: Reward, values: list[Any]) -> tuple[str, str] | None:
    """Return why a ready reward cannot compare with one of the values, and a help."""
    if reward.kind not in ("numeric_match", "code_tests"):
        return None
    score = READY_REWARDS[reward.kind].make()
    for value in values:
        try:
            score("", value)
        except UserError as error:
            return error.message, error.help or "name another column"
    return None


E0473 = Code(
    "E0473",
    "data that grpo does not read",
    cause="A run of grpo draws its prompts in one order, each of them once in an epoch.",
    cure="Remove the line.",
)

E0474 = Code(
    "E0474",
    "prompts that are cut",
    cause="A prompt ends with the beginning of an answer. If its end is cut off, the model continues the "
    "question.",
    cure="Write `overlong: drop`, or `error`, and a larger `train.grpo.max_prompt_length`.",
)


def _data(facts: Facts) -> Iterator[Diagnostic]:
    recipe = facts.recipe
    unread = {
        "data.stream_window": recipe.data.stream_window is not None,
        "data.curriculum": recipe.data.curriculum is not None,
        "data.temperature": recipe.data.temperature is not None,
    }
    for path in (path for path, columns in unread.items() if columns):
        message = f"a run of grpo has no {path.partition('.')[2]}"
        yield Diagnostic(E0473, message, path, "remove the line", at_key=True)
    for place, overlong in _overlong(facts):
        if overlong == "truncate":
            yield Diagnostic(
                E0474,
                "a prompt that is cut at its end has no beginning of an answer",
                place,
                "overlong: drop, or error",
            )


def _overlong(facts: Facts) -> Iterator[tuple[str, str | None]]:
    yield "data.overlong", facts.recipe.data.overlong
    for part in ("train", "eval"):
        for index, source in enumerate(getattr(facts.recipe.data, part)):
            yield f"data.{part}[{index}].overlong", source.overlong


E0537 = Code(
    "E0537",
    "groups do not fill the step",
    cause="A step has global_batch_size completions, in groups of num_generations for each prompt.",
    cure="Use a global_batch_size that num_generations divides.",
)


def _groups(facts: Facts, grpo: Grpo) -> Iterator[Diagnostic]:
    rows, group = facts.recipe.train.global_batch_size, grpo.num_generations
    if rows % group:
        least = math.lcm(group, facts.recipe.train.micro_batch_size * facts.data_parallel)
        whole = -(-rows // least) * least
        fitting = [size for size in divisors(rows) if size > 1]
        other = min(fitting, key=lambda size: abs(size - group), default=None)
        yield Diagnostic(
            E0537,
            f"global_batch_size {rows:,} is no multiple of num_generations {group:,}: a step would have part "
            "of a group",
            facts.first_given("train.grpo.num_generations", "train.global_batch_size", "train.objective"),
            f"train: {{global_batch_size: {whole}}}" + (f", or num_generations: {other}" if other else ""),
        )


W0538 = Code(
    "W0538",
    "key of grpo without effect",
    cause="kl and kl_bias_correction belong to the divergence from the reference, which beta 0 leaves out, "
    "and rloo has in rewards. num_generations_eval is of evaluations.",
    cure="Remove the line, or give `beta` or `data.eval`.",
)

W0539 = Code(
    "W0539",
    "loss that teaches little",
    cause="For cispo, epsilon_high is the largest weight of a token, and its default is epsilon: 0.2. The "
    "gradient of k1 has the expectation 0 without kl_bias_correction.",
    cure="Follow the help, which has the usual value.",
)

W0540 = Code(
    "W0540",
    "dropout with grpo",
    cause="Completions are generated without dropout, and the update computes their probabilities with it. "
    "So the ratio of the two is not 1 even before the first update.",
    cure="Write `dropout: 0.0`.",
)


def _loss(facts: Facts, grpo: Grpo) -> Iterator[Diagnostic]:
    if grpo.num_generations_eval is not None and not facts.recipe.data.evaluates:
        yield Diagnostic(
            W0538,
            "num_generations_eval has no effect: the recipe has no prompts to evaluate on",
            "train.grpo.num_generations_eval",
            "data: {eval_fraction: 0.05} or data.eval, or remove the line",
            at_key=True,
        )
    if not grpo.beta:
        for name in ("kl", "kl_bias_correction"):
            if name in grpo.model_fields_set:
                message = f"{name} has no effect with beta 0"
                yield Diagnostic(W0538, message, f"train.grpo.{name}", "remove the line", at_key=True)
    elif grpo.loss == "rloo":
        for name in ("kl", "kl_bias_correction"):
            if name in grpo.model_fields_set:
                message = f"{name} has no effect with rloo, which subtracts the divergence from rewards"
                yield Diagnostic(W0538, message, f"train.grpo.{name}", "remove the line", at_key=True)
    elif grpo.kl == "k1" and not grpo.kl_bias_correction:
        yield Diagnostic(
            W0539,
            "the gradient of k1 has the expectation 0: it does not keep the model close to the reference",
            "train.grpo.kl",
            "kl: k3, or kl_bias_correction: true",
        )
    if not LOSS_TYPES[grpo.loss].clips_gradient and grpo.epsilon_high is None:
        yield Diagnostic(
            W0539,
            f"{grpo.loss} weighs each token with its ratio, of at most epsilon_high, which is epsilon: "
            f"{grpo.epsilon:g}",
            "train.grpo.loss",
            "epsilon_high: 5.0, the value of TRL's documentation",
        )
    if facts.recipe.lora is not None and facts.recipe.lora.dropout:
        yield Diagnostic(
            W0540,
            "completions are generated without dropout, and trained with it",
            "lora.dropout",
            "dropout: 0.0",
        )


E0541 = Code(
    "E0541",
    "lengths of prompts and completions",
    cause="A row has max_prompt_length + max_completion_length tokens. data.max_length can have no other "
    "value, the model must have that many positions, and an overlong penalty begins within the completion.",
    cure="Use the value in the help.",
)


def _lengths(facts: Facts, grpo: Grpo) -> Iterator[Diagnostic]:
    length = grpo.max_prompt_length + grpo.max_completion_length
    most = facts.positions
    if most is not None and length > most and facts.model is not None:
        place = facts.first_given("train.grpo.max_completion_length", "train.grpo.max_prompt_length")
        left = most - grpo.max_prompt_length
        yield Diagnostic(
            E0541,
            f"prompt and completion have up to {length:,} tokens, and {facts.model.title} has {most:,} "
            "positions",
            place,
            f"max_completion_length: {left}" if left > 0 else f"max_prompt_length: {most // 2}",
        )
    elif facts.recipe.data.max_length != length:
        yield Diagnostic(
            E0541,
            f"max_length is {facts.recipe.data.max_length:,}, and prompt and completion have up to "
            f"{length:,} tokens",
            "data.max_length",
            "remove the line: train.grpo has the lengths",
            at_key=True,
        )
    buffer = grpo.overlong_penalty
    if buffer is not None and buffer > grpo.max_completion_length:
        yield Diagnostic(
            E0541,
            f"overlong_penalty is {buffer:,} tokens, and a completion has at most "
            f"{grpo.max_completion_length:,}",
            "train.grpo.overlong_penalty",
            f"overlong_penalty: {max(1, grpo.max_completion_length // 4)}",
        )


E0542 = Code(
    "E0542",
    "stop that is not a token",
    cause="A completion ends at single tokens, and the tokenizer writes the text with several or does not "
    "know it.",
    cure="Use a text that is one token, or make it one with `model.add_tokens`.",
)


def _ends(facts: Facts, grpo: Grpo) -> Iterator[Diagnostic]:
    known = _tokens(facts)
    for index, text in enumerate(grpo.stop if known is not None else ()):
        spelled = {text, text.replace(" ", "\u0120").replace("\n", "\u010a"), text.replace(" ", "\u2581")}
        if not spelled & {*(known or ()), *facts.recipe.model.add_tokens}:
            yield Diagnostic(
                E0542,
                f"`{text}` is no token of the tokenizer, so no completion would end there",
                f"train.grpo.stop[{index}]",
                "a text that is one token, or model: {add_tokens: [...]}",
            )


def _tokens(facts: Facts) -> Mapping[str, int] | None:
    """Return the tokenizer's tokens, if it is on this machine."""
    folder = catalog.folder_of(facts.recipe.model.tokenizer or facts.recipe.model.id, facts.folder)
    try:
        return None if folder is None else token_ids(json.loads((folder / TOKENIZER).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # train.py reports what is wrong with it


E0543 = Code(
    "E0543",
    "model that cannot generate in a run",
    cause="Completions are generated by the model that trains, with a cache. A model that no family "
    "describes is trained with transformers' code, which the rollout does not call.",
    cure="Use a model of a family that docs/models.md lists.",
)

E0544 = Code(
    "E0544",
    "layout of rollouts",
    cause="rollout.axes is a mesh of the same devices. Its sizes multiply to their number, tp divides the "
    "heads, and it has no cp. The completions that are generated at once are split over dcn, fsdp and ep.",
    cure="Use the value in the help, or leave `rollout.axes` and `rollout.rows` to the compiler.",
)

E0961 = Code(
    "E0961",
    "run that a rollout server cannot follow",
    cause="With `engine: vllm` a server gets the adapters of each step, and nothing else. A server on TPUs "
    "takes no new weights, its loader takes only A and B of projections, and one host of the run asks it. It "
    "takes temperatures from 0.01 to 2.",
    cure="Train adapters that vLLM loads, on one host, or write `engine: mesh`.",
)

E0546 = Code(
    "E0546",
    "sampling that the correction does not know",
    cause="The correction for the server's log-probabilities divides probabilities of the whole vocabulary. "
    "With top_p, top_k or min_p the server's are over the tokens that remain, so that every weight is too "
    "small.",
    cure="Remove the key, or write `importance_sampling_correction: false`.",
)

E0547 = Code(
    "E0547",
    "key of the other rollout engine",
    cause="rollout.axes is a layout of the chips that train, and a server generates on others. The keys of "
    "the server have no effect on the chips that train.",
    cure="Remove the line, or choose the other `rollout.engine`.",
)


def _rollout(facts: Facts) -> Iterator[Diagnostic]:
    model = facts.model
    if model is not None and not model.family.tunix:
        yield Diagnostic(
            E0543,
            f"{model.title} is trained with transformers' model, which generates no completions in a run",
            "model.id",
            "a model of one of the families in docs/models.md",
        )
    if facts.recipe.rollout.engine == "vllm":
        yield from _server(facts)
    else:
        yield from on_mesh(facts)


LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""vLLM refuses higher temperatures, and replaces lower ones by the least."""


def _server(facts: Facts) -> Iterator[Diagnostic]:
    """Check a run whose completions a vLLM server generates."""
    recipe, rollout, grpo = facts.recipe, facts.recipe.rollout, facts.recipe.train.grpo
    assert grpo is not None
    for place, what, help in _unserved(facts):
        yield Diagnostic(E0961, f"the rollout server {what}", place, help)
    if not LEAST_TEMPERATURE <= grpo.temperature <= MOST_TEMPERATURE:
        yield Diagnostic(
            E0961,
            f"the rollout server takes temperatures from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}",
            "train.grpo.temperature",
            "temperature: 1.0",
        )
    for name, idle in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if rollout.importance_sampling_correction and getattr(grpo, name) != idle:
            yield Diagnostic(
                E0546,
                f"with {name} the server's log-probabilities do not compare with those of the training step",
                f"train.grpo.{name}",
                "remove the line, or rollout: {importance_sampling_correction: false}",
                at_key=True,
            )
    if rollout.axes is not None:
        message = "the server has its own layout: axes is one of the chips that train"
        yield Diagnostic(E0547, message, "rollout.axes", "remove the line", at_key=True)
    if rollout.rows is not None and rollout.rows % grpo.num_generations:
        whole = -(-rollout.rows // grpo.num_generations) * grpo.num_generations
        yield Diagnostic(
            E0544,
            f"{rollout.rows:,} completions at once are not whole groups of {grpo.num_generations:,}, which "
            "one request asks for",
            "rollout.rows",
            f"rows: {whole}, or null",
        )
    if "://" in recipe.checkpoint.directory and rollout.adapter_path is None:
        yield Diagnostic(
            E0961,
            f"the rollout server reads adapters from a folder, and the checkpoints are in "
            f"{recipe.checkpoint.directory}",
            facts.first_given("rollout.engine", "checkpoint.directory"),
            "rollout: {adapter_path: /FOLDER}, a folder that both machines mount",
        )


def _unserved(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Yield where a recipe has what a rollout server cannot be given, what that is, and a help."""
    recipe, lora = facts.recipe, facts.recipe.lora
    if lora is None:
        yield (
            "rollout.engine",
            "takes adapters, and the recipe trains all weights",
            "lora: {rank: 16}, or engine: mesh",
        )
        return
    others = {
        "lora.modules_to_save": lora.modules_to_save,
        "lora.trainable_tokens": lora.trainable_tokens,
        "lora.kind": lora.kind == "dora",
        "model.add_tokens": recipe.model.add_tokens,
        "model.vocab_size": recipe.model.vocab_size,
    }
    for place in (place for place, used in others.items() if used):
        name = "DoRA's magnitudes" if place == "lora.kind" else place.rpartition(".")[2]
        yield place, f"loads only A and B of projections, and the recipe has {name}", "engine: mesh"
    if features.max_lora_rank(recipe) is None:
        largest, rank = features.lora_ranks()[-1], features.adapter_rank(recipe)
        fitting = largest // (2 if principal(lora.init) else 1)
        yield (
            "lora.rank",
            f"takes adapters up to rank {largest}, and the recipe's has {rank}",
            f"rank: {fitting}, or engine: mesh",
        )
    if facts.model is not None and not features.takes_adapters(facts.model.config):
        yield "model.id", f"has no {facts.model.title} that takes adapters", "engine: mesh"
    if facts.accelerator is not None and facts.accelerator.hosts > 1:
        hosts = plural(facts.accelerator.hosts, "host")
        yield "rollout.engine", f"is asked by one host, and the machine has {hosts}", "engine: mesh"


def on_mesh(facts: Facts) -> Iterator[Diagnostic]:
    """Check the layout of a run whose completions the chips that train generate."""
    rollout, accelerator = facts.recipe.rollout, facts.accelerator
    for name in (name for name in OF_SERVER if name in rollout.model_fields_set):
        message = f"{name} has no effect with engine mesh"
        yield Diagnostic(E0547, message, f"rollout.{name}", "remove the line, or engine: vllm", at_key=True)
    axes = rollout.axes or facts.axes
    if rollout.axes is not None and accelerator is not None:
        yield from _axes(facts, rollout.axes, accelerator.devices)
    rows = rollout.rows
    parallel = math.prod(axes.get(axis, 1) for axis in ("dcn", "fsdp", "ep"))
    if rows is not None and (rows % parallel or facts.recipe.train.global_batch_size % rows):
        fitting = [n for n in divisors(facts.recipe.train.global_batch_size) if n % parallel == 0]
        nearest = min(fitting, key=lambda n: abs(n - rows), default=None)
        yield Diagnostic(
            E0544,
            f"{rows:,} completions at once do not divide the {facts.recipe.train.global_batch_size:,} of a "
            f"step, or are not split evenly over {plural(parallel, 'device')}",
            "rollout.rows",
            "rows: null" if nearest is None else f"rows: {nearest}, or null",
        )


def _axes(facts: Facts, axes: Mapping[str, int], devices: int) -> Iterator[Diagnostic]:
    model, tp = facts.model, axes.get("tp", 1)
    if math.prod(axes.values()) != devices:
        what = f"rollout.axes has {math.prod(axes.values()):,} devices, and the machine has {devices:,}"
    elif axes.get("cp", 1) > 1:
        what = "a token is generated after another, so cp has nothing to split"
    elif model is not None and any(
        model.architecture.heads(layer) % tp for layer in range(model.architecture.num_layers)
    ):
        what = f"tp {tp} does not divide the attention heads of {model.title}"
    else:
        return
    yield Diagnostic(E0544, what, "rollout.axes", "axes: null, which the compiler resolves")
