"""The run of a generated train_trl.py: one fine-tuning on GPUs, from settings to the adapter's folder."""

from __future__ import annotations

import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from ...build_check import demand_whole
from ...checkpoints.first_adapters import read_initial, write_initial
from ...checkpoints.record import read_record, write_record
from ...checkpoints.trained_weights import check_model
from ...compilation_cache import cache_directory
from ...data.prepare import PreparedData, Tokenizing, prepare
from ...data.prompt_order import PromptSchedule
from ...data.tokenizer import load_tokenizer, numbered
from ...errors import UserError, guarded
from ...interrupts import Interrupted, Interrupts
from ...metrics import run_facts
from ...metrics.run_state import Ending, recorded
from ...metrics.services import RunFiles, open_services
from ...model.adapters import LoraSettings
from ...model.initial import Start
from ...peft.adapter import ROWS
from ...reinforcement.asked import Prompts, completion_ends
from ...reinforcement.comparable import check_answers
from ...sections import Grpo, RewardLimits
from ...settings import CheckpointSettings, DataSettings, ModelSettings, Reward, TrainSettings
from ...training.early_stopping import Evaluations
from ...training.first_values import computed
from ...training.trace import Trace, check_writable
from ...weights.checkpoint import HFCheckpoint
from ...weights.locate import locate_model
from .. import run_output
from ..backend_arguments import BackendArguments
from ..backend_arguments import parse_arguments as parse
from ..peft_model import start, trained_parameters
from .grpo_trainer import RewardTrainer, grpo_settings, reward_functions
from .picture_inputs import PictureInputs
from .pieces import Pieces
from .recipe_loop import Surroundings, Training, arrays
from .sft_trainer import RecipeTrainer
from .start import TrlSettings, reference_model, settings_of, trainable_model, trainer_settings
from .step_report import BackendReport
from .trl_checkpoints import check_data, data_state, evaluations, farewell, open_run
from .trl_objectives import objective_of

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")
"""The packages whose versions a trace records."""


def parse_arguments(artifact: Path, generates: bool = False) -> BackendArguments:
    """Read the command line; wrong usage ends the process with status 2.

    Args:
        generates: whether the run generates completions.
    """
    return parse("train_trl.py", artifact, generates=generates)


def run(
    artifact: Path,
    arguments: BackendArguments,
    *,
    model: ModelSettings,
    lora: LoraSettings | None = None,
    data: DataSettings,
    train: TrainSettings,
    checkpoint: CheckpointSettings,
    optimizer: Callable[[Any], Any],
    schedule: Callable[[Any, int], Any],
    micro_batch_rows: int,
    max_grad_norm: float | None = None,
    master_weights: bool = False,
    cache: str | None = None,
    rewards: Sequence[Reward] = (),
    reward_limits: RewardLimits | None = None,
) -> int:
    """Train, write the adapter or the model, and print one line about the result at the end.

    Each process of `accelerate launch` calls it and computes its own rows of every micro-batch.

    Args:
        artifact: folder of recipe.lock.json.
        lora: None trains all weights.
        checkpoint: its directory is relative to --output.
        optimizer: makes the torch optimizer of a list of parameters.
        schedule: makes the learning rate's LambdaLR from that optimizer and the run's number of steps.
        micro_batch_rows: rows of a micro-batch of train.py, over all of its devices.
        max_grad_norm: clip the gradient of a step to this norm; None for no clipping.
        master_weights: train float32 weights and compute in bfloat16; only without LoRA.
        cache: folder for tokenized data, relative to --output; None keeps nothing.
        rewards, reward_limits: of a run that learns from rewards of its own completions.

    Returns:
        The exit status: 0, or 1 after a printed error, or 128 + the signal's number after a signal.
    """
    settings = TrlSettings(
        model, lora, data, train, checkpoint, micro_batch_rows, max_grad_norm, master_weights
    )
    directory = (arguments.output / checkpoint.directory).expanduser().resolve()
    with Interrupts(lambda signum: farewell(signum, directory)) as interrupts:
        job = _Job(
            artifact,
            arguments,
            directory,
            interrupts,
            settings,
            (optimizer, schedule),
            cache_directory(cache, arguments.output),
            rewards,
            reward_limits or RewardLimits(),
        )
        try:
            return guarded(lambda: _run(job))
        except Interrupted as interrupted:
            print(f"\n{farewell(interrupted.signum, directory)}", file=sys.stderr)
            return 128 + interrupted.signum


