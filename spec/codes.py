"""The registry of diagnostic codes, and the page docs/diagnostics.md that is made from it.

A code's letter is its severity (E error, W warning, N note), its first two digits the group. A code
never changes its meaning and is never used again for another.

    python -m recipec.spec.codes > docs/diagnostics.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """What a code stands for: a title, why it arises, and what to do about it. Plain text."""

    title: str
    cause: str
    cure: str


GROUPS: dict[str, str] = {
    "00": "Files, YAML, `extends` and `--set`",
    "01": "Keys and values",
    "02": "Mesh and sharding",
    "03": "LoRA",
    "04": "Data and chat template",
    "05": "Training, checkpoints and merge",
    "06": "Serving",
    "07": "Paths and secrets",
    "08": "Model and catalogue",
    "09": "Not available in this version",
    "10": "Planning and parity",
    "11": "Porting",
    "12": "Commands, runs and reports",
    "13": "Launching and several hosts",
}

FILES: dict[str, Code] = {
    "E0001": Code(
        "file not found",
        "The recipe's path names no file.",
        "Correct the path; it is relative to the folder the command runs in.",
    ),
    "E0002": Code(
        "file cannot be read",
        "The path is a folder or a device, or reading it is not permitted.",
        "Name a YAML file that you may read.",
    ),
    "E0003": Code(
        "file too large",
        "A recipe is at most 256 KiB; this file is larger, so it is hardly a recipe.",
        "Name the right file. Data belongs in files of its own, named by `data.train`.",
    ),
    "E0004": Code(
        "file is not UTF-8",
        "The file holds bytes that are not UTF-8 text: it was saved in another encoding, or is no text.",
        "Save it as UTF-8.",
    ),
    "E0005": Code(
        "file is empty",
        "The file holds nothing but white space and comments.",
        "Start from `recipe new`, or from one of the files in recipes/.",
    ),
    "E0006": Code(
        "not valid YAML",
        "The text does not follow YAML's grammar at the place shown; the fault may lie a line above it.",
        "Often: a missing colon or space after it, an unclosed quote or bracket, uneven indentation.",
    ),
    "E0007": Code(
        "tab in the indentation",
        "YAML is indented by spaces alone.",
        "Replace each tab by two spaces.",
    ),
    "E0008": Code(
        "several documents in one file",
        "A line `---` starts a second YAML document; a recipe is one.",
        "Make a file of each; one may take over another by `extends`.",
    ),
    "E0009": Code(
        "key given twice",
        "A section holds the same key a second time. Other tools silently take the last.",
        "Remove one of the two.",
    ),
    "E0010": Code(
        "YAML anchor or alias",
        "Anchors (`&x`) and aliases (`*x`) are refused: what a recipe says has to stand where it is read.",
        "Write the value out, or share it between recipes by `extends`.",
    ),
    "E0011": Code(
        "YAML merge key",
        "The merge key `<<` is refused; it is not part of YAML 1.2.",
        "Write the keys out, or put them into a base recipe and name it by `extends`.",
    ),
    "E0012": Code(
        "YAML tag",
        "Tags (`!x`, `!!python/...`) are refused: some would run code, and a recipe needs none.",
        "Remove the tag; quote the value if it should be text.",
    ),
    "E0013": Code(
        "not a mapping",
        "The file's top level is a list or a single value, not `key: value` lines.",
        "Start from `recipe new`, or from one of the files in recipes/.",
    ),
    "E0014": Code(
        "key is not text",
        "A key is a list, a mapping, a number, true, false or null.",
        "Write a plain name; put quotes around it if it looks like a number.",
    ),
    "E0015": Code(
        "nested too deeply",
        "Lists and mappings lie more than 32 deep.",
        "Close the brackets; no recipe needs that.",
    ),
    "E0016": Code(
        "character that YAML does not allow",
        "The file holds a control character.",
        "Remove it; in a double-quoted text it can be written as an escape.",
    ),
    "E0017": Code(
        "YAML directive",
        "A line that starts with `%` is a directive to the YAML reader. Recipes are YAML 1.2 and take none.",
        "Remove the line.",
    ),
    "E0018": Code(
        "byte order mark",
        "The file starts with a byte order mark, as some editors write it.",
        "Save it as UTF-8 without a byte order mark.",
    ),
    "E0020": Code(
        "`extends` is not a relative path",
        "`extends` names one YAML file, NAME.yaml or NAME.yml, relative to the folder of the file that "
        "says it, and in no hidden folder: lines of other files have no place in a diagnostic.",
        "Write for example `extends: base.yaml`.",
    ),
    "E0021": Code(
        "extended file cannot be read",
        "The file that `extends` names does not exist, or is no readable file.",
        "Correct the path; it is relative to the folder of the file that says it.",
    ),
    "E0022": Code(
        "`extends` goes round in a circle",
        "Following `extends` from file to file leads back to a file already read, or through more than 16.",
        "Remove one link of the circle that the message shows.",
    ),
    "E0030": Code(
        "`--set` is not PATH=VALUE",
        "The argument has no `=`, no path before it, a path that cannot be read, or no value after it.",
        "Write for example `--set train.steps=100`, or `--set lora=null` to take a section away.",
    ),
    "E0031": Code(
        "`--set` path leads nowhere",
        "A part of the path before the last is a single value or a list, which has no keys.",
        "Set the section as a whole, or correct the path.",
    ),
    "E0032": Code(
        "`--set` index out of range",
        "The list has no item of that index. Items count from 0.",
        "Use an index that the list has, or set the whole list.",
    ),
    "E0033": Code(
        "key cannot be set on the command line",
        "`extends` is read before `--set` is applied.",
        "Write it into the file.",
    ),
    "E0000": Code(
        "fault of the compiler",
        "The compiler failed in a way that it should not.",
        "Run the command again with RECIPEC_TRACEBACK=1 set, and report what it prints together with the "
        "recipe.",
    ),
    "E0040": Code(
        "no such path",
        "The path that `recipe explain` was asked for is no section or key of the language.",
        "Use the path that the message suggests; without a path the whole recipe is shown.",
    ),
    "E0042": Code(
        "check that does not end",
        "The checks of a recipe have a minute. A regular expression that tries every way to match, such as "
        "`(a+)+b`, takes for ever: in lora.targets, rank_pattern, sharding.rules or evaluate.prompts.",
        "Write the expression without repetitions within repetitions.",
    ),
    "E0041": Code(
        "two recipes of one name",
        "Two of the recipes that are built together have the same name, and would write one folder.",
        "Give one of them another name.",
    ),
}

SCHEMA: dict[str, Code] = {
    "E0101": Code(
        "unknown key",
        "The section has no such key. Keys are never ignored.",
        "Use the key that the message suggests, or remove it. `recipe schema` lists them all.",
    ),
    "E0102": Code(
        "missing key",
        "A key without which a recipe means nothing is not given: `recipe`, `name`, `model.id`, `mesh`, "
        "`data.train` and a few within list items.",
        "Add it.",
    ),
    "E0103": Code(
        "wrong type",
        "The value is of another type than the key takes: text for a number, a list for a single value.",
        "Write the value as the message says. In YAML 1.2 only true and false are truth values, and quotes "
        "make a number text.",
    ),
    "E0104": Code(
        "not one of the choices",
        "The key takes one of a few words, and this is none of them.",
        "Use one of the words that the message lists.",
    ),
    "E0105": Code(
        "out of range",
        "The number lies outside of what the key allows.",
        "Choose a number in the range that the message gives.",
    ),
    "E0106": Code(
        "malformed value",
        "The text does not have the form that the key asks for.",
        "Follow the form that the message shows.",
    ),
    "E0107": Code(
        "keys exclude each other",
        "Two keys say the same thing in two ways, such as `epochs` and `steps`.",
        "Keep one of them. When the other comes from an extended file, set it to null in this one.",
    ),
    "E0108": Code(
        "unknown version of the language",
        "The key `recipe` holds the version of the language; this compiler reads version 1.",
        "Write `recipe: 1`; a recipe of a later version needs a later compiler: update recipec.",
    ),
    "E0109": Code(
        "nothing given",
        "A list, a mapping or a text that must hold something is empty.",
        "Add an item.",
    ),
    "E0110": Code(
        "one of several keys is needed",
        "One of two keys has to be given, and neither is: `accelerator` or `topology`, `epochs` or `steps`.",
        "Give one of them.",
    ),
    "E0111": Code(
        "given twice in a list",
        "A list whose items have to differ holds one a second time.",
        "Remove one of the two.",
    ),
}

MESH: dict[str, Code] = {
    "E0201": Code(
        "unknown accelerator",
        "The name or topology is none of the hardware catalogue's, or there is no slice of that size.",
        "Use a name or topology that the message lists. The number in v4-N, v5p-N and tpu7x-N counts "
        "TensorCores, two to a chip; in v5e-N and v6e-N it counts chips.",
    ),
    "E0202": Code(
        "mesh axes do not multiply to the devices",
        "The product of the axes is not the number of devices. v5p-8 is four chips and four devices.",
        "Choose axes whose product is the number of devices that the message gives.",
    ),
    "E0203": Code(
        "tp does not divide the heads",
        "tp splits attention heads and key/value heads over devices. Layer types differ: Gemma 4 31B has "
        "16 key/value heads in its local layers and 4 in its global ones.",
        "Choose a tp that divides every count, and put the remaining devices on fsdp; or keep those "
        "weights whole with `sharding.on_indivisible: replicate`.",
    ),
    "W0203": Code(
        "heads are kept whole under tp",
        "tp does not divide the number of heads, and `on_indivisible: replicate` keeps their weights whole "
        "on every device.",
        "Nothing, if that is meant; it costs memory and repeats work.",
    ),
    "E0204": Code(
        "axis does not divide a dimension",
        "A parameter or an adapter has a dimension that its mesh axis cannot split evenly.",
        "Choose another size of the axis, or write `on_indivisible: replicate` under `sharding`.",
    ),
    "W0204": Code(
        "dimension is kept whole",
        "A mesh axis does not divide it, and `on_indivisible: replicate` keeps it whole on every device.",
        "Nothing, if that is meant.",
    ),
    "E0208": Code(
        "sharding rule matches nothing",
        "A rule's expression has to match the whole path of a parameter, and matches none.",
        "`recipe explain RECIPE mesh` lists the paths; write `.*` at either end.",
    ),
    "E0209": Code(
        "sharding spec of the wrong length",
        "A spec names one axis or null for each dimension of the parameters that its rule matches.",
        "Give as many entries as the message says.",
    ),
    "E0211": Code(
        "axis twice in one spec",
        "A mesh axis can split one dimension of an array.",
        "Write null for the other.",
    ),
    "E0212": Code(
        "sharding rule never applies",
        "Earlier rules match all of its parameters, and the first match wins.",
        "Move it up, or remove it.",
    ),
    "N0213": Code(
        "sharding rule changes nothing",
        "It says what the model's default says.",
        "Remove it.",
    ),
    "N0215": Code(
        "single key/value head under tp",
        "One head cannot be split; Tunix keeps its weight whole on every device of tp.",
        "Nothing; it is a small weight.",
    ),
    "E0216": Code(
        "weights do not fit",
        "The base weights alone, split as the mesh says, exceed a chip's memory.",
        "Take a larger slice, or split over all of its devices.",
    ),
    "N0218": Code(
        "one sample at a time",
        "All devices share one sample (tp) where they could compute several (fsdp): tp exchanges "
        "activations in every layer.",
        "Put the devices on fsdp where the global batch size allows it.",
    ),
    "W0219": Code(
        "offloading on a CPU",
        "A CPU has no memory apart from the host's to offload activations to: they are kept, as with "
        "save_dots.",
        "`remat.policy: save_dots`.",
    ),
    "E0222": Code(
        "ep without experts",
        "The mesh axis ep splits the experts of a layer over devices, and the model has none.",
        "Give its devices to fsdp, which splits the batch and the weights.",
    ),
    "E0223": Code(
        "flags of another generation",
        "A profile of `xla` has flags that were published for one generation of TPUs, and the recipe's "
        "machine is of another.",
        "Name the machine's own profile, or none.",
    ),
    "E0224": Code(
        "unknown flag of libtpu",
        "A flag that libtpu does not have ends the run with an error when it starts. The list is that of the "
        "pinned version.",
        "Correct the name, without dashes, or remove it.",
    ),
    "E0225": Code(
        "tokens that cannot be split",
        "The mesh axis cp splits the tokens of a row over devices. Experts sort all tokens of a device, "
        "and a layer that passes a state from token to token takes them one after the other.",
        "Give its devices to fsdp, which splits the batch and the weights.",
    ),
    "N0226": Code(
        "rows that are lengthened",
        "With cp splash attention takes a row in two pieces for each device, and a piece in blocks of 128 "
        "tokens: a row is padded to a multiple.",
        "A `data.max_length` that is a multiple of 256 times cp.",
    ),
    "N0227": Code(
        "LoRA with all of a v5p-8 on fsdp",
        "marin-community/marin's issue 4903 has runs of DPO (rank 64, learning rate 1e-6) that stay at a "
        "loss of 0.66 there after nine steps, where fsdp 2 x tp 2 is at 0.27. They trace it to the order of "
        "a sum over the chips, which cancels in B's first gradient. Whether it strikes others is not known.",
        "`probe.py` compares B's first gradients on both meshes. `lora.init: zero_a`, or fsdp 2 x tp 2, "
        "whose cost `recipe plan --set 'mesh.axes={fsdp: 2, tp: 2}'` tells.",
    ),
    "E0221": Code(
        "hosts that the accelerator is not",
        "A slice is a fixed number of machines: as Cloud TPU VMs, or on GKE as machines of 4 chips. "
        "Processes on a CPU share the virtual devices evenly.",
        "Leave `mesh.hosts` out, or take a number that the message gives.",
    ),
}

LORA: dict[str, Code] = {
    "E0301": Code(
        "target is a name of Tunix's",
        "Tunix fuses projections (`kv_einsum`). Its names differ from layer to layer, so a regex of them "
        "leaves layers out without a word: in Gemma 4 31B, the keys of 10 of 60 layers.",
        "Name Hugging Face's projections: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.",
    ),
    "E0302": Code(
        "target matches nothing",
        "No projection of the model has that name, or the expression matches no whole module name.",
        "Use a name that the message lists; an expression has to match all of `layers.7.self_attn.q_proj`, "
        "so it often starts with `.*`.",
    ),
    "E0303": Code(
        "target is not a regular expression",
        "A target that is no plain name is read as a Python regular expression, and this one is malformed.",
        "Correct it, or name a projection.",
    ),
    "E0304": Code(
        "no such layer",
        "`lora.layers` names a layer that the model does not have.",
        "Layers count from 0.",
    ),
    "E0305": Code(
        "nothing is adapted",
        "None of the layers that `lora.layers` chooses has any of the targets.",
        "Choose other layers or other targets.",
    ),
    "W0305": Code(
        "target in none of the chosen layers",
        "`lora.layers` chooses layers that do not have the projection.",
        "Choose other layers, or remove the target.",
    ),
    "W0306": Code(
        "target adds nothing",
        "The targets before it match all of its projections.",
        "Remove it.",
    ),
    "N0307": Code(
        "target not in every layer",
        "Some layers have no such projection. In the global layers of larger Gemma 4 models, keys serve as "
        "values and there is no v_proj.",
        "Nothing: PEFT skips them too. Name k_proj, so that those layers are adapted.",
    ),
    "W0308": Code(
        "adapters in bfloat16",
        "Adapters and Adam's moments in bfloat16 lose small updates; over 20 steps the loss drifts from a "
        "float32 run twice as far as with float32 adapters.",
        "`lora.dtype: float32`; the base stays bfloat16.",
    ),
    "N0309": Code(
        "key and value share A",
        "`kv: shared` is Qwix's layout of fused projections. PEFT trains an A for each.",
        "`kv: independent`, to train what PEFT trains.",
    ),
    "N0310": Code(
        "Qwix's initialisation",
        "A starts with 2.4 times the bound of PEFT's.",
        "`init: peft`, to compare runs with PEFT's.",
    ),
    "W0311": Code(
        "large alpha / rank",
        "The adapters' product is scaled by alpha / rank, and this is far above what is usual. rsLoRA's "
        "alpha / sqrt(rank) has to be converted.",
        "alpha equal to the rank, or twice it.",
    ),
    "W0312": Code(
        "rank above the weight's own",
        "An adapter of that rank has more numbers than the weight it adapts.",
        "A smaller rank.",
    ),
    "E0313": Code(
        "pattern that matches nothing",
        "A key of rank_pattern or alpha_pattern matches none of the adapted projections.",
        "Spell it as in targets.",
    ),
    "E0314": Code(
        "shared A of different ranks",
        "kv: shared gives fused projections one A, and rank_pattern or alpha_pattern gives them ranks or "
        "alphas of their own.",
        "`kv: independent`.",
    ),
    "N0315": Code(
        "experts without adapters",
        "Most weights of a mixture of experts are the experts' own, and no target names them: LoRA adapts "
        "attention and the dense block that every token goes through.",
        "Nothing where these suffice. The target `experts` adapts them too, each expert with an A and a B of "
        "its own; without `lora` all weights are trained.",
    ),
    "E0316": Code(
        "dropout of experts",
        "Adapters of experts, and of routers that are no linear layers in transformers, have no dropout: "
        "PEFT computes W + scale * B A for them, where no input of A's own can be dropped.",
        "`dropout: 0`.",
    ),
    "W0317": Code(
        "router that PEFT does not run",
        "In transformers the router of GLM 4.5 is a parameter beside a correction that its block reads. PEFT "
        "wraps a module whose parameter it adapts, and the block no longer finds the correction: PEFT loads "
        "the adapter that merge.py writes, and the model with it does not run.",
        "`adapter: false` in `merge`, which merges into the weights alone; or leave `router` out.",
    ),
    "E0318": Code(
        "products in eight bits of other weights",
        "`products` multiplies the codes of weights that are stored in eight bits, and `quantize` says that "
        "they are not.",
        "`quantize: int8`, on TPU7x `fp8`; or no `products`.",
    ),
    "E0319": Code(
        "products in eight bits that are no faster",
        "The chip has no products of that type that are faster than bfloat16's: activations would be rounded "
        "for nothing.",
        "`quantize: int8` on v5e, v5p and v6e, `fp8` on TPU7x; or no `products`.",
    ),
    "E0322": Code(
        "module that train_also cannot train whole",
        "train_also is for embeddings, the output head and norms. Projections, experts and routers carry "
        "adapters; a model whose head is its embedding has no lm_head; and an objective that asks the model "
        "without adapters would need the base's own modules once more.",
        "A name that the message lists, or no `train_also`.",
    ),
    "N0323": Code(
        "embedding that is the head",
        "The model's output head is its embedding, and stays so: what is trained of one is trained of both. "
        "PEFT trains a copy of the embedding and keeps the head, unless ensure_weight_tying is set.",
        "Nothing where that is meant.",
    ),
    "E0324": Code(
        "new tokens that have no tokenizer to go to",
        "model.add_tokens changes the files of the checkpoint's own tokenizer, which merge.py writes beside "
        "the merged weights. Another tokenizer is not changed, and a served adapter has none.",
        "No `model.tokenizer`; `serve: {weights: merged}`.",
    ),
    "W0325": Code(
        "new tokens whose embeddings are not trained",
        "A new token begins with the embedding of the row that it takes, which nothing has trained. Adapters "
        "of projections do not change it.",
        "`lora: {train_also: [embed_tokens, lm_head]}`.",
    ),
    "E0321": Code(
        "what DoRA does not go with",
        "DoRA scales the outputs of the frozen weight with its adapter to trained magnitudes. PEFT has none "
        "for experts and routers; with dropout it drops inputs of the frozen product too; the lengths of "
        "weights that are stored quantised are not computed here; and vLLM serves no such adapter.",
        "What the message names, or `kind: lora`.",
    ),
    "E0320": Code(
        "products in eight bits of experts",
        "The products of all experts at once are computed in model.dtype, whatever weights are stored in.",
        "No `products`.",
    ),
}

DATA: dict[str, Code] = {
    "W0401": Code(
        "data file is not there",
        "The recipe names a local file that does not lie beside it. The artifact is the same, but warm-up, "
        "steps and padding could not be checked against the data.",
        "Put it there, or give train.py its folder by --data-dir.",
    ),
    "E0402": Code(
        "chat template cannot be read",
        "`data.chat_template` names a file that is missing, too large or no text.",
        "Correct the path, which is relative to the recipe's folder.",
    ),
    "E0403": Code(
        "tokenizer of another family",
        "Token numbers mean other pieces of text than the checkpoint was trained on. Nothing fails: the "
        "run trains on noise, or relearns the vocabulary.",
        "Leave `model.tokenizer` out.",
    ),
    "W0404": Code(
        "tokenizer is not in the catalogue",
        "Nothing is known of whether it fits the checkpoint.",
        "Leave `model.tokenizer` out, unless it was made for this checkpoint.",
    ),
    "E0405": Code(
        "no chat template",
        "A base checkpoint's tokenizer has no chat template, and chat data needs one.",
        "Train the instruction-tuned checkpoint, or give `data.chat_template`.",
    ),
    "E0406": Code(
        "chat template of another family",
        "The template writes turn markers that the checkpoint was not trained with, such as Gemma 3's "
        "`<start_of_turn>` for Gemma 4, which uses `<|turn>`. Markers that the checkpoint's tokenizer has "
        "as tokens are let through: it was trained with them.",
        "Leave `data.chat_template` out: the template that the checkpoint ships is taken. Where it is the "
        "checkpoint's own, copy that of the model's repository.",
    ),
    "W0406": Code(
        "chat template without the family's markers",
        "The template does not write the turn markers that the checkpoint was trained with.",
        "Leave `data.chat_template` out, unless another markup is meant.",
    ),
    "W0407": Code(
        "padded rows",
        "Without packing each sample is padded to max_length, and the padding is computed.",
        "`packing: true`, or a smaller max_length.",
    ),
    "W0408": Code(
        "loss on every token",
        "With `loss_on: all` the prompts are learnt as well, and the loss is not comparable with a run on "
        "the answers' tokens.",
        "`loss_on: assistant`, or `completion` where the format has prompts.",
    ),
    "W0409": Code(
        "trained and evaluated on the same file",
        "The evaluation's loss then says nothing about new samples.",
        "Hold some samples out.",
    ),
    "N0411": Code(
        "length is no multiple of 128",
        "A TPU pads the last dimension to 128: the next multiple costs the same.",
        "Use the multiple that the message gives.",
    ),
    "E0413": Code(
        "field that the format does not have",
        "`data.fields` renames columns of the format; chat has messages, role and content.",
        "Use one of these as the key and the source's name as the value.",
    ),
    "E0414": Code(
        "objective and format",
        "dpo, cpo and orpo learn from preferences; sft learns from every other format.",
        "Change one of the two.",
    ),
    "E0415": Code(
        "loss_on and format",
        "Assistant turns are a thing of conversations, a completion one of prompts.",
        "Leave `loss_on` out: its default fits the format.",
    ),
    "E0416": Code(
        "transform",
        "The file is missing, is not Python, or has no such function at its top level.",
        "Correct data.transform, as file.py:function.",
    ),
    "E0417": Code(
        "kind of source",
        "How a source is read follows from the ending of its name.",
        "Rename the file, or convert it.",
    ),
    "E0418": Code(
        "split of a file",
        "Splits and configurations belong to Hugging Face data sets.",
        "Remove the key.",
    ),
    "E0419": Code(
        "packed preferences",
        "A pair of answers is compared whole, in rows of its own.",
        "`packing: false`.",
    ),
    "E0420": Code(
        "two sources of evaluation data",
        "`data.eval` names samples to evaluate on, and `data.eval_fraction` holds out others.",
        "Remove one of the two.",
    ),
    "W0421": Code(
        "eval_seed without effect",
        "It decides which samples `data.eval_fraction` holds out, and none are.",
        "Remove the line, or give `data.eval_fraction`.",
    ),
    "E0422": Code(
        "no sample left to train on",
        "`data.eval_fraction` holds out that share of the samples, rounded up: here all of them.",
        "A smaller share, or more samples.",
    ),
    "E0423": Code(
        "samples are more than what is trained on",
        "More than data.max_invalid_ratio of the samples hold something that is not read, or that the chat "
        "template does not name: tool calls, tools, reasoning, pictures, a system prompt beside messages.",
        "Give a template that writes it, or remove it with `data.transform`.",
    ),
    "E0424": Code(
        "preferences with a label",
        "A prompt, a completion and whether it is liked are data for KTO, which this version does not train. "
        "As `prompt_completion` the disliked answers would be learnt too.",
        "Keep the liked answers with a `data.transform`, or make pairs: `format: preference`.",
    ),
    "E0425": Code(
        "data is no regular file",
        "A pipe is waited for until somebody writes to it, and a device such as /dev/zero has no end. Data "
        "are read more than once: counted, hashed, tokenised.",
        "Write what comes out of it into a file, and name that.",
    ),
    "E0450": Code(
        "preferences beside other samples",
        "A source's own format is preference and the others' is not, or the other way round. Pairs of "
        "answers are compared, each a row of its own, and no other samples are.",
        "Train on the two kinds one after the other, in recipes of their own.",
    ),
    "W0451": Code(
        "reasoning without effect",
        "Every source is text, which has no turns of the assistant's.",
        "Remove `data.reasoning`.",
    ),
    "E0452": Code(
        "no template for an empty reasoning",
        "`data.reasoning: empty` trains answers behind the prompt of a model that is told not to think, by "
        "the variable enable_thinking of its chat template. This template does not read it.",
        "`reasoning: drop`, or a template that does.",
    ),
    "E0453": Code(
        "curriculum of packed rows",
        "Packing fills every row with samples of several lengths: there is no shortest row.",
        "`packing: false`.",
    ),
    "E0454": Code(
        "temperature beside weights",
        "`data.temperature` makes the sources' weights, of their sizes.",
        "Remove `data.temperature`, or every `weight`.",
    ),
    "W0455": Code(
        "temperature without effect",
        "One source alone is drawn whole, whatever the temperature is.",
        "Remove `data.temperature`.",
    ),
    "E0460": Code(
        "epochs of a stream",
        "`data.stream_window` reads the training data while the run goes on. How many steps an epoch of it "
        "has is known at its end alone, and the learning rate's schedule needs it at the beginning.",
        "`train.steps` in place of `train.epochs`; the data is gone through as often as that takes.",
    ),
    "E0461": Code(
        "a stream that would have to be counted",
        "`data.eval_fraction`, `data.temperature` and `data.curriculum` take the number or the lengths of "
        "all samples, and a stream is never read whole before the run.",
        "`data.eval` with a file of its own; a `weight` at each source; or no `data.stream_window`.",
    ),
    "E0462": Code(
        "a part of a split in a stream",
        "A split such as train[:10%] takes counting the split's samples, and a stream is not counted.",
        "The split's name, with `limit` for the first so many samples of it.",
    ),
    "N0463": Code(
        "a stream of several sources without weights",
        "Without a stream every sample of every source is drawn once an epoch. A stream knows no source's "
        "size: it draws by the weights alone, which are 1 where none is given, and begins a source again "
        "that ends.",
        "A `weight` at each source, in proportion to what is to be drawn of it.",
    ),
    "W0430": Code(
        "a part of the samples is not trained on",
        "Some of the samples that are at hand hold something that is not read, or that the chat template "
        "does not name. `recipe preview` counts all of them.",
        "Give a template that writes it, or remove it with `data.transform`.",
    ),
    "E0440": Code(
        "nothing is evaluated",
        "`train.early_stopping` and `checkpoint.keep_best` go by the evaluation loss, and `train.samples` "
        "are written at evaluations. The recipe has no data to evaluate on.",
        "Evaluation data: `data.eval`, or `data.eval_fraction`.",
    ),
    "W0441": Code(
        "patience that the run cannot lose",
        "The first evaluation counts as progress. So many more without any come at the end of the run or "
        "after it.",
        "Evaluate more often with `train.eval_every`, or a smaller patience.",
    ),
    "E0431": Code(
        "loss of another objective",
        "dpo compares with a reference and cpo does not, and not every loss of a pair is of both.",
        "Another `loss_type`, or the objective that has it.",
    ),
    "E0432": Code(
        "label_smoothing with a loss that has none",
        "Only the logistic losses have a form in which a share of the preferences is mistaken.",
        "Remove it, or `loss_type: sigmoid` or `robust`.",
    ),
}

TRAIN: dict[str, Code] = {
    "E0501": Code(
        "global batch is not whole micro-batches",
        "An optimizer step is a whole number of micro-batches, each of micro_batch_size rows on every "
        "data-parallel device (fsdp).",
        "Make global_batch_size a multiple of micro_batch_size x fsdp.",
    ),
    "E0502": Code(
        "warm-up as long as the run",
        "The learning rate never reaches its peak.",
        "Fewer warmup_steps, or a warmup_ratio.",
    ),
    "W0503": Code(
        "warm-up of more than half of the run",
        "Most of the run has a learning rate below its peak.",
        "A warmup_ratio of 0.05 is usual.",
    ),
    "W0504": Code(
        "no checkpoint before the end",
        "The run is shorter than checkpoint.every_steps; an interrupted run starts over.",
        "A smaller every_steps.",
    ),
    "E0505": Code(
        "checkpoints and merged model in one folder",
        "checkpoint.directory and merge.output are the same, or one lies in the other.",
        "Two folders side by side.",
    ),
    "N0506": Code(
        "no evaluation before the end",
        "The run is shorter than train.eval_every.",
        "A smaller eval_every.",
    ),
    "W0507": Code(
        "very high learning rate",
        "AdamW's and Lion's steps are as long as the rate, and at such a peak training diverges.",
        "`learning_rate: 1.0e-4`; 1.0e-5 to 1.0e-3 are usual.",
    ),
    "W0508": Code(
        "final_ratio has no effect",
        "A constant schedule keeps its peak.",
        "Remove it, or choose cosine or linear.",
    ),
    "N0509": Code(
        "merged in float32",
        "The merged checkpoint is twice the size of the base, and is served in bfloat16.",
        "`merge.dtype: bfloat16`.",
    ),
    "W0510": Code(
        "optimizer field without effect",
        "The optimizer has no such hyperparameter, so the value that is given does nothing.",
        "Remove it, or choose the optimizer that has it.",
    ),
    "W0511": Code(
        "preference field without effect",
        "beta, loss_type, label_smoothing, simpo_gamma and cpo_alpha belong to objectives, or to losses of "
        "them, that this recipe does not have.",
        "Remove it.",
    ),
    "W0513": Code(
        "fewer than 50 optimizer steps",
        "Packing lays several samples into a row, and a step takes global_batch_size rows: little data is "
        "a few steps, in which the learning rate hardly moves the weights.",
        "More samples, more epochs, a smaller global_batch_size, or a smaller max_length.",
    ),
    "E0514": Code(
        "load-balancing loss without routers that have it",
        "The loss spreads tokens over the experts of a softmax router, as transformers defines it. A model "
        "without experts has no router; for Gemma 4, and for routers of sigmoids such as GLM 4's and "
        "Llama 4's, transformers defines no such loss. TRL cannot compute it where transformers' model gives "
        "out no logits of its routers.",
        "Remove `router_aux_loss_coef`, or build for another backend.",
    ),
    "E0512": Code(
        "adapter of a full fine-tuning",
        "Without a lora section there is no adapter that could be written as PEFT's.",
        "`adapter: false`.",
    ),
}

SERVE: dict[str, Code] = {
    "E0601": Code(
        "unknown serving accelerator",
        "The name is none of the hardware catalogue's, or it is no TPU.",
        "Use a name that the message lists.",
    ),
    "E0602": Code(
        "more devices than the accelerator has",
        "tensor_parallel_size x data_parallel_size exceeds its devices.",
        "Use the sizes that the message gives.",
    ),
    "W0602": Code(
        "idle devices",
        "tensor_parallel_size x data_parallel_size leaves devices of the accelerator unused, and they are "
        "paid for.",
        "Use the sizes that the message gives, or a smaller accelerator.",
    ),
    "E0603": Code(
        "no fp8 key/value cache",
        "The chip's generation has no fp8. vllm-tpu accepts the flag on v5e and keeps a bfloat16 cache "
        "(tpu-inference issue 3126).",
        "`kv_cache_dtype: auto`, or v6e or tpu7x.",
    ),
    "E0604": Code(
        "no fp8 weights",
        "The chip's generation has no fp8; fp8 models do not run on v5e (tpu-inference issue 1262).",
        "`quantization: null` in serve or merge, or v6e or tpu7x.",
    ),
    "E0605": Code(
        "fewer tokens than requests in a step",
        "vLLM refuses max_num_batched_tokens below max_num_seqs.",
        "A larger max_num_batched_tokens.",
    ),
    "E0606": Code(
        "tensor_parallel_size does not divide the heads",
        "vLLM refuses it.",
        "A size that the message lists.",
    ),
    "N0607": Code(
        "fewer key/value heads than tensor_parallel_size",
        "Every device stores one, and several the same. For Gemma 4 31B at 8, an fp8 cache saves nothing in "
        "the 10 "
        "global layers. A token's bytes are an estimate from shapes.",
        "Nothing, or a smaller tensor_parallel_size with data_parallel_size.",
    ),
    "E0608": Code(
        "weights do not fit",
        "The weights take more than the share of memory that vLLM uses.",
        "A larger tensor_parallel_size or accelerator.",
    ),
    "N0609": Code(
        "experimental generation",
        "tpu-inference's compatibility table calls v3, v4 and v5p experimental.",
        "v5e, v6e or tpu7x.",
    ),
    "W0609": Code(
        "generation without an attention kernel",
        "tpu-inference 0.32 knows block sizes for v5, v6 and v7 alone, and raises an error on v4.",
        "v5e, v6e or tpu7x.",
    ),
    "E0610": Code(
        "prompt does not fit one step",
        "Chunked prefill is switched off and max_num_batched_tokens is below max_model_len: vLLM refuses it.",
        "A larger max_num_batched_tokens, or chunked prefill.",
    ),
    "W0611": Code(
        "more tokens in a step than requests can fill",
        "max_num_batched_tokens exceeds max_model_len x max_num_seqs; compiled shapes and memory are wasted.",
        "A smaller max_num_batched_tokens.",
    ),
    "E0612": Code(
        "malformed image digest",
        "A digest is sha256: and 64 hexadecimal digits.",
        "Copy it from the registry.",
    ),
    "W0613": Code(
        "moving image",
        "An image without a tag, or with a tag such as latest, is another one tomorrow.",
        "Pin it by digest.",
    ),
    "N0614": Code(
        "image is not pinned by digest",
        "A tag may be moved by its publisher.",
        "name@sha256:... pins it.",
    ),
    "E0615": Code(
        "malformed flag",
        "A key of extra_args is no name of a flag of `vllm serve`.",
        "Lower case, words joined by - or _, without leading dashes.",
    ),
    "E0616": Code(
        "flag that a key sets",
        "A key of extra_args repeats what a key of the serve section writes.",
        "Set the key.",
    ),
    "W0617": Code(
        "serves less than it was trained on",
        "max_model_len is below data.max_length.",
        "A larger max_model_len.",
    ),
    "E0618": Code(
        "malformed environment variable",
        "A key of serve.env is no name of a variable, or its value holds a line break or control character.",
        "Names have letters, digits and underscores; values are one line.",
    ),
    "W0619": Code(
        "tool-call parser of another family",
        "vLLM accepts any name, and one made for other markup finds no tool calls.",
        "The parser that the message names.",
    ),
    "E0620": Code(
        "quantised twice",
        "merge.quantization writes weights that name their own quantisation; vLLM refuses another by flag.",
        "One of serve.quantization and merge.quantization.",
    ),
    "E0621": Code(
        "quantised weights that the server does not run",
        "tpu-inference's JAX model of the family does not run this format: int8 is not implemented there, "
        "and some models have no scales.",
        "The format that the message names, `quantization: null`, or vLLM's own model by MODEL_IMPL_TYPE.",
    ),
    "N0622": Code(
        "quantised weights that were not tried",
        "The server runs vLLM's own model on torchax, whose sources have the format; no run of it was seen.",
        "Nothing.",
    ),
    "E0623": Code(
        "unknown flag",
        "`vllm serve` of the pinned version has no such flag. The flags are those of its own parser "
        "(compiler/data/vllm.json); the version in an image cannot be told from a tag.",
        "The flag that the message suggests, or none.",
    ),
    "E0624": Code(
        "abbreviated flag",
        "vLLM's parser takes the beginning of a name for the whole as long as no other flag begins so.",
        "The whole name.",
    ),
    "E0625": Code(
        "value that vLLM refuses",
        "The flag takes another type, one of a few words, one value instead of several, or none at all.",
        "A value as the message says. true and false give --NAME and --no-NAME.",
    ),
    "E0626": Code(
        "key that a configuration does not have",
        "A flag that takes a mapping, or its key after a dot, names what that configuration does not know.",
        "The key that the message suggests.",
    ),
    "E0627": Code(
        "flag given twice",
        "Two keys of extra_args are one flag: with - and with _, by an alias, or with --no-. vLLM takes the "
        "last without a word.",
        "One of them.",
    ),
    "E0629": Code(
        "untrusted model code",
        "The flag or variable has the server run code that is no part of vLLM: what comes with the weights "
        "(trust_remote_code), a plugin, a class by its name, or a library that is loaded first; or it has "
        "the server hand its token to another address than the hub's, or opens it to requests without a key.",
        "Leave it out; code of your own belongs into an image of your own, which serve.image names.",
    ),
    "E0630": Code(
        "flag that the artifact does not go with",
        "The health check, the client scripts or the container would no longer fit the server.",
        "Leave it out.",
    ),
    "E0631": Code(
        "unknown parser",
        "The pinned vLLM has registered no tool-call or reasoning parser of that name. It starts all the "
        "same, "
        "and fails or finds nothing when it is asked.",
        "The name that the message suggests.",
    ),
    "W0632": Code(
        "unknown environment variable of the server",
        "A variable of serve.env is named like one of vLLM's or tpu-inference's, and neither reads it.",
        "The name that the message suggests.",
    ),
    "N0633": Code(
        "server that others can reach",
        "serve.host is no loopback address. compose.yaml, serve.sh and k8s.yaml then refuse to start without "
        "VLLM_API_KEY.",
        "Set VLLM_API_KEY where the server runs, or `host: 127.0.0.1`.",
    ),
    "E0634": Code(
        "cache without room for one sequence",
        "The memory that is left beside the weights holds no sequence of max_model_len, by the plan on "
        "paper; "
        "vLLM does not start.",
        "A smaller max_model_len, a larger tensor_parallel_size or accelerator.",
    ),
    "N0635": Code(
        "decode blocks that save no reads",
        "The decode kernel skips blocks that lie before a sliding window, and by default a block is (nearly) "
        "the whole context. Smaller ones compile; their times are estimates on paper.",
        "`decode_block_sizes: [1, 1024, 1, 1024]`, measured with serve/bench.sh.",
    ),
    "E0636": Code(
        "block sizes that the decode kernel refuses",
        "It wants four positive numbers, whole parts of a block, and blocks of whole pages of the cache.",
        "The sizes that the message gives.",
    ),
    "W0637": Code(
        "block sizes without effect",
        "No block of that size is ever skipped, or another kernel runs that has no such sizes.",
        "`decode_block_sizes: null`.",
    ),
    "E0638": Code(
        "variable that a key sets",
        "serve.env repeats what a key of the serve section writes.",
        "The key.",
    ),
    "E0639": Code(
        "fewer replicas at most than at least",
        "autoscaling.min_replicas is above max_replicas.",
        "Exchange them.",
    ),
    "W0640": Code(
        "benchmark beyond max_model_len",
        "A prompt and its answer together are longer than the server takes.",
        "Shorter input_lengths or output_length, or a larger max_model_len.",
    ),
    "E0641": Code(
        "a video does not fit one step",
        "Gemma 4's media are handled in one piece (--disable-chunked-mm-input), and max_num_batched_tokens "
        "is below a video's tokens: vLLM refuses it.",
        "A larger max_num_batched_tokens, or limit_mm_per_prompt in serve.extra_args.",
    ),
    "E0642": Code(
        "malformed place of the weights",
        "serve.model is no folder, gs:// address or Hugging Face id that every tool reads alike.",
        "One of the forms that the message lists.",
    ),
    "W0643": Code(
        "weights that hardly are what is served",
        "serve.model names the base where merged weights are served, or other weights than the adapter's "
        "base.",
        "`model: null`, which takes what belongs to serve.weights.",
    ),
    "N0643": Code(
        "merged weights on the hub",
        "serve.model is a Hugging Face id: merging writes a folder, which has to be uploaded there.",
        "Nothing where it was; a folder starts with ./ or /.",
    ),
    "E0644": Code(
        "no adapter to serve",
        "serve.weights is adapter, and the recipe trains or writes none.",
        "A lora section and `merge.adapter: true`, or `weights: merged`.",
    ),
    "E0645": Code(
        "model that takes no adapters",
        "The JAX models of tpu-inference 0.32 have no code for LoRA, and the server ends while it warms up. "
        "vLLM's own models, which run on torchax, have it (compiler/data/vllm_features.json names the "
        "sources).",
        "`weights: merged`, or `MODEL_IMPL_TYPE: vllm` in serve.env.",
    ),
    "E0646": Code(
        "adapter of too large a rank",
        "--max-lora-rank is one of a few sizes, and the largest is below the recipe's largest rank, "
        "rank_pattern "
        "included.",
        "Smaller ranks, or `weights: merged`.",
    ),
    "N0647": Code(
        "adapter that was not tried on a TPU",
        "vLLM's own model takes it by its sources, and did on a CPU.",
        "Nothing.",
    ),
    "E0648": Code(
        "adapter with several replicas in one process",
        "tpu-inference refuses LoRA where one process holds several replicas.",
        "Leave TPU_MULTIPROCESS_DP unset: `vllm serve` then gives each replica a process.",
    ),
    "W0648": Code(
        "structured outputs with several replicas in one process",
        "tpu-inference does not support structured outputs where one process holds several replicas.",
        "Leave TPU_MULTIPROCESS_DP unset.",
    ),
    "E0649": Code(
        "option of another structured-outputs backend",
        "disable_any_whitespace is for xgrammar and guidance, disable_additional_properties for guidance; "
        "vLLM "
        "refuses them otherwise.",
        "The backend that the message names.",
    ),
    "E0650": Code(
        "prompts that cannot be read",
        "evaluate.prompts names a UTF-8 file below the recipe's folder, which the artifact takes along. It "
        "is missing, empty, too large or an address.",
        "Correct the path, or copy the file there.",
    ),
    "E0651": Code(
        "line of prompts in another form",
        'Each line is {"prompt": ..., "expected": ...} or {"messages": [...], "expected": ...}, and no two '
        "lines ask the same.",
        "Correct the line that the message names.",
    ),
    "E0652": Code(
        "expected that is no regular expression",
        "Python's re refuses the expression. In JSON a backslash is written twice.",
        "Correct the line that the message names.",
    ),
    "W0653": Code(
        "expected that matches any answer",
        "The expression is found in an empty answer as well: every answer passes, and the rate says nothing.",
        "An expression of what a wrong answer does not have.",
    ),
    "W0654": Code(
        "several samples at temperature 0",
        "The likeliest token is always taken: the samples of a prompt are one answer, and pass@k is pass@1.",
        "samples: 1, or a temperature above 0.",
    ),
    "E0655": Code(
        "answers as long as the context",
        "evaluate.max_tokens and the prompt share serve.max_model_len; vLLM refuses the requests.",
        "A smaller max_tokens, or a longer max_model_len.",
    ),
    "N0656": Code(
        "evaluation without a server",
        "eval.sh asks the server that the serve section describes; without that section it is not written.",
        "A serve section, or no evaluate section.",
    ),
    "E0657": Code(
        "name of a task that is none",
        "lm-eval's tasks have names of letters, digits and a few signs; a comma or a space makes several.",
        "One name for each entry of evaluate.tasks.",
    ),
    "W0658": Code(
        "tasks that may end the server",
        "Where data.format knows no turns, lm-eval asks for log probabilities of prompts if a task scores "
        "given answers. tpu-inference raises an error in its engine then if the model is multimodal.",
        "Tasks that generate their answers.",
    ),
    "W0659": Code(
        "requests that may do more",
        "The flag or variable lets whoever reaches the server do more than ask the model: read files of the "
        "machine, have it fetch addresses, change the chat template, or use routes that ask for no key.",
        "Leave it out, or see that nobody but you reaches the server.",
    ),
    "W0660": Code(
        "model that vLLM does not name",
        "Neither tpu-inference nor vLLM has a model of the class that config.json names in `architectures`. "
        "Such a checkpoint is served by transformers' model within vLLM, or not at all "
        "(compiler/data/vllm_features.json has the classes and names the sources).",
        "Try the server before it is relied upon, or leave the serve section out.",
    ),
}

PATHS: dict[str, Code] = {
    "E0701": Code(
        "reference to an environment variable",
        "A recipe's values are written into the artifact, which is committed and copied. `${env:NAME}` would "
        "write a secret there, or make the artifact differ from machine to machine.",
        "Write the value itself if it is no secret; else remove it and set the variable where the artifact "
        "runs. vLLM and huggingface_hub read HF_TOKEN from their environment.",
    ),
    "E0702": Code(
        "looks like a secret",
        "The text has the form of an access token or a private key. A recipe is committed, and its values "
        "are copied into the artifact.",
        "Remove it, revoke it if the file was shared, and set it in the environment where the artifact runs.",
    ),
    "E0703": Code(
        "variable that holds a secret",
        "A variable of `serve.env` or a flag of `serve.extra_args` is named like a secret (token, password, "
        "secret, key). Its value would be written into the artifact, and a flag's be seen in the list of "
        "processes.",
        "Remove it, and set the variable that the message names where the server runs.",
    ),
    "E0704": Code(
        "path leaves the recipe's folder",
        "The path is absolute, starts with ~, or climbs out by `..`. The artifact runs where it is copied "
        "to, so what it needs lies below the recipe.",
        "Put the file below the recipe's folder, or name a gs:// address.",
    ),
    "E0705": Code(
        "output outside the run's folder",
        "checkpoint.directory, cache.directory or merge.output is absolute or climbs out by `..`; or one of "
        "the first two is an address other than gs://.",
        "A relative folder; --output of train.py and merge.py says what it is relative to.",
    ),
    "E0706": Code(
        "output over the artifact's files",
        "checkpoint.directory or merge.output is the artifact's folder itself or a file or folder of it.",
        "A folder of another name.",
    ),
    "E0707": Code(
        "character that would be read as something else",
        "A path, name or address holds a line break, another control character or a mark that turns the "
        "direction of writing: it would end the comment or the command that it is written into, or look like "
        "another. An output's folder is also read by the shell of the machine that it is fetched from.",
        "Write it without that character; rename the file.",
    ),
    "E0708": Code(
        "link out of the recipe's folder",
        "A file that the artifact takes along is a symbolic link, or lies behind one, to a place outside of "
        "the recipe's folder. What is there would be copied into the artifact, whatever it is.",
        "Put a copy of the file below the recipe's folder.",
    ),
    "E0709": Code(
        "name that Python would import",
        "The file lies in the artifact, beside train.py, under the name of a module that the scripts import: "
        "Python would run it in the module's place, also where the recipe names it as text or as data.",
        "Another name, or a folder of another name.",
    ),
    "E0710": Code(
        "name too long",
        "File systems hold names of at most 255 bytes, and a path of more than 1,024 bytes leaves no room "
        "for the folder that it is relative to; buckets have the same limit.",
        "A shorter name.",
    ),
    "E0711": Code(
        "text that would be read as an option",
        "The text starts with `-`. Commands of the artifact take it as an argument, and would read an option "
        "in its place.",
        "Another name; a file may be named as ./NAME.",
    ),
    "E0712": Code(
        "address that names nothing",
        "After `://` there is no bucket, host or data set, or `..` leads out of it.",
        "The whole address, such as gs://bucket/folder or hf://owner/name.",
    ),
    "E0713": Code(
        "local checkpoints in a folder of the system",
        "checkpoint.local.directory is / or lies in a folder such as /etc, /usr or /dev, also by way of "
        "`..`. Checkpoints there are deleted again when newer ones are saved.",
        "A folder in memory below /dev/shm, or on an attached disk.",
    ),
}

MODEL: dict[str, Code] = {
    "E0801": Code(
        "model is not in the catalogue",
        "The compiler needs the model's sizes, and knows no checkpoint of that id: it is not in the "
        "catalogue, and no models/OWNER--NAME beside the recipe has it.",
        "Use the id that the message suggests, write ./ before a directory, or bring the model's config.json "
        "and the list of its tensors by `recipe models add`.",
    ),
    "E0802": Code(
        "no readable config.json",
        "model.id is a directory, relative to the recipe's, without a readable config.json.",
        "Correct the path, or copy config.json there.",
    ),
    "E0803": Code(
        "checkpoint cannot be trained",
        "Its config.json asks for what the model of its family does not do here; training it would be wrong "
        "without any error. Of known ids, the family or the quantised weights of a copy say so already.",
        "Another checkpoint; of a quantised copy, its original.",
    ),
    "E0804": Code(
        "model on a bucket",
        "The config.json of a gs:// model cannot be read while compiling.",
        "Write the Hugging Face id or a directory as model.id, and give train.py the address by --model.",
    ),
    "E0818": Code(
        "tensors are not known",
        "The headers of a folder's safetensors cannot be read; or they are not beside a config.json that no "
        "family describes, whose tensors' names and shapes come from them.",
        "The whole checkpoint in that folder, or a model of one of the families.",
    ),
    "W0806": Code(
        "key of the model without effect",
        "A directory has no revisions, and attention dot has no blocks.",
        "Remove it.",
    ),
    "W0805": Code(
        "dropout of the model is left out",
        "config.json asks for dropout within the model while it is trained (attention_dropout and others), "
        "or for noise (router_jitter_noise). Here it is trained without; other libraries apply it.",
        "`lora.dropout` for dropout of the adapters' inputs.",
    ),
    "W0807": Code(
        "float32 on a TPU",
        "Weights and computation in float32 take twice the memory and run at a fraction of the bfloat16 "
        "rate. Tunix computes in float32 unless told otherwise; artifacts always say.",
        "`model.dtype: bfloat16`.",
    ),
    "E0810": Code(
        "added model is not as it was added",
        "A folder that `recipe models add` wrote lies beside the recipe, and a file of it is gone or is "
        "another than its lock names. What was checked would not be what is trained.",
        "Add the model again; or name the folder as a directory, which is taken as it is.",
    ),
    "E0811": Code(
        "tensor missing in the checkpoint",
        "The list of the checkpoint's tensors that `recipe models add` brought lacks one of which the model "
        "is made, or has no text model at all: config.json and the weights are not of one model, or the "
        "checkpoint's tensors have other names than the family's.",
        "The model's original, or a checkpoint that transformers has saved.",
    ),
    "E0812": Code(
        "tensor of another shape",
        "A tensor of the checkpoint has another shape than its config.json gives it, by the keys that the "
        "message names.",
        "Another revision, or another checkpoint: config.json and the weights must be of one.",
    ),
    "E0813": Code(
        "checkpoint is stored quantised",
        "Its config.json, or the names and types of its tensors, are those of FP8, AWQ, GPTQ, bitsandbytes "
        "or another method: the numbers that would be trained are not in it.",
        "The original; `lora.quantize` quantises it while it is trained.",
    ),
    "E0814": Code(
        "tensor of a layer that the model does not have",
        "The checkpoint has more layers than num_hidden_layers of its config.json.",
        "Another revision, or another checkpoint: config.json and the weights must be of one.",
    ),
    "E0815": Code(
        "revision is another than the added one",
        "model.revision is neither the revision by which the model was added beside the recipe nor its "
        "commit: another checkpoint would be trained than the one that was checked.",
        "Remove it, or add the model at that revision.",
    ),
    "W0816": Code(
        "added model differs from the catalogue's",
        "The config.json that `recipe models add` brought gives other sizes than the catalogue has for the "
        "id, or for the model of which it is a copy. The added one is taken: it is what will be loaded.",
        "Nothing, if that is meant; else remove the folder, and the catalogue's are taken.",
    ),
    "E0817": Code(
        "output head that is not trained",
        "The checkpoint has an output head of its own, and the family's model multiplies by the embedding.",
        "A checkpoint whose output is the embedding, as published.",
    ),
}

UNAVAILABLE: dict[str, Code] = {
    "E0903": Code(
        "splash attention on a CPU",
        "The accelerator is a CPU, and splash attention is a kernel of the TPU.",
        "`attention: dot`.",
    ),
    "E0915": Code(
        "serving on several hosts",
        "The serving accelerator spans several machines.",
        "A slice of one host.",
    ),
    "E0933": Code(
        "experts with TorchAX",
        "transformers' expert layers choose their rows by the data, which jax does not compile.",
        "A dense model, or the backend tunix.",
    ),
    "N0934": Code(
        "recomputation by layers with TorchAX",
        "`remat.policy: block` recomputes attention and feed-forward block each by itself in Tunix; the "
        "TorchAX backend recomputes whole layers.",
        "Nothing.",
    ),
    "N0935": Code(
        "sharding rules with TorchAX",
        "The rules name Tunix's arrays. In a tensor of Hugging Face some of their dimensions are one, which "
        "is split where the first of them is.",
        "Nothing, where that is what was meant.",
    ),
    "N0936": Code(
        "Adafactor with TorchAX",
        "Adafactor keeps sums over an array's two largest dimensions, and Hugging Face's arrays are others "
        "than Tunix's.",
        "Nothing.",
    ),
    "E0937": Code(
        "packed rows that transformers computes as one sample",
        "transformers' gated delta nets, as they are in torch, know no border within a row: a sample would "
        "go on from the state that the one before it left. Llama 4's chunks and its queries' growth are "
        "counted from a row's first token there. train.py begins each sample anew.",
        "`data.packing: false`, or build without that `--backend`.",
    ),
    "E0938": Code(
        "products in eight bits under TorchAX",
        "The TorchAX backend computes with the numbers that the codes stand for, in model.dtype.",
        "No `products`, or build without `--backend torchax`.",
    ),
    "E0939": Code(
        "tokens split under TorchAX",
        "The TorchAX backend computes attention as transformers does, with all tokens of a row on a device.",
        "Give the devices of cp to fsdp, or build without `--backend torchax`.",
    ),
    "E0940": Code(
        "label smoothing or z-loss under TRL",
        "Both need the logits of the whole vocabulary. TRL's fused head gives the log-probabilities of the "
        "targets alone.",
        "`0`, or build without `--backend trl`.",
    ),
    "E0941": Code(
        "noise on embeddings under TorchAX",
        "The TorchAX backend runs transformers' embedding as it is.",
        "`neftune_noise_alpha: null`, or build without `--backend torchax`.",
    ),
    "E0942": Code(
        "DoRA under TorchAX",
        "The TorchAX backend adds A and B to transformers' projections, and scales none of their outputs.",
        "`kind: lora`, or build without `--backend torchax`.",
    ),
    "E0943": Code(
        "modules trained whole by another backend",
        "TRL's and TorchAX's runs train the adapters alone here.",
        "`train_also: []`, or build without that `--backend`.",
    ),
    "E0955": Code(
        "evaluations that nothing hangs on under TorchAX",
        "The TorchAX backend has a loop of its own, which evaluates, and neither stops early, keeps the best "
        "checkpoint nor writes samples.",
        "Remove the line, or build without `--backend torchax`.",
    ),
    "E0956": Code(
        "best checkpoint or samples under TRL",
        "train_trl.py keeps the newest checkpoints as transformers' Trainer does, and writes no samples.",
        "Remove the line, or build without `--backend trl`.",
    ),
    "E0945": Code(
        "model that TorchAX alone trains",
        "No family describes the model, so that Tunix does not have it: transformers' own is trained.",
        "`recipe build --backend torchax`, and `--backend torchax` of other commands.",
    ),
    "N0946": Code(
        "model as transformers computes it",
        "No family describes the model. The TorchAX backend trains it with transformers' own code, which "
        "gives up what is said.",
        "Nothing, or a model of one of the families.",
    ),
    "E0947": Code(
        "packing of a model that cannot be packed",
        "Samples that share a row are told apart by their positions, in the mask of attention. Layers that "
        "carry a state from token to token know no such mask. Of other models, those are packed of which it "
        "is known that all layers take the mask.",
        "`data.packing: false`.",
    ),
    "E0948": Code(
        "not with a model that no family describes",
        "Of such a model adapters are trained, on weights in model.dtype, with transformers' own attention, "
        "on one host.",
        "What the help says, or a model of one of the families.",
    ),
    "E0920": Code(
        "lion with TRL",
        "The recipe is built for TRL, and neither torch nor transformers has the optimizer Lion.",
        "`name: adamw`, or build without `--backend trl`.",
    ),
    "E0922": Code(
        "shared A with PEFT",
        "The recipe is built for TRL or TorchAX, which train PEFT's adapters; PEFT gives each projection an "
        "A of its own, and `kv: shared` has one for key and value.",
        "`kv: independent`, or build without that `--backend`.",
    ),
    "E0923": Code(
        "int8 with TRL",
        "The recipe is built for TRL; int8 of bitsandbytes quantises activations as well as weights.",
        "`quantize: nf4`, or build without `--backend trl`.",
    ),
    "W0924": Code(
        "adafactor with TRL",
        "transformers' Adafactor factors the second moments of every matrix, train.py those of large ones.",
        "Nothing, if the two runs need not be the same; `name: adamw` otherwise.",
    ),
    "E0925": Code(
        "adapters of experts with TRL",
        "train_trl.py gives PEFT the linear layers that carry adapters, and experts are parameters.",
        "Projections alone as `lora.targets`, or no `--backend trl`.",
    ),
    "W0926": Code(
        "quantised experts with TRL",
        "`quantize: nf4` quantises a model's experts too, which bitsandbytes leaves in model.dtype: it knows "
        "linear layers alone. The baseline takes more memory, and trains on another base.",
        "Nothing, if the two runs need not be the same; no `quantize` otherwise.",
    ),
}

PLAN: dict[str, Code] = {
    "E1001": Code(
        "the step does not fit",
        "The training step needs more of each device's memory than it has, by the compiler's own account.",
        "What the help says was tried, and fits; `recipe plan --search` looks at more.",
    ),
    "E1002": Code(
        "over the memory budget",
        "The step's share of each device's memory is above `budget.max_hbm_share`.",
        "A smaller micro-batch, more rematerialisation, or a larger share.",
    ),
    "E1003": Code(
        "over the time budget",
        "The estimated duration of the training is above `budget.max_hours`.",
        "A faster configuration (`recipe plan --search`), fewer steps, or more hours.",
    ),
    "E1004": Code(
        "over the cost budget",
        "The estimated price of the training is above `budget.max_usd`.",
        "A cheaper configuration (`recipe plan --search`), fewer steps, or more US$.",
    ),
    "W1005": Code(
        "a budget that cannot be checked",
        "The plan does not know the run's length or the machine's price, which the budget is about.",
        "Give `train.steps` or put the data beside the recipe; give `cost.train_usd_per_hour`.",
    ),
    "N1006": Code(
        "more sequences than the cache holds",
        "`serve.max_num_seqs` sequences of `serve.max_model_len` tokens do not fit the key/value cache at "
        "once. vLLM handles as many as fit, and puts others off.",
        "Nothing where requests are shorter; else a lower max_num_seqs or max_model_len.",
    ),
    "W1007": Code(
        "a step that did not fit when it was planned",
        "`recipe plan` compiled this step before, on this machine and with these versions: it needs more of "
        "each device's memory than there is. Flags that hide gathers keep more of them.",
        "`recipe plan` looks for a change that fits; without the flags of `xla.profile` a step takes less.",
    ),
    "E1008": Code(
        "a flag's value that libtpu refuses",
        "libtpu knows the flag, and was given a value of another type; it says so when it is loaded.",
        "A value of the flag's type.",
    ),
}

NOTEBOOK: dict[str, Code] = {
    "E1040": Code(
        "a machine that no notebook has",
        "`recipe build --notebook` writes a notebook for the machine of the recipe: Colab lends v5e-1 and "
        "v6e-1, Kaggle v5e-8, and a recipe for virtual CPU devices runs anywhere.",
        "Another `mesh.accelerator`, or no --notebook.",
    ),
    "E1041": Code(
        "a notebook and a bucket",
        "A notebook's session has no account of Google Cloud, so that it reads and writes no bucket. Its "
        "results are kept in Drive, or as Kaggle's output.",
        "A folder in the bucket's place, or no --notebook.",
    ),
    "E1042": Code(
        "a model that a notebook cannot download",
        "On Colab and Kaggle the model comes from the Hugging Face hub, and the recipe names a folder.",
        "The model's id on the hub, or no --notebook.",
    ),
}

PARITY: dict[str, Code] = {
    "E1050": Code(
        "fewer than two backends to compare",
        "`recipe parity` compares backends that run one recipe; of those asked for, one at most can run this "
        "one here: the others refuse it, or their packages are not installed.",
        "Name other backends, change the key that is refused, or install what is missing.",
    ),
}

PORT: dict[str, Code] = {
    "E1101": Code(
        "file in no known dialect",
        "None of the keys by which the tools' configs are told from each other stands in the file.",
        "Name a config of one of the tools that the message lists; `--from` says whose an unusual one is.",
    ),
    "E1102": Code(
        "half a recipe",
        "The file belongs to a run, and does not say what is trained: an accelerate or DeepSpeed config, an "
        "adapter_config.json, a dataset_info.json.",
        "Name the run's own config before it, in one command.",
    ),
    "E1103": Code(
        "dialect cannot be told",
        "The keys of the file are of several tools, or two files are of two tools.",
        "Say whose it is by `--from`, or port one of the files.",
    ),
    "E1104": Code(
        "file that the tool has no use for",
        "A file was named that goes with another tool's config: a dataset_info.json beside Axolotl's.",
        "Leave it out.",
    ),
    "E1105": Code(
        "not valid JSON",
        "The text does not follow JSON's grammar at the place shown, so the tool cannot read it either.",
        "Correct it; comments and commas before a closing bracket are no JSON.",
    ),
    "E1106": Code(
        "Jinja in a config",
        "A value is a Jinja expression, or the file a Jinja template: what it stands for is filled in by a "
        "launcher that a port does not run.",
        "Render it, and port what comes of it.",
    ),
    "E1107": Code(
        "value from the environment",
        "A value is a reference to an environment variable (`${NAME}`, `${oc.env:NAME}`), unknown here.",
        "Write the value in its place.",
    ),
    "E1108": Code(
        "reference that cannot be followed",
        "A `${key}` of OmegaConf names a key that the file has not, or leads back to itself.",
        "Write the value in its place.",
    ),
    "E1109": Code(
        "aliases without end",
        "A YAML alias stands within what it stands for, or aliases of aliases make millions of values.",
        "Write the values out.",
    ),
    "E1110": Code(
        "several runs",
        "Two configs of one tool, two files of one kind, or a pipeline of stages: a recipe is one run.",
        "Port each stage alone; the next one's `model.id` is the `merge.output` of the one before.",
    ),
    "E1111": Code(
        "no mesh takes the run",
        "Every way to arrange the accelerator's devices was refused by the checks.",
        "Ask for another `--accelerator`.",
    ),
    "E1112": Code(
        "file in the way",
        "What `-o` or `--report` names is there already, is one of the ported files, or cannot be written.",
        "Name another file, or replace it with `--force`.",
    ),
    "E1113": Code(
        "not taken over as it stands",
        "With `--strict` every key has to have an exact counterpart, and some have none.",
        "The report lists them: change the source, or port without `--strict`.",
    ),
    "W1114": Code(
        "unknown key",
        "The tool has no such key. It may refuse it or pass it over; nothing is made of it here.",
        "Use the key that the message suggests, or remove it.",
    ),
    "W1115": Code(
        "key given twice in a config",
        "A section holds the same key a second time. The tools take the last one, and so does the port.",
        "Remove one of the two.",
    ),
    "W1116": Code(
        "other rows in an optimizer step",
        "No mesh of the accelerator takes the source's global batch: it is rounded up to one that does.",
        "Another `--accelerator`, or another batch size in the source.",
    ),
    "E1120": Code(
        "merge key with two values",
        "`<<` takes over several mappings that give a key different values. PyYAML up to 6.0.3 takes the "
        "first one's, as YAML has it; 6.0.4 takes the last one's.",
        "Take the key out of one of the mappings, or write the keys out in place of `<<`.",
    ),
    "E1117": Code(
        "file named twice",
        "The command names one file a second time.",
        "Name it once.",
    ),
    "W1119": Code(
        "file beside the recipe is not written",
        "The recipe needs a file beside it, such as the Python module of its `data.transform`.",
        "Give the recipe a file by `-o`; the others are put beside it.",
    ),
    "W1118": Code(
        "no configuration fits",
        "With `--plan` every configuration that was compiled needs more memory than the accelerator has.",
        "A larger `--accelerator`; `recipe plan` says what takes the memory.",
    ),
    "E1141": Code(
        "data set type without a counterpart",
        "A ported file's data set has no type, or one that is not known here, or one that no format has.",
        "Bring the rows into messages, and name the type that has them (`chat_template`); or set `data` in "
        "the recipe that `--partial` writes.",
    ),
    "E1142": Code(
        "data sets of different forms",
        "The ported file's data sets have rows that one run does not mix here: preferences beside others, or "
        "texts that are packed beside conversations that are not.",
        "Bring them into one form, or train on them one after another.",
    ),
    "E1143": Code(
        "data set that cannot be read here",
        "A ported file names no data set, one of a kind that is not known here, or one that lies where a "
        "recipe cannot read it.",
        "Copy it to a file or to the Hugging Face hub, and name that, in the file or with `--set` under the "
        "source's own key.",
    ),
    "E1144": Code(
        "key missing from a config",
        "A key that the ported tool has no default for is missing: the model, the optimizer, a rank.",
        "Add the key, as the message says.",
    ),
    "E1145": Code(
        "keys that exclude each other",
        "The ported tool itself stops on these keys together, or on one without the other.",
        "Keep one of them, or change the other as the help says.",
    ),
    "E1146": Code(
        "quantised base without adapters",
        "A quantised base cannot be trained itself, and this file has no adapters on it; or it is stored in "
        "a way that recipes do not have.",
        "Train adapters, or do not quantise the base.",
    ),
    "E1147": Code(
        "chat template that is not known",
        "The ported file names a chat template that is not the model's own, and is not written out here.",
        "Take the tokenizer's own, or give the template as Jinja.",
    ),
    "E1148": Code(
        "no targets for adapters",
        "The ported file trains adapters, and does not say of what, and PEFT has no choice of its own.",
        "Name the target modules.",
    ),
    "E1149": Code(
        "another kind of training",
        "The ported file is of a stage or a method that recipes do not have: reward models, reinforcement "
        "learning, kto, distillation, adapters that are not LoRA.",
        "Port the supervised stage, or the one of preferences (dpo, cpo, orpo).",
    ),
    "E1150": Code(
        "images or sound",
        "The ported file trains on images, video or sound; the models here read text.",
        "Train on text alone.",
    ),
    "E1151": Code(
        "data set that is not in dataset_info.json",
        "LLaMA-Factory's data sets are described in a file of their own, which is not among the files, or "
        "does not have this name.",
        "Name dataset_info.json beside the config, and correct the data set's name.",
    ),
    "E1160": Code(
        "value that the tool does not take",
        "A key of the source has a value of another type or range than its tool reads, or a word unknown to "
        "it.",
        "Correct the value, or remove the key: its default then holds.",
    ),
    "E1161": Code(
        "DeepSpeed at odds with the trainer",
        "A DeepSpeed setting is a number of its own where the Trainer has another, on which it would stop.",
        "Write `auto` there, or the same number in both.",
    ),
    "E1162": Code(
        "devices that cannot be grouped",
        "The number of GPUs is not a multiple of those that share their rows (tensor, context or sequence "
        "parallelism), so there is no number of data-parallel devices, and no global batch.",
        "Give the number of GPUs that the run used with `--devices`.",
    ),
    "E1163": Code(
        "algorithm without a counterpart",
        "The source asks for an optimizer, a schedule, a loss or a style of prompts that is not among the "
        "recipe's, and that no other comes near.",
        "Choose one of those that the message or the help names.",
    ),
    "E1164": Code(
        "targets without a counterpart",
        "The target modules match nothing that can carry an adapter, are no regular expression, or cannot be "
        "told without knowing the model.",
        "Name the model's projections, or all-linear.",
    ),
    "E1171": Code(
        "another script of TRL",
        "The file is for a script of TRL that recipes have no counterpart of (GRPO, KTO, RLOO, reward "
        "models, distillation), or has a key that the script named by `--script` does not have.",
        "Port the config of an SFT, DPO, CPO or ORPO run, or take the key out by `--set KEY=null`.",
    ),
    "E1172": Code(
        "script of TRL that cannot be told",
        "Several scripts of TRL read such a file, or no one of them has all of its keys; each trains "
        "something else.",
        "Say which one by `--script sft`, `--script dpo`, `--script orpo` or `--script cpo`.",
    ),
    "E1173": Code(
        "--script for another tool's file",
        "The scripts that `--script` names are TRL's, and the file is another tool's.",
        "Leave `--script` out.",
    ),
    "E1174": Code(
        "value that the script alone does not tell",
        "A script is read as syntax and never run, and the value depends on what is not known before: an "
        "input, the environment, a download, a condition.",
        "Write the value in its place, or give it by `--set KEY=VALUE`.",
    ),
    "E1175": Code(
        "script without a trainer that is read",
        "Nothing in the script constructs SFTTrainer, DPOTrainer, ORPOTrainer, CPOTrainer or Trainer with a "
        "language model: it trains in a loop of its own, with another trainer or kind of model, or not at "
        "all.",
        "Port the script that constructs the trainer.",
    ),
    "E1176": Code(
        "script of several runs",
        "The script constructs several trainers, or one in a loop; a recipe is one run.",
        "Make a script of each run, and port each.",
    ),
    "E1177": Code(
        "training arguments outside the script",
        "The trainer's arguments are parsed from a command line or a file, or of a class of the script's.",
        "Port the config file or the command with the values; or construct the library's own class.",
    ),
    "W1178": Code(
        "function to be copied by hand",
        "A function over rows, or one that picks them, has none of the forms that are known: a chat template "
        "over messages, a template of text, a column.",
        "Write it anew in the file that the port puts beside the recipe; until then a run stops there.",
    ),
    "E1179": Code(
        "not valid Python",
        "The text does not follow Python 3's grammar at the place shown, or the notebook has no cells.",
        "Correct it; a script of Python 2 is written anew by 2to3.",
    ),
    "E1180": Code(
        "key that changes what is learnt",
        "The source switches on what recipes do not have, and what comes of the run depends on it: another "
        "loss, other trained parameters or another start of theirs, another update, another model.",
        "Port the run without it by `--set KEY=null`, or by `--partial`, whose recipe names what is missing.",
    ),
    "E1181": Code(
        "several training commands",
        "The script runs more than one command that trains, and a recipe is one run.",
        "Choose one by `--command N`; stages that follow each other pass `merge.output` on as `model.id`.",
    ),
    "E1182": Code(
        "no training command",
        "Nothing in the script is a command that trains, of a tool or of a launcher with a training script.",
        "Name the script that has the command, or the tool's config.",
    ),
    "E1183": Code(
        "not valid shell syntax",
        "A quote, a bracket or a heredoc is opened at the place shown and not closed, or this is no text.",
        "Close it; `bash -n SCRIPT` shows what bash makes of it.",
    ),
    "E1184": Code(
        "command of a script of its own",
        "The command runs a training script that no tool ships; what its flags do stands in that script.",
        "Port the script itself; `--from trl` reads its flags as those of TRL's command line.",
    ),
    "E1185": Code(
        "file of a command that is not there",
        "The command names a config, which lies neither beside the script nor below the working folder, or "
        "whose name is only known when the script runs.",
        "Run `recipe port` in the folder in which the script runs, or write the name out.",
    ),
    "W1186": Code(
        "part of a command that is not read",
        "A launcher's or DeepSpeed's file that the command names is not there, or a word of the command is "
        "no flag; the rest is ported without it.",
        "Name the file on the command line, or give `--devices N`.",
    ),
    "E1187": Code(
        "path that leads out",
        "The command names a file outside of the script's and of the working folder; it is not opened.",
        "Copy the file beside the script, or name it on the command line.",
    ),
    "E1188": Code(
        "folder that cannot be ported so",
        "Nothing in the folder is a run of a tool that is read, or an option is for one run alone.",
        "`recipe port FOLDER -o RECIPES` ports each run of a folder into another one.",
    ),
    "E1193": Code(
        "file of a tool that is not read yet",
        "Its keys tell whose it is, and `recipe port` reads no files of that tool; taken for another's, it "
        "would come out as another run.",
        "Start from a recipe of your own with `recipe new`; `--from` ports it as one of a tool that is read.",
    ),
    "E1198": Code(
        "value that the other tool's config cannot say",
        "`recipe port --to` has no key of the tool for a value that bears on what is learnt, or the tool "
        "refuses what would come of it: the run of the config would be another one.",
        "Change the value by `--set PATH=VALUE`, or take `--partial`, whose config names what is missing.",
    ),
    "E1199": Code(
        "GPUs that cannot share a step",
        "The rows of an optimizer step stay the recipe's, and the GPUs that `--devices` names take equal "
        "parts of them.",
        "Name as many GPUs as divide `train.global_batch_size`.",
    ),
    "W1194": Code(
        "older name of a key beside its newer one",
        "The file has a key by its older name and by its newer one, with two values. Which of them holds "
        "depends on the tool's version; the port takes the newer name's.",
        "Remove one of the two.",
    ),
    "W1168": Code(
        "format of the data guessed",
        "The tool tells by the columns of the data set what its rows are, and the data set is not at hand.",
        "Look at the data set, and set `data.format` and `data.loss_on` in the recipe.",
    ),
}

COMMANDS: dict[str, Code] = {
    "E1225": Code(
        "not a project of Weights & Biases",
        "train.log.wandb_project is no name that Weights & Biases takes: it has a slash or another of "
        "`/ \\ # ? % :`, or more than 128 letters.",
        "The project's name alone; WANDB_ENTITY in the run's environment names its owner.",
    ),
    "E1226": Code(
        "key in place of a project",
        "train.log.wandb_project looks like a key of Weights & Biases, and recipes are kept in git.",
        "Name the project; the key is the run's environment's.",
    ),
}

LAUNCH: dict[str, Code] = {
    "E1301": Code(
        "checkpoints in a folder of each host",
        "Several hosts write a checkpoint together, each its own part, and checkpoint.directory is a folder "
        "of their own disks: none of them would have a whole one.",
        "A place that all hosts reach: a gs:// address.",
    ),
    "E1302": Code(
        "launcher that does not fit",
        "launch.kind names a launcher that cannot make these machines, or that starts a run again where its "
        "checkpoints are not.",
        "As the help says, or leave launch.kind out: every launcher that fits is then emitted.",
    ),
    "W1303": Code(
        "checkpoints on a disk that may be taken away",
        "A spot VM that is taken away takes its disk along, and a run whose checkpoints are there begins "
        "anew.",
        "A gs:// address in checkpoint.directory.",
    ),
    "E1304": Code(
        "spot capacity of a reservation",
        "Capacity is either reserved or spot; Google Cloud refuses a request for both.",
        "Keep one of the two.",
    ),
    "N1305": Code(
        "launch key without effect",
        "The recipe gives a key of the launch section that none of its launchers reads.",
        "Nothing, or remove the key.",
    ),
    "E1316": Code(
        "local checkpoints no more often than shared ones",
        "checkpoint.local saves on the hosts' own disks between the checkpoints of checkpoint.directory, and "
        "its every_steps leaves none in between.",
        "Save more often locally, or leave checkpoint.local out.",
    ),
}

RETIRED = (
    *("E0412", "E0805", "E0901", "E0904", "E0905", "E0906", "E0907", "E0908", "E0909", "E0910", "E0913"),
    *("E0911", "E0912", "N0916", "E0917", "N0918", "E0919"),
    *("E0628", "E0932", "E1165", "E1166", "E1167", "E1169", "E1170"),
    *("E1235", "E1236", "N1237"),
)
"""Codes of earlier versions, of what is available now, said by another code, or gone; none is used again."""

CODES: dict[str, Code] = {
    **FILES,
    **SCHEMA,
    **MESH,
    **LORA,
    **DATA,
    **TRAIN,
    **SERVE,
    **PATHS,
    **MODEL,
    **UNAVAILABLE,
    **PLAN,
    **NOTEBOOK,
    **PARITY,
    **PORT,
    **COMMANDS,
    **LAUNCH,
}

SEVERITIES = {"E": "error", "W": "warning", "N": "note"}


def anchor(code: str) -> str:
    """The name of a code's heading on its page, as Markdown's readers make it."""
    title = re.sub(r"[^\w\s-]", "", f"{code}: {CODES[code].title}".lower())
    return re.sub(r"[-\s]+", "-", title).strip("-")


def page() -> str:
    """docs/diagnostics.md: every code with its cause and cure, by group."""
    lines = [
        "# Diagnostics",
        "",
        "Every message of `recipe` carries one of these codes: E an error, W a warning, N a note. A code",
        "keeps its meaning for good. This page is made from `spec/codes.py` by "
        "`python -m recipec.spec.codes`.",
    ]
    for group, title in GROUPS.items():
        codes = sorted((code for code in CODES if code[1:3] == group), key=lambda code: (code[1:], code[0]))
        if not codes:
            continue
        lines += ["", f"## {title}"]
        for code in codes:
            entry = CODES[code]
            lines += ["", f"### {code}: {entry.title}", "", f"{entry.cause}", "", f"**Cure.** {entry.cure}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
