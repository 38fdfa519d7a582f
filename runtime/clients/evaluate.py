"""Evaluates a served model and its base: the recipe's own prompts, and lm-evaluation-harness tasks.

    python3 -m runtime.clients.evaluate --url http://127.0.0.1:8000 --name NAME --base NAME-base \
        --prompts prompts.jsonl --samples 5 --temperature 0.8 --results results/eval

In place of a server's address, --url and --base-url take a folder of weights. The model is then loaded in
this process, with the packages that train. lm-eval's tasks need a server.

Each side has a folder in the results, base/ and tuned/, with all that it was asked; summary.json and
summary.md hold both. Existing answers are not requested again, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from .client import Client, connect, is_folder, positive, served_model, serves_base, timeout_seconds
from .evaluate_answers import (
    BASE,
    TITLES,
    TUNED,
    SamplingSettings,
    Side,
    SideAnswers,
    ask,
    open_side,
    recorded,
    recorded_side,
)
from .evaluate_prompts import Prompt, read
from .evaluate_summary import SideResults, judge, markdown, summary
from .evaluate_tasks import MODELS, LmEval, TaskOutcome, TaskSettings, find_program, run_task
from .evaluate_tasks import recorded as recorded_task
from .output_files import guarded, write_whole

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="eval.sh", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--url", required=True, help="the server's address, or a folder of weights")
    add("--name", required=True, help="of the recipe")
    add("--model", help="the name that the fine-tuned model is served by; NAME by default")
    add("--base", help="the name that the base is served by, at --url or at --base-url")
    add("--base-url", help="the address of the base's server, if it is another one, or the base's folder")
    add("--side", choices=("both", BASE, TUNED), help="which to ask now; the base too where it is known")
    add("--results", type=Path, required=True, help="folder of answers and summaries")
    add("--fresh", action="store_true", help="discard earlier results of the sides that are asked")
    prompts = parser.add_argument_group("own prompts")
    prompts.add_argument("--prompts", type=Path, help="JSONL file of prompts with expected expressions")
    prompts.add_argument(
        "--text", action="store_true", help='a "prompt" is text to continue, not a user\'s turn'
    )
    prompts.add_argument("--samples", type=positive, default=1)
    prompts.add_argument("--temperature", type=float, default=0.0)
    prompts.add_argument("--max-tokens", type=positive, default=512)
    prompts.add_argument("--timeout", type=timeout_seconds, default=600.0, help="seconds for one answer")
    tasks = parser.add_argument_group("lm-evaluation-harness")
    tasks.add_argument("--tasks", nargs="*", default=[])
    tasks.add_argument("--limit", type=positive, help="questions of each task")
    tasks.add_argument("--task-api", choices=tuple(MODELS), default="chat")
    tasks.add_argument("--tokenizer", help="for --task-api completions: a folder or a Hugging Face id")
    tasks.add_argument("--max-length", type=positive, help="tokens of question and answer together")
    tasks.add_argument("--lm-eval", help="the program lm_eval, where it is not found by name")
    tasks.add_argument("--include-path", type=Path, help="a folder of further tasks")
    tasks.add_argument("--requirements", help="the file that pins lm-eval")
    add("--concurrency", type=positive, default=16, help="requests in flight")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run an evaluation; return 1 if any part of it is missing."""
    args = arguments(argv)
    if args.prompts is None and not args.tasks:
        raise UserError("there is nothing to evaluate", "give --prompts FILE or --tasks TASK")
    folders = [url for url in (args.url, args.base_url) if url and is_folder(url)]
    if args.tasks and folders:
        raise UserError(
            f"lm-eval's tasks need a server, and {folders[0]} is a folder",
            "end the command with --tasks, which leaves them out, or give the address of a server",
        )
    prompts = read(args.prompts, chat=not args.text) if args.prompts else []
    program = find_program(args.lm_eval, args.requirements) if args.tasks else ""
    sides = _sides(args)
    try:
        opened = [_open(args, side, prompts) for side in sides]
        failed = {side.name: _evaluate(args, side, prompts, program) for side, _ in opened}
    except KeyboardInterrupt:
        print("\ninterrupted; the answers so far are kept: run again to continue", file=sys.stderr)
        return INTERRUPTED
    return _report(args, prompts, failed)


