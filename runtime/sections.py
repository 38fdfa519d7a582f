"""The sections of a recipe that a run reads, as scripts state them.

Generated from the language by `python -m scripts.docs`. settings.py has their methods, and what only the
compiler can determine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Log:
    """What is recorded during training.

    Attributes:
        every: Number of steps between two lines of metrics.
        tensorboard: Also write TensorBoard event files.
        wandb_project: Weights & Biases project to report to; null does not report.
        mlflow_experiment: MLflow experiment to report to, at MLFLOW_TRACKING_URI of the environment; null
            does not report.
    """

    every: int = 10
    tensorboard: bool = True
    wandb_project: str | None = None
    mlflow_experiment: str | None = None


@dataclass(frozen=True)
class EarlyStopping:
    """When a run ends before its last step, by the rule of transformers' EarlyStoppingCallback.

    Attributes:
        patience: Number of consecutive evaluations without progress after which the run ends.
        min_delta: An evaluation counts as progress if its loss is below the lowest so far by more than this.
            With grpo its reward must be that far above the highest.
    """

    patience: int
    min_delta: float = 0.0


@dataclass(frozen=True)
class Generations:
    """Answers to fixed prompts during training.

    Attributes:
        prompts: A file of a kind that data.train reads. Each line has "messages", for the chat template, or a
            "prompt" with messages, or with a text that is tokenized without changes.
        max_tokens: Largest length of an answer. Each token of the longest answer takes one pass through the
            model.
    """

    prompts: str
    max_tokens: int = 64


@dataclass(frozen=True)
class FakeQuantization:
    """Quantization-aware training: products of a training step use rounded weights and activations.

    Attributes:
        weights: How the weights are rounded, in groups of group_size inputs of one output. int4 is torchao's
            Int8DynActInt4Weight; int4_asymmetric is torchao's int4 for bfloat16 kernels, and Axolotl's.
        activations: How the inputs of the products are rounded, token by token; null leaves them as they are.
        group_size: Number of neighboring inputs whose weights share a scale. It must divide the inputs of
            every projection that is rounded.
        head: Without lora: also round the output head, whether it has weights of its own or the embedding's.
        start_step: Number of steps at the beginning of the run that do not round.
    """

    weights: str = "int4"
    activations: str | None = "int8"
    group_size: int = 32
    head: bool = False
    start_step: int = 0


@dataclass(frozen=True)
class LocalCheckpoint:
    """Checkpoints on each host's own disk. A run resumes from one that is newer than the shared ones.

    Attributes:
        directory: A folder on each host: on an attached disk, or in memory, which survives only the process.
        every_steps: Number of steps between two local checkpoints.
    """

    directory: str = "/dev/shm/recipec"
    every_steps: int = 10


@dataclass(frozen=True)
class Source:
    """One source of samples. Plain text is short for its path.

    Attributes:
        path: A file or the folder of a data set, relative to the recipe's folder; a gs:// address; or
            hf://OWNER/NAME for a data set of the Hugging Face hub. The ending gives the kind: .jsonl, .json
            or .csv, also with .gz or .zst; .parquet; .arrow; .array_record.
        weight: How often its samples are drawn, relative to the other sources.
        split: Split of a Hugging Face data set, or a part of one; null uses train.
        config: Configuration (subset) of a Hugging Face data set; null uses its default.
        limit: Number of samples to use from the start of the source; null uses all.
        format: What a sample of this source contains; null uses the value of data. Preferences cannot be
            mixed with other formats.
        fields: Renames this source's columns; null uses the value of data.
        transform: A Python function for the samples of this source, as file.py:function; null uses the value
            of data.
        chat_template: A chat template of its own, as data.chat_template; null uses the value of data. The
            server renders with data's.
        loss_on: Tokens of this source that carry loss; null uses the value of data, or the format's default
            if data gives none.
        overlong: What to do with a sample of this source that is longer than max_length; null uses the value
            of data.
    """

    path: str
    weight: float = 1.0
    split: str | None = None
    config: str | None = None
    limit: int | None = None
    format: str | None = None
    fields: Mapping[str, str] | None = None
    transform: str | None = None
    chat_template: str | None = None
    loss_on: str | tuple[str, ...] | None = None
    overlong: str | None = None


@dataclass(frozen=True)
class Images:
    """Pictures in the samples. The checkpoint's image processor makes their tokens and their pixels, with its
    own settings where a key is null. A run fetches no picture from the web.

    Attributes:
        longest_side: Larger pictures are scaled down so that their longer side has at most this many pixels,
            before the checkpoint's processor gets them; null leaves the size to the processor.
        max_pixels: Pictures with more pixels are scaled down to at most this many, before the checkpoint's
            processor gets them, as LLaMA-Factory does with image_max_pixels; null leaves the size to the
            processor.
        tokens: The most tokens of a picture, for models whose processor can limit them (Gemma 4, Qwen VL);
            null uses the processor's own limit.
        tiles: The most tiles that a picture is cut into, for models with tiles (Llama 4); null uses the
            processor's own number.
        per_row: The most pictures of a packed row. Every row reserves room for the patches of the fullest
            row, so a lower number saves memory where few samples have many pictures. null packs by tokens,
            and by the patches of an average row.
        folder: The folder in which relative paths of pictures start, relative to the recipe's folder; or a
            gs:// address. null uses the folder of the file that names them.
    """

    longest_side: int | None = None
    max_pixels: int | None = None
    tokens: int | None = None
    tiles: int | None = None
    per_row: int | None = None
    folder: str | None = None


@dataclass(frozen=True)
class Grpo:
    """Group relative policy optimization, with TRL's names, formulas and defaults.

    Attributes:
        num_generations: Number of completions of each prompt: a group. An advantage is a reward compared with
            the others of its group.
        iterations: Number of optimizer steps on the same completions, before the next ones are generated.
        loss: How the losses of tokens are computed and added up.
        ratio: What is compared with the policy that generated it; null uses the loss's own.
        beta: Weight of the KL divergence from the model before training; 0 needs no reference. rloo subtracts
            it from the reward, summed over the completion, as TRL does; the other losses add it to the loss.
        kl: The estimate of the KL divergence.
        kl_bias_correction: Multiply the estimate by the ratio, so that its gradient is that of the
            divergence.
        epsilon: The ratio is clipped at 1 - epsilon.
        epsilon_high: The ratio is clipped at 1 + epsilon_high; for cispo it is the largest ratio itself. null
            uses epsilon.
        scale_rewards: What divides the advantages.
        mask_truncated: Do not train on completions that reach max_completion_length without an end. Their
            rewards still count in their groups.
        overlong_penalty: Number of tokens before max_completion_length within which a penalty on the reward
            falls from 0 to -1; null has none.
        dynamic_sampling: Largest number of times that a step replaces groups whose rewards are all the same
            by groups of the next prompts; 0 keeps them.
        num_generations_eval: Number of completions of each prompt of data.eval, drawn as in training; null
            generates one, greedily.
        max_prompt_length: Longest prompt, with the chat template. data.overlong sets what to do with longer
            ones.
        max_completion_length: Longest completion, with its end token.
        temperature: Divisor of the logits, in the rollout and in the loss.
        top_p: Draw from the likeliest tokens whose probabilities add up to this; 1 draws from all.
        top_k: Draw from this number of likeliest tokens; 0 draws from all.
        min_p: Draw from the tokens with at least this share of the likeliest one's probability; 0 draws from
            all.
        stop: More texts that end a completion, each a single token, in addition to the ends that the chat
            template and generation_config.json have.
    """

    num_generations: int = 8
    iterations: int = 1
    loss: str = "dapo"
    ratio: str | None = None
    beta: float = 0.0
    kl: str = "k3"
    kl_bias_correction: bool = True
    epsilon: float = 0.2
    epsilon_high: float | None = None
    scale_rewards: str = "group"
    mask_truncated: bool = False
    overlong_penalty: int | None = None
    dynamic_sampling: int = 0
    num_generations_eval: int | None = None
    max_prompt_length: int = 512
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Distill:
    """Knowledge distillation: the loss compares the next-token probabilities of student and teacher at each
    token that carries loss, of the data's answers or of the student's own, as TRL's GKDTrainer does.

    Attributes:
        beta: The divergence: 0 is the KL divergence of the student from the teacher (forward), 1 the reverse;
            between them lies the generalized Jensen-Shannon divergence, with this share of the teacher in the
            mixture.
        temperature: Divisor of both models' logits in the loss. The loss is not multiplied by its square.
        stored: Folder with the teacher's likeliest tokens and their log-probabilities at each token that
            carries loss, relative to --data-dir. `train.py --write-teacher` writes it once, and training then
            needs no teacher on its devices. null computes the teacher in each step.
        top_k: Number of the teacher's likeliest tokens that `stored` keeps. All other tokens together are one
            event, with the probability that is left: the divergence is between these top_k + 1 events.
        lmbda: Share of the optimizer steps that train on the student's own answers: it answers the samples'
            prompts again, with its weights before the step, and the last answer is replaced. 0 trains on the
            data's answers alone.
        max_completion_length: Longest own answer, with its end token. A prompt gets the rest of
            data.max_length; a sample with a longer one keeps its answer.
        sampling_temperature: Divisor of the logits when own answers are drawn, TRL's `temperature`.
    """

    beta: float = 0.5
    temperature: float = 1.0
    stored: str | None = None
    top_k: int = 64
    lmbda: float = 0.0
    max_completion_length: int = 128
    sampling_temperature: float = 0.9


@dataclass(frozen=True)
class RewardLimits:
    """The limits of the processes in which rewards run.

    Attributes:
        seconds: Time limit for a function to score all completions of a step.
        memory_mebibytes: Memory limit of each function's process.
    """

    seconds: float = 60.0
    memory_mebibytes: int = 2048


@dataclass(frozen=True)
class Rollout:
    """How completions are generated during training.

    Attributes:
        engine: What generates completions.
        axes: Sizes of the mesh axes for generation on the same chips, as mesh.axes. A layout of its own keeps
            the frozen weights a second time. null chooses tp, as large as the heads and the memory allow, if
            fsdp splits the weights, and otherwise mesh.axes. Only with engine mesh.
        rows: Number of completions generated at once, over all devices, or asked of the server at once; null
            generates all of a step.
        url: Address of the vLLM server. A key for it is read from the environment variable VLLM_API_KEY.
        adapter_path: Folder for this run's adapters alone, an absolute path that the server reads too; null
            uses rollout-adapters in the checkpoint directory. It has at most two adapters at a time.
        server_adapter_path: The same folder as the server sees it, for example in its container; null for the
            same path.
        wait_seconds: How long the run waits for a server that does not answer, or that has restarted, before
            it ends.
        importance_sampling_correction: Weigh the loss of a completion, or of a token, with its probability in
            the training step divided by that in the server. The two compute in other ways, and so differ a
            little. As TRL's vllm_importance_sampling_correction.
        importance_sampling_mode: What is weighed, and what happens to a weight outside of the bounds.
        importance_sampling_clip_max: Largest weight; null has no upper bound.
        importance_sampling_clip_min: Smallest weight; null has no lower bound.
    """

    engine: str = "mesh"
    axes: Mapping[str, int] | None = None
    rows: int | None = None
    url: str = "http://127.0.0.1:8000"
    adapter_path: str | None = None
    server_adapter_path: str | None = None
    wait_seconds: int = 1800
    importance_sampling_correction: bool = True
    importance_sampling_mode: str = "sequence_mask"
    importance_sampling_clip_max: float | None = 3.0
    importance_sampling_clip_min: float | None = None


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, which are trained instead of the whole model.

    Attributes:
        rank: Inner dimension of each adapter.
        alpha: The adapter's product is scaled by alpha / rank.
        rslora: Rank-stabilized LoRA: scale by alpha / sqrt(rank) instead of alpha / rank.
        rank_pattern: Other ranks for some projections, as in PEFT: maps a target to its rank. The first
            matching entry is used.
        alpha_pattern: Other alphas for some projections, as in PEFT: maps a target to its alpha. The first
            matching entry is used.
        dropout: Share of the adapters' inputs that is zeroed during training.
        targets: The modules that get an adapter: Hugging Face names of projections, or regular expressions
            that match a whole module name such as layers.7.self_attn.q_proj; `experts` for all experts of a
            layer, each with its own A and B; `router` for the routers. Without the key, every projection of
            the model gets an adapter, with `vision` also those of the tower, but no experts or routers.
        modules_to_save: Modules other than projections that are trained in full, as with PEFT's
            modules_to_save: embed_tokens, lm_head and norms, as Hugging Face names or regular expressions
            that match a whole name; `projector` for all of the projector of a recipe with data.images. They
            are stored in lora.dtype and computed in model.dtype.
        trainable_tokens: Tokens whose rows of the embedding are trained, as with PEFT's
            trainable_token_indices: their numbers, or their texts in the model's tokenizer or in
            model.add_tokens. All other rows stay frozen. A head that is the embedding uses the trained rows
            too; another head keeps its own. The rows are stored in lora.dtype and computed in model.dtype.
        vision: Adapters in the linear layers of the vision tower and its projector too, of a recipe with
            data.images; `targets` then also names those, as out_proj or
            vision_tower.encoder.layers.7.mlp.fc1. The key `layers` is about the decoder alone. false leaves
            tower and projector frozen.
        kind: What is trained in addition to the frozen weights.
        init: How A and B are initialized. peft, qwix, gaussian and zero_a draw them, and their product is
            zero. pissa and olora take a part of the base's weights, which are frozen without it;
            pissa_niter_16 computes that part with 16 iterations. The adapter that merge writes then fits the
            unchanged base, and has twice the rank.
        start_from: A PEFT adapter (adapter_config.json and adapter_model.safetensors) whose values training
            begins with, in place of fresh ones: a folder, relative as data.train's paths are, or an address
            such as gs:// or hf://OWNER/NAME. It must be just what the recipe trains. Step, optimizer and data
            begin anew.
        loraplus_lr_ratio: LoRA+: ratio of B's learning rate to A's; null gives both the same.
        dtype: Type of the adapters.
        kv: For the keys and values of a layer: independent gives each its own A, as PEFT does; shared gives
            them one A, as Qwix does for Tunix's fused weight.
    """

    rank: int = 16
    alpha: float = 2.0
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    dropout: float = 0.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    modules_to_save: tuple[str, ...] = ()
    trainable_tokens: tuple[int | str, ...] = ()
    vision: bool = False
    kind: str = "lora"
    init: str = "peft"
    start_from: str | None = None
    loraplus_lr_ratio: float | None = None
    dtype: str = "float32"
    kv: str = "independent"