@dataclass(frozen=True)
class _Job:
    """The arguments of `run`.

    Attributes:
        directory: of the checkpoints, absolute.
        caches: folder for tokenized data; an address is not used.
        rewards, limits: of a run that learns from rewards of its own completions.
    """

    artifact: Path
    arguments: BackendArguments
    directory: Path
    interrupts: Interrupts
    settings: TrlSettings
    makers: tuple[Callable[[Any], Any], Callable[[Any, int], Any]]
    caches: str | None
    rewards: Sequence[Reward]
    limits: RewardLimits


def _run(job: _Job) -> int:
    demand_whole(job.artifact)
    arguments = job.arguments
    model, lora, train = job.settings.model, job.settings.lora, job.settings.train
    if lora is None and arguments.adapter is not None:
        raise UserError(
            f"--adapter {arguments.adapter}: the recipe trains all weights, so it cannot start from an "
            "adapter",
            "merge it into its base, and give the merged model with --model",
        )
    if train.grpo is not None:
        check_reinforced(arguments, train.grpo)
    if arguments.trace is not None:
        check_writable(arguments.trace)
    start, folder = open_run(job.directory, job.artifact, arguments.resume)
    _quiet()

    cpu = os.environ.get("ACCELERATE_USE_CPU") == "true" or not torch.accelerator.is_available()
    place = PartialState(cpu=cpu)
    with place.local_main_process_first():
        base = HFCheckpoint.open(locate_model(model, arguments.model))
    if job.settings.data.images is not None:
        base = base.seeing()
    base.verify()
    check_model(read_record(job.artifact), base)
    if lora is not None and lora.trainable_tokens:
        lora = numbered(lora, base, dict(model.add_tokens))
        job = replace(job, settings=replace(job.settings, lora=lora))
    with place.local_main_process_first():
        tokenizer, prepared = _data(job, base, place.num_processes, folder)
    total = prepared.total_steps
    before = Evaluations() if folder is None else evaluations(folder)
    until = start if before.ends(train.early_stopping) else min(total, arguments.steps or total)
    report = None
    if folder is not None:
        check_data(folder, data_state(folder), prepared.state(start))
    if place.is_main_process:
        chooses = ["train.early_stopping"] if train.early_stopping is not None else []
        print(replace(prepared.report, chooses=chooses).text(), file=sys.stderr)
        if start >= until:
            print(f"step {start} of {total} is already done", file=sys.stderr)
        elif start:
            print(f"continuing after step {start} of {total}", file=sys.stderr)
        else:
            write_record(job.directory, job.artifact)
        run_facts.begin(
            job.directory, job.artifact, Path(sys.argv[0]).name, prepared, _devices(place), start, until
        )
        files = RunFiles(job.directory, job.directory, job.artifact, arguments.resume, start)
        services = open_services(train, files)
        report = BackendReport(
            job.directory, start, until, train.log.every, train.log.tensorboard, peak_memory, services
        )
    about = {"dtype": model.dtype, "device": str(place.device), "devices": place.num_processes}
    about |= {name: version(name) for name in PACKAGES}
    trace = Trace("trl", job.artifact.name, about)

    def done(step: int, numbers: dict[str, float], more: dict[str, float]) -> None:
        if report is not None and arguments.trace is not None:  # whole, of which this process has a part
            window = range((step - 1) * prepared.accumulation, step * prepared.accumulation)
            batches = [prepared.micro_batch(number) for number in window]
            trace.add(step, numbers["loss"], round(numbers["targets"]), batches)
        if report is not None:
            tokens = round(numbers["tokens"])
            report.step(step, numbers["loss"], numbers["learning_rate"], numbers["norm"], tokens, more)

    def evaluated(step: int, losses: dict[str, float]) -> None:
        if report is not None:
            report.evaluation(step, losses)

    initial = None if lora is None or not lora.principal else _initial(job, base, place, folder is None)
    optimizer, schedule = job.makers
    # TRL's GRPOTrainer copies its reference from the model that it gets, also when a run is resumed.
    adapter = arguments.start_from(lora) if lora is not None and (folder is None or train.grpo) else None
    training = Training(
        start=start,
        optimizer=optimizer,
        schedule=lambda torch_optimizer: schedule(torch_optimizer, total),
        parameters=lambda whole: trained_parameters(whole, base, lora, job.settings.model.trainable_modules),
        reference=None if train.grpo is not None else reference_model(base, job.settings),
        eval_every=train.eval_every,
        loraplus_lr_ratio=None if lora is None else lora.loraplus_lr_ratio,
        keep_first=arguments.trace is not None,
        stopping=train.early_stopping,
        before=before,
    )
    around = Surroundings(
        state=prepared.state,
        done=done,
        evaluated=evaluated,
        stop=lambda: job.interrupts.requested is not None,
    )
    whole = trainable_model(base, job.settings, adapter, initial)
    with ExitStack() as stack:
        trainer: RecipeTrainer | RewardTrainer
        if train.grpo is not None:
            ends = completion_ends(base, tokenizer, prepared.ends, train.grpo.stop)
            accumulation = train.global_batch_size // (train.micro_batch_size * place.num_processes)
            common = trainer_settings(job.settings, job.directory, accumulation, until, cpu)
            how = training, around
            trainer = stack.enter_context(_rewarded(job, whole, tokenizer, prepared, ends, common, how))
        else:
            pictures = PictureInputs.of(base, whole, lora)
            pieces = Pieces(prepared, train, place.process_index, place.num_processes, pictures)
            trainer = RecipeTrainer(
                whole,
                settings_of(job.settings, job.directory, pieces.per_step, until, cpu),
                tokenizer,
                pieces,
                objective_of(train),
                training,
                around,
            )
        with _ending(job, report, total, until) as ending:
            job.interrupts.deferred = True
            try:
                trainer.go(folder)
            finally:
                job.interrupts.deferred = False
                prepared.close()
            step, early = trainer.state.global_step, None
            counted = before if start >= until else trainer.evaluations
            if step < total and counted.ends(train.early_stopping):
                early = ending.early = counted.sentence(step)
            elif job.interrupts.requested is not None and step < until:
                place.destroy_process_group()
                raise Interrupted(job.interrupts.requested)
    trained = arrays(trainer.trained())  # the last collective operation: all processes take part
    # Threads of gloo sometimes abort a process that ends while its group still exists.
    place.destroy_process_group()
    if report is not None:
        trace.gradients, trace.trained = trainer.first_gradients or {}, trained
        if lora is not None:
            trace.initial = trainer.first_values or {}
        _write(job, base, trace, initial, step == total or early is not None, prepared.ends)
        if early is not None:
            print(early, file=sys.stderr)
        elif step < total:
            print(
                f"stopped after step {step} of {total}, as --steps says; --resume continues from there",
                file=sys.stderr,
            )
        print(report.summary(step, early), flush=True)
    return 0