def _sides(args: argparse.Namespace) -> tuple[str, ...]:
    if args.side in (BASE, TUNED):
        return (args.side,)
    if args.base_url is None and (args.base is None or not serves_base(args.url)):
        if args.side == "both":
            raise UserError(
                "the address of the base's server is not known",
                "give --base-url URL, or --base NAME if the fine-tuned model's server serves it too",
            )
        return (TUNED,)
    return (BASE, TUNED)


def _client(args: argparse.Namespace, side: str) -> Client:
    url = args.base_url if side == BASE and args.base_url else args.url
    if side == BASE and (args.base_url or not serves_base(url)):
        return connect(url, args.timeout, name=args.base)
    base = args.base if BASE in _sides(args) and not args.base_url else None
    return connect(url, args.timeout, name=args.model or args.name, base=base)


def _open(args: argparse.Namespace, name: str, prompts: Sequence[Prompt]) -> tuple[Side, Client]:
    client = _client(args, name)
    wanted, flag = (args.base, "--base") if name == BASE else (args.model or args.name, "--model")
    model = served_model(client, wanted, flag)
    folder = args.results / name
    return open_side(client, name, model, prompts[0] if prompts else None, folder, args.fresh), client


def _settings(args: argparse.Namespace) -> SamplingSettings:
    return SamplingSettings(args.samples, args.temperature, args.max_tokens)


def _task_settings(args: argparse.Namespace) -> TaskSettings:
    tokenizer = args.tokenizer if args.task_api == "completions" else None
    return TaskSettings(args.task_api, args.limit, args.max_tokens, args.max_length, tokenizer)


def _evaluate(
    args: argparse.Namespace, side: Side, prompts: Sequence[Prompt], program: str
) -> tuple[SideAnswers, list[TaskOutcome]]:
    """Request everything that is missing on a side."""
    client, folder, title = _client(args, side.name), args.results / side.name, TITLES[side.name]
    answers = SideAnswers()
    if prompts:
        label = f"{title} ({side.model})"
        path = folder / "answers.jsonl"
        answers = ask(client, side.model, prompts, _settings(args), path, args.concurrency, label)
        if answers.before:
            total = len(prompts) * args.samples
            print(f"{label}: {answers.before} of {total} answers are from an earlier run", file=sys.stderr)
    lm_eval = LmEval(program, client.url, side.model, args.concurrency, args.include_path)
    outcomes = []
    for task in args.tasks:
        print(f"{title} ({side.model}): lm-eval {task}", file=sys.stderr, flush=True)
        outcomes.append(run_task(lm_eval, task, _task_settings(args), folder / "tasks"))
    return answers, outcomes


def _report(
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    asked: dict[str, tuple[SideAnswers, list[TaskOutcome]]],
) -> int:
    """Write the summary of both sides: those evaluated now, and the other one as recorded."""
    settings = _settings(args)
    sides = {}
    for name in (BASE, TUNED):
        side = recorded_side(args.results / name)
        if side is None:
            continue
        if name in asked:
            answers, outcomes = asked[name]
        else:
            answers = recorded(args.results / name / "answers.jsonl", settings)
            outcomes = _recorded_tasks(args, name)
        judged = judge(prompts, answers, settings)
        sides[name] = SideResults(side, judged, answers.others, list(answers.failures.values()), outcomes)
    data = summary(args.name, settings, args.prompts.name if args.prompts else None, args.tasks, sides)
    page = markdown(data)
    write_whole(args.results / "summary.json", json.dumps(data, indent=2) + "\n")
    write_whole(args.results / "summary.md", page)
    print(page, end="")
    print(f"\nwritten: {args.results / 'summary.md'} and summary.json", file=sys.stderr)
    for problem in data["problems"]:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if data["problems"] else 0


def _recorded_tasks(args: argparse.Namespace, side: str) -> list[TaskOutcome]:
    """Return an earlier run's outcomes that were measured under the current settings."""
    outcomes = (recorded_task(args.results / side / "tasks", task) for task in args.tasks)
    return [
        outcome for outcome in outcomes if outcome is not None and outcome.settings == _task_settings(args)
    ]


if __name__ == "__main__":
    sys.exit(guarded(main))