@dataclass(frozen=True)
class Data:
    """Samples, and how they become rows of tokens.

    Attributes:
        train: Sources to train on.
        eval: Sources to evaluate on; without them and without eval_fraction, the run does not evaluate.
        eval_fraction: Share of the training samples to hold out for evaluation: those that datasets'
            train_test_split(test_size=eval_fraction, seed=eval_seed) selects from all sources together.
            shuffle_seed orders the others. null holds none out.
        eval_seed: Seed of the selection for eval_fraction.
        format: What a sample contains.
        fields: Renames columns: maps the format's name of a column to its name in the source.
        transform: A Python function that turns a sample into a sample or None, as file.py:function, relative
            to the recipe's folder. The file is copied into the artifact.
        chat_template: A Jinja chat template: a file relative to the recipe's folder, or the template itself;
            null uses the tokenizer's.
        loss_on: Tokens that carry loss: one of these words, or the turns of the listed roles, such as
            [assistant, tool].
        reasoning: What to do with the assistant's reasoning in reasoning_content, reasoning, thinking or
            <think>; null leaves this to the template, which may drop it from earlier turns.
        special_tokens: How the texts of control tokens, such as <|im_end|>, are tokenized if they stand in
            the data. The control tokens that the chat template writes are always control tokens.
        images: Pictures in the samples, for models that read pictures: `{}` uses the checkpoint's own
            settings. null has none, and a sample with a picture is malformed.
        max_length: Length of a row, by default at most the model's positions; overlong sets what to do with
            longer samples. With grpo it is max_prompt_length + max_completion_length.
        overlong: What to do with a sample longer than max_length: leave it out, cut its end off, stop, or,
            for text, split it into samples.
        max_invalid_ratio: Largest share of a split's samples that may be malformed or without clear targets;
            more is an error.
        packing: Put several samples into one row, each attending only to itself; false puts one padded sample
            into each row.
        shuffle_seed: Seed of the order of samples, which changes every epoch; null keeps the order of the
            sources.
        temperature: An epoch draws from each source of train in proportion to its number of samples to the
            power of 1 / temperature, and as many samples in total as the sources have. 1 draws each sample
            once, and higher values draw more from small sources. null draws by the weights of the sources.
        curriculum: The order of an epoch's rows; null uses the order of shuffle_seed.
        stream_window: Streams train: during the run, this many samples at a time are read, tokenized,
            shuffled and packed, drawn from the sources by their weights; for data larger than the memory or
            the disk. It needs train.steps. null reads all samples first, and shuffles and packs them
            together.
    """

    train: tuple[str | Source, ...]
    eval: tuple[str | Source, ...] = ()
    eval_fraction: float | None = None
    eval_seed: int = 42
    format: str = "chat"
    fields: Mapping[str, str] = field(default_factory=dict)
    transform: str | None = None
    chat_template: str | None = None
    loss_on: str | tuple[str, ...] = "assistant"
    reasoning: str | None = None
    special_tokens: str = "control"
    images: Images | None = None
    max_length: int = 4096
    overlong: str = "drop"
    max_invalid_ratio: float = 0.1
    packing: bool = True
    shuffle_seed: int | None = 0
    temperature: float | None = None
    curriculum: str | None = None
    stream_window: int | None = None