@contextmanager
def _rewarded(
    job: _Job,
    model: Any,
    tokenizer: Any,
    prepared: PreparedData,
    ends: Sequence[int],
    common: Mapping[str, Any],
    how: tuple[Training, Surroundings],
) -> Iterator[RewardTrainer]:
    """Yield the trainer of a run that learns from rewards, and end its reward processes.

    Args:
        ends: the tokens that end a completion.
        common: the settings of transformers' Trainer.
    """
    grpo, schedule = job.settings.train.grpo, prepared.schedule
    assert grpo is not None and isinstance(schedule, PromptSchedule)
    check_answers(job.rewards, schedule.samples)
    prompts = Prompts(schedule.samples)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    with reward_functions(job.rewards, job.limits, grpo, prompts, decode) as functions:
        try:
            arguments = grpo_settings(job.settings, common, ends, job.arguments.vllm_mode)
            trainer = RewardTrainer(model, arguments, tokenizer, (schedule, ends), functions, *how)
        except ImportError as error:
            if job.arguments.vllm_mode is None:
                raise
            raise UserError(
                f"--vllm-mode {job.arguments.vllm_mode}: {error}",
                f"pip install 'trl[vllm]=={version('trl')}', or leave --vllm-mode out",
            ) from error
        yield trainer


def check_reinforced(arguments: BackendArguments, grpo: Grpo) -> None:
    """Raise UserError for what TRL's GRPOTrainer cannot do."""
    if arguments.trace is not None:
        raise UserError("--trace: TRL draws its own completions, which no other run has", "leave it out")
    if arguments.adapter is not None and grpo.beta:
        raise UserError(
            f"--adapter {arguments.adapter}: --resume would lose it, and it is the reference of grpo.beta",
            "name it in lora.start_from",
        )
    if arguments.resume and grpo.iterations > 1:
        raise UserError(
            f"--resume: TRL does not store the completions that {grpo.iterations} steps train on",
            "train from the beginning, or with train.grpo.iterations 1",
        )