@dataclass(frozen=True)
class Train:
    """The run: its length, batches, optimizer and schedule.

    Attributes:
        objective: What the model learns. dpo, cpo and orpo need data.format: preference, kto
            unpaired_preference, grpo prompt.
        distill: distill: the teacher, and the divergence from it. null has none.
        grpo: grpo: groups of completions, their lengths and sampling, and the loss.
        beta: dpo and kto: how close the model stays to the model before training; cpo: factor of the
            log-probabilities; orpo: weight of the odds ratio.
        loss_type: The loss, by TRL's and LLaMA-Factory's names. sft has nll, dft, eaft and asft; cpo has
            sigmoid, hinge, ipo and simpo; kto has kto and apo_zero_unpaired; dpo has all others except simpo.
        label_smoothing: sigmoid, robust and simpo: assumed share of wrong preferences; nll: share of a
            target's probability that is spread evenly over the vocabulary.
        z_loss: nll: weight of the squared logsumexp of the logits, a penalty that keeps it near zero; 0 adds
            none.
        eaft_alpha: eaft: exponent of the entropy; 0 weights all targets equally.
        eaft_top_k: eaft: number of the likeliest tokens whose entropy counts, as if there were no others.
        eaft_entropy: eaft: entropy at which a target has weight 1. LLaMA-Factory has 3, about the logarithm
            of 20; Axolotl has 1.
        asft_alpha: asft: weight of the KL divergence.
        neftune_noise_alpha: nll, dft and eaft: NEFTune noise on the embeddings during training, uniform
            within alpha / sqrt(tokens of a row * hidden size); null adds none.
        simpo_gamma: simpo: target lead of the chosen answer's reward. The reward is beta times the mean of
            the answer's log-probabilities.
        cpo_alpha: cpo: weight of the chosen answers' negative log-likelihood, averaged over the tokens of a
            micro-batch; 0 leaves it out.
        desirable_weight: kto: weight of the desirable answers' losses, against an unequal number of the two
            kinds.
        undesirable_weight: kto: weight of the undesirable answers' losses.
        steps: Length of the run in steps; the data repeats as often as needed. Give either this or epochs.
        epochs: Length of the run in passes over the data. Give either this or steps.
        continue_from: Begin a new schedule after this step of a run, which then continues with its
            optimizer's state: learning_rate and schedule apply from there to the end. steps and epochs count
            from the run's beginning. The run needs a checkpoint of this step, and train.py --resume. null has
            one schedule.
        global_batch_size: Rows per optimizer step, over all devices. A row is one sample, or several with
            packing; with grpo, one completion.
        micro_batch_size: Rows that one data-parallel device processes at once. Gradients are accumulated over
            global_batch_size / (micro_batch_size * dcn * fsdp * ep) micro-batches.
        loss_normalization: tokens: mean over all target tokens of the optimizer step; micro_batches: mean of
            the means of the micro-batches.
        router_aux_loss_coef: For models with experts: weight of transformers' load-balancing loss of the
            routers, which is added to the loss; 0 adds none. It is computed over the real tokens and all
            layers of a micro-batch together. A step takes the mean over its micro-batches.
        eval_every: Number of steps between two evaluations. The run also evaluates at the end.
        early_stopping: Stop before the last step if the evaluation loss makes no more progress; null does
            not.
        generations: Prompts that the model answers at each evaluation, greedily. The answers go to
            generations.jsonl next to the metrics. null has none.
        seed: Seed of the adapters' initial values and of dropout.
        log: What is recorded during training.
    """

    objective: str = "sft"
    distill: Distill | None = None
    grpo: Grpo | None = None
    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    eaft_alpha: float = 1.0
    eaft_top_k: int = 20
    eaft_entropy: float = 3.0
    asft_alpha: float = 0.1
    neftune_noise_alpha: float | None = None
    simpo_gamma: float = 0.5
    cpo_alpha: float = 1.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    steps: int | None = None
    epochs: int | None = None
    continue_from: int | None = None
    global_batch_size: int = 8
    micro_batch_size: int = 1
    loss_normalization: str = "tokens"
    router_aux_loss_coef: float = 0.0
    eval_every: int = 100
    early_stopping: EarlyStopping | None = None
    generations: Generations | None = None
    seed: int = 0
    log: Log = field(default_factory=Log)


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often the adapters and the optimizer's state are saved.

    Attributes:
        directory: A folder below the artifact's output folder, or a gs:// address.
        every_steps: Number of steps between two checkpoints. The end is also saved.
        keep: Number of newest checkpoints to keep.
        keep_best: Also save at each evaluation with the lowest loss so far (with grpo, the highest reward),
            and keep the last of these in addition to the newest, for `merge.py --step best`.
        local: More checkpoints in between, on each host's own disk; null saves none.
    """

    directory: str = "checkpoints"
    every_steps: int = 100
    keep: int = 3
    keep_best: bool = False
    local: LocalCheckpoint | None = None