@contextmanager
def _ending(job: _Job, report: BackendReport | None, total: int, until: int) -> Iterator[Ending]:
    """Close a report when the loop ends, and record how it ended; do nothing without a report."""
    if report is None:
        yield Ending(lambda reason: None)
        return
    with recorded(job.directory, total, until) as ending:
        try:
            yield ending
            report.ends(0)
        except Interrupted as interrupted:
            report.ends(128 + interrupted.signum, stopped=True)
            raise
        finally:
            report.close()


def _data(job: _Job, base: HFCheckpoint, processes: int, folder: Path | None) -> tuple[Any, PreparedData]:
    """Return the tokenizer and the run's data.

    Args:
        folder: of the checkpoint from which the run continues; None for a new run.
    """
    model, data, train = job.settings.model, job.settings.data, job.settings.train
    if train.global_batch_size % (train.micro_batch_size * processes):
        raise UserError(
            f"{train.global_batch_size} rows of an optimizer step cannot be split over {processes} processes "
            f"in micro-batches of {train.micro_batch_size}",
            "give accelerate launch a --num_processes that, times micro_batch_size, divides the global batch",
        )
    assert base.directory is not None
    tokenizer = load_tokenizer(base.directory, model, data, job.arguments.data_dir)
    return tokenizer, prepare(
        data,
        train,
        job.settings.micro_batch_rows,
        tokenizer,
        job.arguments.data_dir,
        base.architecture.vocab_size,
        Tokenizing(
            None if job.caches is None or "://" in job.caches else Path(job.caches),
            after=None if folder is None else data_state(folder),
            model_dir=base.directory,
        ),
    )


def _initial(job: _Job, base: HFCheckpoint, place: PartialState, fresh: bool) -> Start:
    """Return the initial values of adapters that start from the base's weights. The main process computes
    them when the run begins."""
    lora = job.settings.lora
    assert lora is not None
    if job.arguments.adapter is not None:
        start(base, lora, job.settings.train.seed, job.arguments.adapter)  # raises UserError
    with place.main_process_first():
        if fresh and place.is_main_process:
            write_initial(job.directory, computed(base, lora, job.settings.train.seed))
    return read_initial(job.directory)


def _write(
    job: _Job,
    base: HFCheckpoint,
    trace: Trace,
    initial: Start | None,
    ended: bool,
    ends: Sequence[int],
) -> None:
    """Write what was trained, as the adapter or the model, and the trace.

    Args:
        initial: the adapters' initial values, if these are a part of the base's weights.
        ended: whether the run has reached its last step; a whole model is written only then.
        ends: the tokens with which training ends an answer.
    """
    model, lora = job.settings.model, job.settings.lora
    output = job.arguments.output.expanduser().resolve()
    if lora is not None:
        values = run_output.pairs(trace.trained)
        rows = {name: value for name, value in trace.trained.items() if name.endswith(ROWS)}
        run_output.save_adapter(output / run_output.ADAPTER, base, model, lora, values, initial, rows)
        run_output.save_stops(output / run_output.ADAPTER, base, ends)
    elif ended:
        run_output.save_model(output / run_output.MODEL, base, trace.trained, ends)
    if job.arguments.trace is not None:
        trace.write(job.arguments.trace)


def _devices(place: PartialState) -> dict[str, Any]:
    """Return the training devices in the form of `runtime.metrics.run_facts`."""
    cuda = place.device.type == "cuda"
    about = torch.cuda.get_device_properties(place.device) if cuda else None
    return {
        "platform": place.device.type,
        "kind": about.name if about else "cpu",
        "count": place.num_processes,
        "processes": place.num_processes,
        "memory_bytes": about.total_memory if about else None,
    }


def peak_memory() -> int:
    """Return the peak memory in bytes: of this process's GPU, or of the process if there is no GPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    # Linux reports the resident set in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _quiet() -> None:
    """Keep messages that libraries write for developers off the terminal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="(trl|peft|accelerate|torch).*")
    from datasets.utils.logging import disable_progress_bar
    from transformers.utils import logging

    disable_progress_bar()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
