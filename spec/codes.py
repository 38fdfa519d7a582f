"""Register the diagnostic codes, and write the page docs/diagnostics.md from them.

The letter of a code is its severity (E error, W warning, N note), and its first two digits are its group. The
meaning of a code never changes, and the code of a removed diagnostic is never used again.

    python -m recipec.spec.codes > docs/diagnostics.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """The meaning of a code: a title, the cause, and the cure. Plain text."""

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
    "08": "Model and catalog",
    "09": "Not available in this version",
    "10": "Planning and parity",
    "11": "Porting",
    "12": "Commands, runs and reports",
    "13": "Launching and several hosts",
}

FILES: dict[str, Code] = {
    "E0001": Code(
        "file not found",
        "The path of the recipe names no file.",
        "Correct the path. It is relative to the folder in which the command runs.",
    ),
    "E0002": Code(
        "file cannot be read",
        "The path is a folder or a device, or you are not permitted to read it.",
        "Name a YAML file that you may read.",
    ),
    "E0003": Code(
        "file too large",
        "A recipe has at most 256 KiB, and this file is larger.",
        "Name the right file. Keep data in files of their own, and name them in `data.train`.",
    ),
    "E0004": Code(
        "file is not UTF-8",
        "The file contains bytes that are not UTF-8. It was saved in another encoding, or it is not text.",
        "Save it as UTF-8.",
    ),
    "E0005": Code(
        "file is empty",
        "The file contains only white space and comments.",
        "Start from `recipe new`, or from one of the files in recipes/.",
    ),
    "E0006": Code(
        "not valid YAML",
        "The text breaks YAML's grammar at the place shown. The mistake may be a line above it.",
        "Look for a missing colon, a missing space after a colon, an unclosed quote or bracket, or uneven "
        "indentation.",
    ),
    "E0007": Code(
        "tab in the indentation",
        "YAML allows only spaces as indentation.",
        "Replace each tab with two spaces.",
    ),
    "E0008": Code(
        "several documents in one file",
        "A line `---` starts a second YAML document. A recipe is one document.",
        "Write each into a file of its own. A recipe can build on another with `extends`.",
    ),
    "E0009": Code(
        "key given twice",
        "A section contains the same key twice. Other tools silently use the last one.",
        "Remove one of the two.",
    ),
    "E0010": Code(
        "YAML anchor or alias",
        "Anchors (`&x`) and aliases (`*x`) are not allowed. Each value must be written where it is used.",
        "Write the value out, or share it between recipes with `extends`.",
    ),
    "E0011": Code(
        "YAML merge key",
        "The merge key `<<` is not allowed. It is not part of YAML 1.2.",
        "Write the keys out, or put them into a base recipe and name it with `extends`.",
    ),
    "E0012": Code(
        "YAML tag",
        "Tags (`!x`, `!!python/...`) are not allowed. Some would run code, and a recipe needs none.",
        "Remove the tag. Quote the value if it is text.",
    ),
    "E0013": Code(
        "not a mapping",
        "The top level of the file is a list or a single value instead of `key: value` lines.",
        "Start from `recipe new`, or from one of the files in recipes/.",
    ),
    "E0014": Code(
        "key is not text",
        "A key is a list, a mapping, a number, true, false or null.",
        "Write a plain name. Put quotes around it if it looks like a number.",
    ),
    "E0015": Code(
        "nested too deeply",
        "Lists and mappings are nested more than 32 levels deep.",
        "Close the brackets. No recipe needs such depth.",
    ),
    "E0016": Code(
        "character that YAML does not allow",
        "The file contains a control character.",
        "Remove it, or write it as an escape within double quotes.",
    ),
    "E0017": Code(
        "YAML directive",
        "A line that starts with `%` is a directive to the YAML reader. Recipes are YAML 1.2 and allow none.",
        "Remove the line.",
    ),
    "E0018": Code(
        "byte order mark",
        "The file starts with a byte order mark, which some editors add.",
        "Save it as UTF-8 without a byte order mark.",
    ),
    "E0020": Code(
        "`extends` is not a relative path",
        "`extends` names one YAML file, NAME.yaml or NAME.yml, relative to the folder of the file that "
        "contains it. Hidden folders are not allowed, because diagnostics show lines of the files that they "
        "name.",
        "Write for example `extends: base.yaml`.",
    ),
    "E0021": Code(
        "extended file cannot be read",
        "The file that `extends` names does not exist or cannot be read.",
        "Correct the path. It is relative to the folder of the file that contains it.",
    ),
    "E0022": Code(
        "`extends` forms a circle",
        "The chain of `extends` leads back to a file that was already read, or has more than 16 files.",
        "Remove one link of the chain that the message shows.",
    ),
    "E0030": Code(
        "`--set` is not PATH=VALUE",
        "The argument has no `=`, no valid path before it, or no value after it.",
        "Write for example `--set train.steps=100`, or `--set lora=null` to remove a section.",
    ),
    "E0031": Code(
        "`--set` path does not exist",
        "A part of the path other than the last is a single value or a list, which has no keys.",
        "Set the section as a whole, or correct the path.",
    ),
    "E0032": Code(
        "`--set` index out of range",
        "The list has no item with that index. Indices start at 0.",
        "Use an index of the list, or set the whole list.",
    ),
    "E0033": Code(
        "key cannot be set on the command line",
        "`extends` is read before `--set` is applied.",
        "Write the key into the file.",
    ),
    "E0000": Code(
        "internal error of the compiler",
        "The compiler failed unexpectedly. This is a bug in recipec.",
        "Run the command again with RECIPEC_TRACEBACK=1, and report the output together with the recipe.",
    ),
    "E0040": Code(
        "no such path",
        "The path given to `recipe explain` is not a section or key of the language.",
        "Use the path that the message suggests. Without a path the command shows the whole recipe.",
    ),
    "E0042": Code(
        "check takes too long",
        "The checks of a recipe are stopped after a minute. A regular expression such as `(a+)+b` can take "
        "almost forever. It may be in lora.targets, rank_pattern, sharding.rules or evaluate.prompts.",
        "Rewrite the expression without a repetition inside a repetition.",
    ),
    "E0041": Code(
        "two recipes with the same name",
        "Two of the recipes that are built together have the same name, and would write the same folder.",
        "Give one of them another name.",
    ),
}

SCHEMA: dict[str, Code] = {
    "E0101": Code(
        "unknown key",
        "The section has no such key. Keys are never ignored.",
        "Use the key that the message suggests, or remove it. `recipe schema` lists all keys.",
    ),
    "E0102": Code(
        "missing key",
        "A required key is missing: `recipe`, `name`, `model.id`, `mesh`, `data.train`, or one of the few "
        "required keys of list items.",
        "Add it.",
    ),
    "E0103": Code(
        "wrong type",
        "The value has the wrong type: text instead of a number, or a list instead of a single value.",
        "Write the value as the message says. In YAML 1.2 only true and false are booleans, and quotes turn "
        "a number into text.",
    ),
    "E0104": Code(
        "not one of the choices",
        "The key accepts one of a few words, and the value is not one of them.",
        "Use one of the words that the message lists.",
    ),
    "E0105": Code(
        "out of range",
        "The number is outside the range of the key.",
        "Choose a number in the range that the message gives.",
    ),
    "E0106": Code(
        "malformed value",
        "The text does not have the form that the key requires.",
        "Follow the form that the message shows.",
    ),
    "E0107": Code(
        "keys exclude each other",
        "Two keys set the same thing in two ways, such as `epochs` and `steps`.",
        "Keep one of them. If the other comes from an extended file, set it to null in this one.",
    ),
    "E0108": Code(
        "unknown version of the language",
        "The key `recipe` gives the version of the language. This compiler reads version 1.",
        "Write `recipe: 1`. If the recipe has a later version, update recipec.",
    ),
    "E0109": Code(
        "empty value",
        "A list, a mapping or a text that must not be empty is empty.",
        "Add an item.",
    ),
    "E0110": Code(
        "one of several keys is needed",
        "One of two keys is required, and neither is given: `accelerator` or `topology`, `epochs` or "
        "`steps`.",
        "Give one of them.",
    ),
    "E0111": Code(
        "given twice in a list",
        "A list that must not repeat an item contains one twice.",
        "Remove one of the two.",
    ),
}

MESH: dict[str, Code] = {
    "E0201": Code(
        "unknown accelerator",
        "The hardware catalog has no machine with that name or topology, or no slice of that size.",
        "Use a name or topology that the message lists. The number in v4-N, v5p-N and tpu7x-N counts "
        "TensorCores, two to a chip. In v5e-N and v6e-N it counts chips.",
    ),
    "E0202": Code(
        "mesh axes do not multiply to the devices",
        "The product of the axes differs from the number of devices. A v5p-8 has four chips and four "
        "devices.",
        "Choose axes whose product is the number of devices that the message gives.",
    ),
    "E0203": Code(
        "tp does not divide the heads",
        "tp splits attention heads and key/value heads over devices. Layers can differ: Gemma 4 31B has 16 "
        "key/value heads in its local layers and 4 in its global ones.",
        "Choose a tp that divides every number of heads, and put the remaining devices on fsdp. Or keep "
        "those weights whole with `sharding.on_indivisible: replicate`.",
    ),
    "W0203": Code(
        "heads are kept whole under tp",
        "tp does not divide the number of heads, and `on_indivisible: replicate` keeps a full copy of their "
        "weights on every device.",
        "Nothing, if this is intended. It costs memory and repeats work.",
    ),
    "E0204": Code(
        "axis does not divide a dimension",
        "The mesh axis cannot split a dimension of a parameter or an adapter evenly.",
        "Choose another size of the axis, or write `on_indivisible: replicate` under `sharding`.",
    ),
    "W0204": Code(
        "dimension is kept whole",
        "A mesh axis does not divide the dimension, and `on_indivisible: replicate` keeps a full copy on "
        "every device.",
        "Nothing, if this is intended.",
    ),
    "E0208": Code(
        "sharding rule matches nothing",
        "The rule's expression must match the whole path of a parameter, and it matches none.",
        "`recipe explain RECIPE mesh` lists the paths. Add `.*` at either end of the expression.",
    ),
    "E0209": Code(
        "sharding spec of the wrong length",
        "A spec needs one entry, an axis or null, for each dimension of the parameters that its rule "
        "matches.",
        "Give as many entries as the message says.",
    ),
    "E0211": Code(
        "axis twice in one spec",
        "One mesh axis can split only one dimension of an array.",
        "Write null for the other dimension.",
    ),
    "E0212": Code(
        "sharding rule never applies",
        "Earlier rules match all parameters of this rule, and the first matching rule is used.",
        "Move the rule up, or remove it.",
    ),
    "N0213": Code(
        "sharding rule changes nothing",
        "The rule repeats the model's default.",
        "Remove it.",
    ),
    "N0215": Code(
        "single key/value head under tp",
        "A single head cannot be split. Tunix keeps a full copy of its weight on every device of tp.",
        "Nothing. The weight is small.",
    ),
    "E0216": Code(
        "weights do not fit",
        "The base weights alone, split over this mesh, need more memory than a chip has.",
        "Use a larger slice, or split the weights over all of its devices.",
    ),
    "N0218": Code(
        "one sample at a time",
        "All devices share one sample (tp), although they could compute several (fsdp). tp exchanges "
        "activations in every layer.",
        "Put the devices on fsdp, as far as the global batch size allows.",
    ),
    "W0219": Code(
        "offloading on a CPU",
        "On a CPU there is no separate host memory to offload activations to. They are kept, as with "
        "save_dots.",
        "Write `remat.policy: save_dots`.",
    ),
    "E0222": Code(
        "ep without experts",
        "The mesh axis ep splits the experts of a layer over devices. The model has no experts, or, as Gemma "
        "4, none that it can split.",
        "Give its devices to fsdp, which splits the batch and the weights.",
    ),
    "E0223": Code(
        "flags of another TPU generation",
        "The `xla` profile contains flags that were published for one TPU generation, and the machine of the "
        "recipe belongs to another.",
        "Name the machine's own profile, or `none`.",
    ),
    "E0224": Code(
        "unknown flag of libtpu",
        "A run with a flag that libtpu does not know ends with an error at the start. The list comes from "
        "the pinned version.",
        "Correct the name, write it without dashes, or remove it.",
    ),
    "E0225": Code(
        "tokens that cannot be split",
        "The mesh axis cp splits the tokens of a row over devices. Layers with experts sort all tokens of a "
        "device, and layers that carry a state from token to token compute them in order. Neither can be "
        "split this way.",
        "Give its devices to fsdp, which splits the batch and the weights.",
    ),
    "N0226": Code(
        "rows are lengthened",
        "With cp, splash attention computes a row in two pieces for each device, and each piece in blocks of "
        "128 tokens. A row is padded to a multiple of these.",
        "Set `data.max_length` to a multiple of 256 times cp.",
    ),
    "N0227": Code(
        "LoRA with all of a v5p-8 on fsdp",
        "In marin-community/marin's issue 4903, DPO runs (rank 64, learning rate 1e-6) on this mesh stay at "
        "a loss of 0.66 after nine steps, and runs with fsdp 2 x tp 2 reach 0.27. The issue traces it to the "
        "order of a sum over the chips, which cancels in B's first gradient. Whether other runs are affected "
        "is not known.",
        "`probe.py` compares B's first gradients on both meshes. Use `lora.init: zero_a` or fsdp 2 x tp 2. "
        "`recipe plan --set 'mesh.axes={fsdp: 2, tp: 2}'` shows the cost.",
    ),
    "E0221": Code(
        "number of hosts does not fit the accelerator",
        "A slice has a fixed number of machines: Cloud TPU VMs, or on GKE machines with 4 chips. On a CPU, "
        "the processes must share the virtual devices evenly.",
        "Leave `mesh.hosts` out, or use a number that the message gives.",
    ),
}

LORA: dict[str, Code] = {
    "E0301": Code(
        "target is a Tunix name",
        "Tunix fuses projections (`kv_einsum`). Its names differ from layer to layer, so a regex of them "
        "silently skips layers: in Gemma 4 31B, the keys of 10 of 60 layers.",
        "Use Hugging Face's names: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.",
    ),
    "E0302": Code(
        "target matches nothing",
        "No projection of the model has that name, or the expression matches no complete module name.",
        "Use a name that the message lists. An expression must match a complete name such as "
        "`layers.7.self_attn.q_proj`, so it often starts with `.*`.",
    ),
    "E0303": Code(
        "target is not a regular expression",
        "A target that is not a plain name is read as a Python regular expression, and this one is "
        "malformed.",
        "Correct it, or name a projection.",
    ),
    "E0304": Code(
        "no such layer",
        "`lora.layers` names a layer that the model does not have.",
        "Use layers of the model. Layers count from 0.",
    ),
    "E0305": Code(
        "nothing is adapted",
        "None of the layers in `lora.layers` has any of the targets.",
        "Choose other layers or other targets.",
    ),
    "W0305": Code(
        "target in none of the chosen layers",
        "The layers in `lora.layers` do not have this projection.",
        "Choose other layers, or remove the target.",
    ),
    "W0306": Code(
        "target adds nothing",
        "Earlier targets already match all of its projections. In rank_pattern and alpha_pattern the first "
        "matching pattern is used, and earlier ones match all of this one's projections.",
        "Remove it, or move a pattern above the earlier ones.",
    ),
    "N0307": Code(
        "target not in every layer",
        "Some layers have no such projection. In the global layers of larger Gemma 4 models the keys are "
        "also the values, and there is no v_proj.",
        "Nothing. PEFT skips these layers too. Add k_proj to the targets to adapt them.",
    ),
    "W0308": Code(
        "adapters in bfloat16",
        "In bfloat16, adapters and Adam's moments lose small updates. Over 20 steps the loss drifts from a "
        "float32 run twice as far as with float32 adapters.",
        "Write `lora.dtype: float32`. The base stays bfloat16.",
    ),
    "N0309": Code(
        "key and value share A",
        "`kv: shared` is Qwix's layout of fused projections. PEFT trains a separate A for key and value.",
        "Write `kv: independent` to train the same adapters as PEFT.",
    ),
    "N0310": Code(
        "Qwix's initialization",
        "A starts within 2.4 times PEFT's bound.",
        "Write `init: peft` to compare runs with PEFT's.",
    ),
    "W0311": Code(
        "large alpha / rank",
        "The adapters' product is scaled by alpha / rank, and this value is far above the usual ones. If it "
        "was chosen for rsLoRA's alpha / sqrt(rank), it must be converted.",
        "Set alpha to the rank, or to twice the rank.",
    ),
    "W0312": Code(
        "rank larger than the weight",
        "An adapter of that rank has more numbers than the weight that it adapts.",
        "Use a smaller rank.",
    ),
    "E0313": Code(
        "pattern matches nothing",
        "A key of rank_pattern or alpha_pattern matches none of the adapted projections.",
        "Spell it as in `lora.targets`.",
    ),
    "E0314": Code(
        "shared A with different ranks",
        "`kv: shared` gives fused projections one A, and rank_pattern or alpha_pattern gives them different "
        "ranks or alphas.",
        "Write `kv: independent`.",
    ),
    "N0315": Code(
        "experts without adapters",
        "Most weights of a mixture of experts belong to the experts, and no target names them. LoRA adapts "
        "only attention and the dense block that every token passes through.",
        "Nothing, if this is enough. The target `experts` adapts them too, each expert with its own A and B. "
        "Without the `lora` section all weights are trained.",
    ),
    "E0316": Code(
        "dropout with experts",
        "Adapters of experts have no dropout, and neither have adapters of routers that are not linear "
        "layers in transformers. PEFT computes W + scale * B A for them, so A has no separate input to drop.",
        "Write `dropout: 0`.",
    ),
    "W0317": Code(
        "router adapter that PEFT cannot run",
        "In transformers, the router of some models (GLM 4.5, DeepSeek V3, MiniMax M2) is a parameter next "
        "to a correction that its block reads. PEFT wraps the module of an adapted parameter, and the block"
        " then no longer finds the correction. PEFT loads the adapter that merge.py writes, but cannot run "
        "it.",
        "Write `adapter: false` in `merge`, which writes only merged weights, or remove the target `router`.",
    ),
    "E0318": Code(
        "eight-bit products without eight-bit weights",
        "`products` multiplies weights that are stored in eight bits, and `quantize` does not store them so.",
        "Write `quantize: int8`, or `fp8` on TPU7x; or remove `products`.",
    ),
    "E0319": Code(
        "eight-bit products are not faster",
        "On this chip, products of that type are not faster than bfloat16 products. Activations would be "
        "rounded without any gain.",
        "Write `quantize: int8` on v5e, v5p and v6e, or `fp8` on TPU7x; or remove `products`.",
    ),
    "E0322": Code(
        "module that train_also cannot train",
        "train_also is for embeddings, the output head and norms. Projections, experts and routers get "
        "adapters instead. A model that uses its embedding as head has no lm_head.",
        "Use a name that the message lists, or remove `train_also`.",
    ),
    "N0323": Code(
        "embedding is also the output head",
        "The model uses its embedding as output head, so training one trains both. PEFT trains a copy of the "
        "embedding and keeps the head, unless ensure_weight_tying is set.",
        "Nothing, if this is intended.",
    ),
    "E0324": Code(
        "no tokenizer for the new tokens",
        "model.add_tokens changes the tokenizer files of the checkpoint, which merge.py writes with the "
        "merged weights. Another tokenizer is not changed, and a served adapter has no tokenizer of its own.",
        "Remove `model.tokenizer`, or write `serve: {weights: merged}`.",
    ),
    "E0326": Code(
        "row of the embedding that cannot be trained",
        "train_tokens names rows of the embedding. A row must exist, and be trained once: train_also may "
        "train the whole embedding instead. Texts are looked up in the tokenizer of the checkpoint, together "
        "with model.add_tokens.",
        "Use the line in the help.",
    ),
    "W0325": Code(
        "embeddings of new tokens are not trained",
        "A new token starts with an embedding row that was never trained, or with the mean of the other rows "
        "if `model.vocab_size` added it. Adapters of projections do not change it.",
        "Write `lora: {train_also: [embed_tokens, lm_head]}`.",
    ),
    "E0140": Code(
        "fewer rows than the checkpoint has",
        "`model.vocab_size` adds rows to the embedding and the head. It cannot remove rows.",
        "Use the number in the help, or write `vocab_size: null`.",
    ),
    "W0141": Code(
        "rows that no token has",
        "`model.vocab_size` adds rows, and neither `model.add_tokens` nor `model.tokenizer` adds a token "
        "for them. They take memory, and a share of each softmax.",
        "Add `model.add_tokens`, or remove `vocab_size`.",
    ),
    "E0142": Code(
        "model to which no rows are added",
        "Rows are added to the embedding and to the head. A model with another embedding for each layer "
        "has no row there for a new token. A model that no family describes is trained with "
        "transformers' code.",
        "Write `model.add_tokens` with the reserved tokens of the checkpoint that the new ones replace.",
    ),
    "E0143": Code(
        "new tokens without a row",
        "The tokenizer next to the recipe has a token for each row of the embedding, or nearly so. If the "
        "checkpoint is not next to the recipe, train.py checks it and reports the same.",
        "Use the `vocab_size` in the help, or name reserved tokens that the new ones replace.",
    ),
    "E0340": Code(
        "adapter to start from that does not fit",
        "lora.start_from names a PEFT adapter that cannot be read, or whose rank, alpha, rsLoRA, DoRA, "
        "modules, whole modules or shapes differ from the recipe's. The help has the lines of a recipe that "
        "trains exactly the adapter's modules.",
        "Use the lines in the help, or another adapter.",
    ),
    "W0341": Code(
        "adapter of another base",
        "adapter_config.json says that the adapter was trained on another model than `model.id`, or on "
        "another revision. Its A and B fit only the weights with which they were trained.",
        "Write that model as `model.id`. If both have the same weights, change nothing.",
    ),
    "W0342": Code(
        "adapter to start from is missing",
        "There is no such folder next to the recipe. The artifact is built nevertheless: train.py looks for "
        "the adapter, as for data, below the folder of --data-dir, and checks that it fits.",
        "Put the folder next to the recipe, or name an address.",
    ),
    "N0343": Code(
        "start of the adapters without effect",
        "`init` says how fresh adapters start, and `start_from` gives them other values.",
        "Remove one of the two.",
    ),
    "E0330": Code(
        "init cannot be combined with this",
        "pissa, olora and loftq give each linear layer its own A and B, whose product is a part of its "
        "weight. Experts are not linear layers in transformers. k_proj and v_proj share one A with kv: "
        "shared. No part of a weight has a higher rank than the weight. The reference model of an objective "
        "would lack that part. loftq corrects the rounding of nf4, and start_from sets other values.",
        "Change what the message names, or write `init: peft`.",
    ),
    "W0331": Code(
        "first values that take long to compute",
        "With pissa and loftq the largest singular values of each weight are computed when the run begins, "
        "on the host of process 0, while its accelerators wait. The figure is an estimate, from what one "
        "weight of 5,376 x 21,504 took a CPU core. A resumed run reads the computed values. With "
        "several hosts, RECIPEC_BARRIER_TIMEOUT has to give the other hosts that time.",
        "Write `init: pissa_niter_4` or `pissa_niter_16`, PEFT's iterations, which give nearly the same "
        "values; or `init: olora`, which takes seconds.",
    ),
    "E0321": Code(
        "DoRA cannot be combined with this",
        "DoRA scales the outputs of each projection to trained magnitudes. PEFT has no DoRA for experts and "
        "routers, and with dropout it also drops inputs of the frozen product. With quantized weights and "
        "pissa, olora or loftq, the norms would not be those of the stored weights. vLLM "
        "does not serve DoRA adapters.",
        "Change the key that the message names, or write `kind: lora`.",
    ),
    "E0320": Code(
        "eight-bit products with experts",
        "The products of experts are always computed in model.dtype, even if the weights are stored in eight "
        "bits.",
        "Remove `products`.",
    ),
}

DATA: dict[str, Code] = {
    "W0401": Code(
        "data file not found",
        "The recipe names a local file that does not exist. The artifact is the same, but warm-up, steps and "
        "padding could not be checked against the data.",
        "Put the file there, or name its folder with --data-dir of train.py.",
    ),
    "E0402": Code(
        "chat template cannot be read",
        "`data.chat_template` names a file that is missing, too large or not text.",
        "Correct the path. It is relative to the recipe's folder.",
    ),
    "E0403": Code(
        "tokenizer of another family",
        "The token ids of this tokenizer stand for other text than the checkpoint was trained on. No error "
        "occurs: the run trains on noise, or relearns the vocabulary.",
        "Leave `model.tokenizer` out.",
    ),
    "W0404": Code(
        "tokenizer is not in the catalog",
        "The compiler cannot tell whether this tokenizer fits the checkpoint.",
        "Leave `model.tokenizer` out, unless it was made for this checkpoint.",
    ),
    "E0405": Code(
        "no chat template",
        "The tokenizer of a base checkpoint has no chat template, and chat data needs one.",
        "Train the instruction-tuned checkpoint, or give `data.chat_template`.",
    ),
    "E0406": Code(
        "chat template of another family",
        "The template writes turn markers that the checkpoint was not trained with, such as Gemma 3's "
        "`<start_of_turn>` for Gemma 4, which uses `<|turn>`. Markers that are tokens of the checkpoint's "
        "tokenizer are allowed, and a model that is not tuned for chat can learn any markers.",
        "Leave `data.chat_template` out to use the checkpoint's template. If the checkpoint's own template "
        "is wrong, copy the one from the model's repository.",
    ),
    "W0406": Code(
        "chat template without the family's markers",
        "The template does not write the turn markers that the checkpoint was trained with.",
        "Leave `data.chat_template` out, unless another markup is intended.",
    ),
    "W0407": Code(
        "padded rows",
        "Without packing, each sample is padded to max_length, and the padding is computed too.",
        "Write `packing: true`, or use a smaller max_length.",
    ),
    "W0408": Code(
        "loss on every token",
        "With `loss_on: all` the model also learns to write the prompts, and the loss is not comparable with "
        "a run that trains on answers only.",
        "Write `loss_on: assistant`, or `completion` if the format has prompts.",
    ),
    "W0409": Code(
        "trained and evaluated on the same file",
        "The evaluation loss then says nothing about new samples.",
        "Hold out some samples.",
    ),
    "N0411": Code(
        "length is not a multiple of 128",
        "A TPU pads the last dimension to a multiple of 128, so the next multiple costs the same.",
        "Use the multiple that the message gives.",
    ),
    "E0413": Code(
        "field that the format does not have",
        "`data.fields` renames the columns of the format. For example, chat has messages, role and content.",
        "Use a column of the format as the key, and the source's name as the value.",
    ),
    "E0414": Code(
        "objective does not fit the format",
        "dpo, cpo and orpo train on preferences, and kto on unpaired_preference. sft trains on every other "
        "format.",
        "Change one of the two.",
    ),
    "E0415": Code(
        "loss_on does not fit the format",
        "Only conversations have assistant turns, and only prompts have completions.",
        "Leave `loss_on` out. Its default fits the format.",
    ),
    "E0416": Code(
        "transform cannot be used",
        "The file is missing, is not Python, or has no such function at its top level.",
        "Correct data.transform. Its form is file.py:function.",
    ),
    "E0417": Code(
        "unknown kind of data file",
        "The ending of a source's name decides how it is read, and this one is unknown.",
        "Rename the file, or convert it.",
    ),
    "E0418": Code(
        "split or configuration of a file",
        "Only Hugging Face data sets have splits and configurations.",
        "Remove the key.",
    ),
    "E0419": Code(
        "packed preferences",
        "An answer that is rated, alone or against another, has its own row.",
        "Write `packing: false`.",
    ),
    "E0420": Code(
        "two sources of evaluation data",
        "`data.eval` names samples to evaluate on, and `data.eval_fraction` holds out others.",
        "Remove one of the two.",
    ),
    "W0421": Code(
        "eval_seed without effect",
        "eval_seed decides which samples `data.eval_fraction` holds out, and no samples are held out.",
        "Remove the line, or give `data.eval_fraction`.",
    ),
    "E0422": Code(
        "no sample left to train on",
        "`data.eval_fraction` holds out that share of the samples, rounded up. Here this is all of them.",
        "Use a smaller share or more samples.",
    ),
    "E0423": Code(
        "too many samples contain unused content",
        "More than data.max_invalid_ratio of the samples contain something that is not read or that the chat "
        "template does not write: tool calls, tools, reasoning, pictures, a system prompt next to messages.",
        "Use a template that writes it, or remove it with `data.transform`.",
    ),
    "E0424": Code(
        "preferences with labels (KTO)",
        "Rows with a prompt, a completion and a label are KTO data. With `prompt_completion` the model would "
        "also learn the undesirable answers.",
        "Write `format: unpaired_preference` with `objective: kto`, or keep only the desirable answers with "
        "a `data.transform`.",
    ),
    "E0425": Code(
        "data is not a regular file",
        "Reading a pipe waits until a process writes to it, and a device such as /dev/zero has no end. Data "
        "is read more than once: it is counted, hashed and tokenized.",
        "Write the output into a file, and name that file.",
    ),
    "E0450": Code(
        "preferences mixed with other samples",
        "Some sources contain preferences and others do not, or preferences of another format. An objective "
        "trains on one kind.",
        "Train on the two kinds one after the other, with two recipes.",
    ),
    "W0451": Code(
        "reasoning without effect",
        "Every source has the format text, which has no assistant turns.",
        "Remove `data.reasoning`.",
    ),
    "E0452": Code(
        "template does not support empty reasoning",
        "`data.reasoning: empty` trains answers after the prompt that switches thinking off with the "
        "template variable enable_thinking. This template does not read that variable.",
        "Write `reasoning: drop`, or use a template that reads it.",
    ),
    "E0453": Code(
        "curriculum with packed rows",
        "Packing fills every row with several samples, so no row is shorter than another.",
        "Write `packing: false`.",
    ),
    "E0454": Code(
        "temperature together with weights",
        "`data.temperature` computes the sources' weights from their sizes.",
        "Remove `data.temperature`, or every `weight`.",
    ),
    "W0455": Code(
        "temperature without effect",
        "There is only one source, so all its samples are used at any temperature.",
        "Remove `data.temperature`.",
    ),
    "E0460": Code(
        "epochs of a stream",
        "`data.stream_window` reads the training data during the run. The steps of an epoch are known only "
        "at its end, but the learning rate's schedule needs them at the start.",
        "Write `train.steps` instead of `train.epochs`. The data is repeated as often as the steps need.",
    ),
    "E0461": Code(
        "a stream that would have to be counted",
        "`data.eval_fraction`, `data.temperature` and `data.curriculum` need the number or the lengths of "
        "all samples. A stream is not read completely before the run.",
        "Write `data.eval` with another file and a `weight` at each source, or remove `data.stream_window`.",
    ),
    "E0462": Code(
        "a part of a split in a stream",
        "A split such as train[:10%] needs the number of the split's samples, which a stream does not have.",
        "Name the whole split, and set `limit` to the number of its first samples to use.",
    ),
    "N0463": Code(
        "a stream of several sources without weights",
        "Without a stream every sample of every source is drawn once an epoch. A stream does not "
        "know the sources' sizes: it draws only by the weights, which are 1 by default, and starts a source "
        "again when it ends.",
        "Give each source a `weight`, in proportion to the samples to draw from it.",
    ),
    "W0430": Code(
        "some samples contain unused content",
        "Some of the local samples contain something that is not read or that the chat template does not "
        "write. `recipe preview` counts all of them.",
        "Use a template that writes it, or remove it with `data.transform`.",
    ),
    "E0440": Code(
        "nothing is evaluated",
        "`train.early_stopping` and `checkpoint.keep_best` need the evaluation loss, and `train.samples` are "
        "written at evaluations. The recipe has no evaluation data.",
        "Add `data.eval` or `data.eval_fraction`.",
    ),
    "W0441": Code(
        "early stopping can never apply",
        "The first evaluation counts as progress. The run ends before `patience` more evaluations without "
        "progress are possible.",
        "Evaluate more often with `train.eval_every`, or use a smaller patience.",
    ),
    "E0431": Code(
        "loss of another objective",
        "Each objective has its own values of `loss_type`: sft learns to write texts, dpo compares with a "
        "reference model, cpo has none, and kto rates single answers.",
        "Use another `loss_type`, or the objective that has this one.",
    ),
    "E0432": Code(
        "label_smoothing with a loss that has none",
        "With preferences, only the logistic losses can assume that a share of the labels is wrong. With "
        "sft, only nll can spread a target over the vocabulary.",
        "Remove it, or write `loss_type: sigmoid` or `robust`, for sft `loss_type: nll`.",
    ),
    "E0720": Code(
        "answers without a label",
        "In the format unpaired_preference, `label` says whether the answer is desirable: true or false, in "
        "CSV as text.",
        "Name the column with `data.fields`, or make it with a `data.transform`.",
    ),
    "W0721": Code(
        "answers of only one kind",
        "KTO compares desirable answers with undesirable ones. With only one kind the model only moves "
        "toward it, or away from it.",
        "Add answers of the other kind, or learn the desirable ones with `objective: sft`.",
    ),
    "E0722": Code(
        "nothing to pair an answer with",
        "The loss kto estimates the distance from the reference with prompts and the answers of other "
        "rows of the same device. A single row has only its own answer, which TRL refuses too.",
        "Write `micro_batch_size: 2` or more, or `loss_type: apo_zero_unpaired`, which estimates nothing.",
    ),
    "N0723": Code(
        "weights of the two kinds of answers",
        "desirable_weight times the desirable answers should be 1 to 4/3 of undesirable_weight times the "
        "others (Ethayarajh et al. 2024, eq. 8; TRL warns as well).",
        "Use one of the two weights that the message gives.",
    ),
}

TRAIN: dict[str, Code] = {
    "E0501": Code(
        "global batch is not whole micro-batches",
        "An optimizer step consists of whole micro-batches. Each has micro_batch_size rows on every "
        "data-parallel device (dcn x fsdp x ep).",
        "Make global_batch_size a multiple of micro_batch_size x dcn x fsdp x ep.",
    ),
    "W0502": Code(
        "warm-up as long as the run",
        "The learning rate rises until the run ends, and never reaches its peak.",
        "Use fewer warmup_steps, or a warmup_ratio.",
    ),
    "W0503": Code(
        "warm-up takes more than half of the run",
        "For most of the run the learning rate is below its peak.",
        "Use a smaller warm-up. A warmup_ratio of 0.05 is usual.",
    ),
    "W0504": Code(
        "no checkpoint before the end",
        "The run is shorter than checkpoint.every_steps. If it is interrupted, it starts over.",
        "Use a smaller every_steps.",
    ),
    "E0505": Code(
        "checkpoints and merged model in one folder",
        "checkpoint.directory and merge.output are the same folder, or one is inside the other.",
        "Use two separate folders.",
    ),
    "N0506": Code(
        "no evaluation before the end",
        "The run is shorter than train.eval_every.",
        "Use a smaller eval_every.",
    ),
    "W0507": Code(
        "very high learning rate",
        "The size of AdamW's and Lion's steps is the learning rate, and training diverges with such a peak.",
        "Write `learning_rate: 1.0e-4`. Values from 1.0e-5 to 1.0e-3 are usual.",
    ),
    "W0508": Code(
        "final_ratio has no effect",
        "A constant schedule stays at its peak.",
        "Remove it, or use the schedule cosine or linear.",
    ),
    "N0509": Code(
        "merged in float32",
        "The merged checkpoint is twice the size of the base, and the server still computes in bfloat16.",
        "Write `merge.dtype: bfloat16`.",
    ),
    "W0510": Code(
        "optimizer key without effect",
        "The optimizer has no such hyperparameter.",
        "Remove it, or choose an optimizer that has it.",
    ),
    "W0511": Code(
        "key of another objective or loss",
        "beta, loss_type, label_smoothing, z_loss, neftune_noise_alpha, simpo_gamma, cpo_alpha, eaft_alpha, "
        "eaft_top_k, eaft_entropy, asft_alpha, desirable_weight and undesirable_weight each belong to "
        "certain objectives or losses, which this recipe does not use.",
        "Remove it.",
    ),
    "W0513": Code(
        "fewer than 50 optimizer steps",
        "Packing puts several samples into a row, and a step takes global_batch_size rows. A small data set "
        "gives so few steps that the weights hardly change.",
        "Use more samples, more epochs, a smaller global_batch_size or a smaller max_length.",
    ),
    "E0514": Code(
        "load-balancing loss is not defined for this model",
        "The loss spreads tokens over the experts of a softmax router, as transformers defines it. Models "
        "without experts have no router. transformers defines no such loss for Gemma 4 and for sigmoid "
        "routers such as GLM 4's and Llama 4's. TRL cannot compute it for models that do not return router "
        "logits.",
        "Remove `router_aux_loss_coef`, or build for another backend.",
    ),
    "E0515": Code(
        "train.only with adapters",
        "`train.only` is for full fine-tuning. Adapters have their own keys.",
        "Use `lora.targets`, `lora.layers` and `lora.train_also`, or remove the `lora` section.",
    ),
    "E0516": Code(
        "name that matches nothing",
        "An entry of `train.only` is a module's name, the end of one after a dot, or a regular expression "
        "that matches a whole name.",
        "Use a name like those in the help.",
    ),
    "E0517": Code(
        "part of an array",
        "The model keeps several modules in one array, which is trained as a whole.",
        "Name all modules of the array, or none.",
    ),
    "E0518": Code(
        "group that does not divide the inputs",
        "`train.qat` rounds weights in groups of `group_size` inputs, and every projection that it rounds "
        "needs whole groups. torchao leaves out projections without whole groups, or stops. mxfp4 has blocks "
        "of 32.",
        "Use a group_size that divides all inputs, as the help says.",
    ),
    "E0519": Code(
        "quantization-aware training with something else",
        "`train.qat` rounds the weights of a model in bfloat16 or float32, for supervised fine-tuning of all "
        "weights or of plain LoRA. Weights that are stored quantized are rounded already. With DoRA, with "
        "adapters that start from the base's weights, and with other objectives, no tool defines what is "
        "rounded. With adapters the output head is frozen and not rounded. mxfp4 rounds weights and "
        "activations, or neither.",
        "Remove one of the two.",
    ),
    "E0520": Code(
        "quantization-aware training of this model",
        "`train.qat` rounds the linear layers of attention and of dense feed-forward blocks. Experts, "
        "layers that carry a state from token to token, and the inputs that Gemma 4 E2B and E4B give each "
        "layer have other weights, and a model without a family has no description of its layers.",
        "Remove `qat`, or use a dense model.",
    ),
    "W0521": Code(
        "rounding that never begins",
        "The run has no more steps than `train.qat.start_step`.",
        "Use a smaller start_step.",
    ),
    "W0522": Code(
        "quantized in another way than trained",
        "`train.qat` makes the weights robust against rounding to 4 bits in groups. `merge.quantization` "
        "writes 8 bits with one scale for each output.",
        "Write `merge.quantization: null`, and quantize the merged checkpoint with a tool that has the "
        "format that was trained for.",
    ),
    "E0523": Code(
        "muon with adapters or experts",
        "Muon orthogonalizes the updates of a model's matrices. Whether it also does so for A and B of "
        "adapters depends on the tool. For experts it depends on the version of transformers, in which they "
        "are matrices or one array.",
        "Write `name: adamw`, or remove the section lora.",
    ),
    "E0512": Code(
        "adapter requested for full fine-tuning",
        "Without a lora section there is no adapter to write.",
        "Write `adapter: false`.",
    ),
}

SERVE: dict[str, Code] = {
    "E0601": Code(
        "unknown serving accelerator",
        "The hardware catalog has no machine with that name, or it is not a TPU.",
        "Use a name that the message lists.",
    ),
    "E0602": Code(
        "more devices than the accelerator has",
        "tensor_parallel_size x data_parallel_size is larger than the number of devices.",
        "Use the sizes that the message gives.",
    ),
    "W0602": Code(
        "idle devices",
        "tensor_parallel_size x data_parallel_size leaves devices of the accelerator unused, and you pay for "
        "them.",
        "Use the sizes that the message gives, or a smaller accelerator.",
    ),
    "E0603": Code(
        "no fp8 key/value cache",
        "This chip generation has no fp8. On v5e, vllm-tpu accepts the flag but keeps a bfloat16 cache "
        "(tpu-inference issue 3126).",
        "Write `kv_cache_dtype: auto`, or use v6e or tpu7x.",
    ),
    "E0604": Code(
        "no fp8 weights",
        "This chip generation has no fp8. fp8 models do not run on v5e (tpu-inference issue 1262). With "
        "`weights: adapter`, the base is served as it is published, which may be in FP8.",
        "Write `quantization: null` in serve or merge, or `weights: merged`, or use v6e or tpu7x.",
    ),
    "E0605": Code(
        "fewer tokens than requests in a step",
        "vLLM refuses a max_num_batched_tokens below max_num_seqs.",
        "Use a larger max_num_batched_tokens.",
    ),
    "E0606": Code(
        "tensor_parallel_size does not divide the heads",
        "vLLM refuses this size.",
        "Use a size that the message gives.",
    ),
    "N0607": Code(
        "fewer key/value heads than tensor_parallel_size",
        "Every device stores one head, and several devices store the same one. For Gemma 4 31B at 8, an fp8 "
        "cache saves nothing in the 10 global layers. The bytes of a token are estimated from shapes.",
        "Nothing, or use a smaller tensor_parallel_size with data_parallel_size.",
    ),
    "E0608": Code(
        "weights do not fit",
        "The weights need more than the share of memory that vLLM uses.",
        "Use a larger tensor_parallel_size or accelerator.",
    ),
    "N0609": Code(
        "experimental generation",
        "tpu-inference's compatibility table calls v3, v4 and v5p experimental.",
        "Use v5e, v6e or tpu7x.",
    ),
    "W0609": Code(
        "generation without an attention kernel",
        "tpu-inference 0.32 has block sizes only for v5, v6 and v7, and raises an error on v4.",
        "Use v5e, v6e or tpu7x.",
    ),
    "E0610": Code(
        "prompt does not fit one step",
        "Chunked prefill is off and max_num_batched_tokens is below max_model_len. vLLM refuses this.",
        "Use a larger max_num_batched_tokens, or chunked prefill.",
    ),
    "W0611": Code(
        "more tokens in a step than requests can fill",
        "max_num_batched_tokens exceeds max_model_len x max_num_seqs. This wastes memory and compiled "
        "shapes.",
        "Use a smaller max_num_batched_tokens.",
    ),
    "E0612": Code(
        "malformed image digest",
        "A digest is sha256: and 64 hexadecimal digits.",
        "Copy the digest from the registry.",
    ),
    "W0613": Code(
        "image can change",
        "An image without a tag, or with a tag such as latest, changes over time.",
        "Pin the image by digest.",
    ),
    "N0614": Code(
        "image is not pinned by digest",
        "The publisher can move a tag to another image.",
        "Pin the image as `name@sha256:...`",
    ),
    "E0615": Code(
        "malformed flag",
        "A key of extra_args does not have the form of a flag of `vllm serve`.",
        "Write it in lower case, with words joined by - or _, and without leading dashes.",
    ),
    "E0616": Code(
        "flag that another key sets",
        "A key of extra_args repeats a flag that another key of the serve section sets.",
        "Set the other key.",
    ),
    "W0617": Code(
        "serves less than it was trained on",
        "max_model_len is below data.max_length.",
        "Use a larger max_model_len.",
    ),
    "E0618": Code(
        "malformed environment variable",
        "A key of serve.env is not a valid variable name, or its value contains a line break or control "
        "character.",
        "Use letters, digits and underscores in names, and one line for each value.",
    ),
    "W0619": Code(
        "tool-call parser of another family",
        "vLLM accepts any parser name. A parser for another markup finds no tool calls.",
        "Use the parser that the message names.",
    ),
    "E0620": Code(
        "quantized twice",
        "merge.quantization writes weights that name their own quantization. vLLM refuses a second one from "
        "a flag.",
        "Use only one of serve.quantization and merge.quantization.",
    ),
    "E0621": Code(
        "quantized weights that the server cannot run",
        "tpu-inference's JAX model of the family does not run this format. It does not implement int8, and "
        "some of its models do not read scales.",
        "Use the format that the message names, `quantization: null`, or vLLM's own model with "
        "MODEL_IMPL_TYPE.",
    ),
    "N0622": Code(
        "quantized weights that are untested",
        "The server runs vLLM's own model on torchax. Its source code supports the format, but it was not "
        "tested.",
        "Nothing.",
    ),
    "E0623": Code(
        "unknown flag",
        "`vllm serve` of the pinned version has no such flag. The flags come from its own parser "
        "(compiler/data/vllm.json). The version in an image cannot be read from its tag.",
        "Use the flag that the message suggests, or remove it.",
    ),
    "E0624": Code(
        "abbreviated flag",
        "vLLM's parser accepts the beginning of a flag's name, as long as no other flag begins the same way.",
        "Write the full name.",
    ),
    "E0625": Code(
        "value that vLLM refuses",
        "The flag has another type, accepts only a few words, or takes one value, or none, instead of "
        "several.",
        "Use a value as the message says. true and false give --NAME and --no-NAME.",
    ),
    "E0626": Code(
        "key that a configuration does not have",
        "A key of a mapping, or a key after a dot in a flag's name, does not exist in that configuration of "
        "vLLM.",
        "Use the key that the message suggests.",
    ),
    "E0627": Code(
        "flag given twice",
        "Two keys of extra_args are the same flag: spelled with - and with _, through an alias, or with "
        "--no-. vLLM silently uses the last one.",
        "Remove one of them.",
    ),
    "E0629": Code(
        "untrusted model code",
        "The flag or variable makes the server run code that is not part of vLLM: code from the weights' "
        "repository (trust_remote_code), a plugin, a class given by name, or a preloaded library. Or it "
        "makes the server send its token to an address other than the hub's, or accept requests without a "
        "key.",
        "Leave it out. Put your own code into your own image, and name that in serve.image.",
    ),
    "E0630": Code(
        "flag that the artifact does not support",
        "With this flag the health check, the client scripts or the container no longer fit the server.",
        "Leave it out.",
    ),
    "E0631": Code(
        "unknown parser",
        "The pinned vLLM has no tool-call or reasoning parser with that name. It starts anyway, and requests "
        "then fail or find nothing.",
        "Use the name that the message suggests.",
    ),
    "W0632": Code(
        "unknown environment variable of the server",
        "The name of a variable in serve.env looks like one of vLLM's or tpu-inference's, but neither reads "
        "it.",
        "Use the name that the message suggests.",
    ),
    "N0633": Code(
        "server accepts connections from other machines",
        "serve.host is not a loopback address. compose.yaml, serve.sh and k8s.yaml then refuse to start "
        "without VLLM_API_KEY.",
        "Set VLLM_API_KEY where the server runs, or write `host: 127.0.0.1`.",
    ),
    "E0634": Code(
        "key/value cache too small for one sequence",
        "The memory that the weights leave free cannot hold one sequence of max_model_len, by the estimate. "
        "vLLM does not start.",
        "Use a smaller max_model_len, or a larger tensor_parallel_size or accelerator.",
    ),
    "N0635": Code(
        "large decode blocks",
        "The decode kernel skips blocks before a sliding window, but by default a block is (nearly) the "
        "whole context. Smaller blocks compile. Their times are estimates.",
        "Write `decode_block_sizes: [1, 1024, 1, 1024]`, and measure it with serve/bench.sh.",
    ),
    "E0636": Code(
        "block sizes that the decode kernel refuses",
        "The kernel needs four positive numbers: sizes that divide evenly into blocks, and blocks of whole "
        "cache pages.",
        "Use the sizes that the message gives.",
    ),
    "W0637": Code(
        "block sizes without effect",
        "Blocks of that size are never skipped, or the server runs a kernel without these sizes.",
        "Write `decode_block_sizes: null`.",
    ),
    "E0638": Code(
        "variable that another key sets",
        "serve.env repeats a setting of another key of the serve section.",
        "Set the other key.",
    ),
    "E0639": Code(
        "minimum of replicas above the maximum",
        "autoscaling.min_replicas is above max_replicas.",
        "Swap the two values.",
    ),
    "W0640": Code(
        "benchmark beyond max_model_len",
        "A prompt and its answer together exceed the server's limit.",
        "Use smaller input_lengths or a smaller output_length, or a larger max_model_len.",
    ),
    "E0641": Code(
        "a video does not fit one step",
        "Gemma 4's media are processed in one piece (--disable-chunked-mm-input), and max_num_batched_tokens "
        "is below the tokens of a video. vLLM refuses this.",
        "Use a larger max_num_batched_tokens, or limit_mm_per_prompt in serve.extra_args.",
    ),
    "E0642": Code(
        "malformed location of the weights",
        "serve.model is not a folder, gs:// address or Hugging Face id that every tool reads the same way.",
        "Use one of the forms that the message lists.",
    ),
    "W0643": Code(
        "serve.model may name the wrong weights",
        "serve.model names the base although merged weights are served, or names weights that are not the "
        "adapter's base.",
        "Write `model: null`, which uses the weights that fit serve.weights.",
    ),
    "N0643": Code(
        "merged weights on the hub",
        "serve.model is a Hugging Face id. Merging writes a folder, which you must upload there.",
        "Nothing, if it was uploaded. A folder starts with ./ or /.",
    ),
    "E0644": Code(
        "no adapter to serve",
        "serve.weights is adapter, but the recipe does not train or write one.",
        "Add a lora section and `merge.adapter: true`, or write `weights: merged`.",
    ),
    "E0645": Code(
        "adapters cannot be served for this model",
        "The JAX models of tpu-inference 0.32 have no code for LoRA, and the server ends during warm-up. "
        "vLLM's own models, which run on torchax, have it (compiler/data/vllm_features.json names the "
        "sources).",
        "Write `weights: merged`, or `MODEL_IMPL_TYPE: vllm` in serve.env.",
    ),
    "E0646": Code(
        "rank too large for the server",
        "--max-lora-rank accepts a few sizes, and the recipe's largest rank, including rank_pattern, is "
        "above the largest of them.",
        "Use smaller ranks, or write `weights: merged`.",
    ),
    "N0647": Code(
        "adapter not tested on a TPU",
        "By its source code, vLLM's own model supports the adapter. This was tested on a CPU, not on a TPU.",
        "Nothing.",
    ),
    "E0648": Code(
        "adapter with several replicas in one process",
        "tpu-inference refuses LoRA if one process runs several replicas.",
        "Remove TPU_MULTIPROCESS_DP. `vllm serve` then runs each replica in its own process.",
    ),
    "W0648": Code(
        "structured outputs with several replicas in one process",
        "tpu-inference does not support structured outputs if one process runs several replicas.",
        "Remove TPU_MULTIPROCESS_DP.",
    ),
    "E0649": Code(
        "option of another structured-outputs backend",
        "disable_any_whitespace works only with xgrammar and guidance, and disable_additional_properties "
        "only with guidance. vLLM refuses them with other backends.",
        "Use the backend that the message names.",
    ),
    "E0650": Code(
        "prompts that cannot be read",
        "evaluate.prompts names a UTF-8 file below the recipe's folder, which is copied into the artifact. "
        "The file is missing, empty or too large, or the value is an address.",
        "Correct the path, or copy the file there.",
    ),
    "E0651": Code(
        "malformed line of prompts",
        'Each line must be {"prompt": ..., "expected": ...} or {"messages": [...], "expected": ...}, and no '
        "two lines may ask the same.",
        "Correct the line that the message names.",
    ),
    "E0652": Code(
        "expected is not a regular expression",
        "Python's re module refuses the expression. In JSON, write each backslash twice.",
        "Correct the line that the message names.",
    ),
    "W0653": Code(
        "expected that matches any answer",
        "The expression also matches an empty answer, so every answer passes.",
        "Use an expression that a wrong answer does not match.",
    ),
    "W0654": Code(
        "several samples at temperature 0",
        "At temperature 0 the model always picks the likeliest token, so all samples of a prompt are the "
        "same and pass@k equals pass@1.",
        "Write samples: 1, or use a temperature above 0.",
    ),
    "E0655": Code(
        "answers as long as the context",
        "A prompt and an answer of evaluate.max_tokens together must fit serve.max_model_len. vLLM refuses "
        "the requests.",
        "Use a smaller max_tokens or a larger max_model_len.",
    ),
    "N0656": Code(
        "evaluation without a server",
        "eval.sh sends requests to the server that the serve section describes. Without that section it is "
        "not written.",
        "Add a serve section, or remove the evaluate section.",
    ),
    "E0657": Code(
        "malformed task name",
        "Names of lm-eval's tasks contain letters, digits and a few signs. A comma or a space separates "
        "several names.",
        "Write one name in each entry of evaluate.tasks.",
    ),
    "W0658": Code(
        "tasks that can crash the server",
        "If data.format has no turns, lm-eval asks for log probabilities of prompts in tasks that score "
        "given answers. tpu-inference then raises an error in its engine if the model is multimodal.",
        "Use tasks that generate their answers.",
    ),
    "W0659": Code(
        "requests can do more than query the model",
        "The flag or variable lets anyone who reaches the server do more than query the model: read files of "
        "the machine, make it fetch addresses, change the chat template, or use routes that need no key.",
        "Leave it out, or make sure that only you can reach the server.",
    ),
    "W0660": Code(
        "model that vLLM does not have",
        "Neither tpu-inference nor vLLM has a model of the class that config.json names in `architectures`. "
        "vLLM runs such a checkpoint with transformers' model, or not at all "
        "(compiler/data/vllm_features.json has the classes and names the sources).",
        "Test the server before you rely on it, or leave the serve section out.",
    ),
    "W0661": Code(
        "adapter on a quantized base",
        "The base's weights are stored quantized. Training reads them as bfloat16 and computes in bfloat16. "
        "The server loads them in their own format, and may quantize activations too.",
        "Use `weights: merged`, which serves the numbers that were trained. Or compare the answers first.",
    ),
}

PATHS: dict[str, Code] = {
    "E0701": Code(
        "reference to an environment variable",
        "The values of a recipe are written into the artifact, which is committed and copied. `${env:NAME}` "
        "could write a secret there, or make the artifact differ between machines.",
        "Write the value itself if it is not a secret. Otherwise remove it and set the variable where the "
        "artifact runs. vLLM and huggingface_hub read HF_TOKEN from their environment.",
    ),
    "E0702": Code(
        "looks like a secret",
        "The text has the form of an access token or a private key. A recipe is committed, and its values "
        "are copied into the artifact.",
        "Remove it, and revoke it if the file was shared. Set it in the environment where the artifact runs.",
    ),
    "E0703": Code(
        "variable that holds a secret",
        "The name of a variable in `serve.env` or of a flag in `serve.extra_args` looks like a secret "
        "(token, password, secret, key). Its value would be written into the artifact, and the list of "
        "processes would show a flag's value.",
        "Remove it, and set the variable that the message names where the server runs.",
    ),
    "E0704": Code(
        "path leaves the recipe's folder",
        "The path is absolute, starts with ~, or leaves the folder with `..`. An artifact can be copied to "
        "any machine, so all its inputs must be below the recipe's folder.",
        "Put the file below the recipe's folder, or use a gs:// address.",
    ),
    "E0705": Code(
        "output outside the run's folder",
        "checkpoint.directory, cache.directory or merge.output is absolute or leaves the folder with `..`. "
        "Or one of the first two is an address other than gs://.",
        "Use a relative folder. It is relative to --output of train.py and merge.py.",
    ),
    "E0706": Code(
        "output overwrites the artifact's files",
        "checkpoint.directory or merge.output is the artifact's folder itself, or one of its files or "
        "folders.",
        "Use another folder name.",
    ),
    "E0707": Code(
        "character with a special meaning",
        "A path, name or address contains a line break, another control character or a mark that changes the "
        "direction of text. It could end the comment or command that it is written into, or look like "
        "another name. The shell of the machine that fetches an output also reads the output's folder name.",
        "Write it without that character, and rename the file.",
    ),
    "E0708": Code(
        "link out of the recipe's folder",
        "A file that is copied into the artifact is a symbolic link, or is behind one, to a place outside of "
        "the recipe's folder. Any file of the machine could be copied this way.",
        "Put a copy of the file below the recipe's folder.",
    ),
    "E0709": Code(
        "name that Python would import",
        "The file would be next to train.py in the artifact, with the name of a module that the scripts "
        "import. Python would run it instead of the module, even if the recipe uses it as text or data.",
        "Use another name for the file or folder.",
    ),
    "E0710": Code(
        "name too long",
        "File systems allow names of at most 255 bytes. Buckets allow paths of at most 1,024 bytes, and "
        "longer ones leave no room for the folder that they are relative to.",
        "Use a shorter name.",
    ),
    "E0711": Code(
        "text that would be read as an option",
        "The text starts with `-`. Commands of the artifact take it as an argument, and would read it as an "
        "option.",
        "Use another name. A file can be written as ./NAME.",
    ),
    "E0712": Code(
        "incomplete address",
        "There is no bucket, host or data set after `://`, or `..` leads out of it.",
        "Write the whole address, such as gs://bucket/folder or hf://owner/name.",
    ),
    "E0713": Code(
        "local checkpoints in a system folder",
        "checkpoint.local.directory is / or is in a system folder such as /etc, /usr or /dev, possibly "
        "through `..`. Old checkpoints in this folder are deleted when newer ones are saved.",
        "Use a folder in memory below /dev/shm, or on an attached disk.",
    ),
}

MODEL: dict[str, Code] = {
    "E0801": Code(
        "model is not in the catalog",
        "The compiler needs the sizes of the model. The catalog has no such id, and neither has a folder "
        "models/OWNER--NAME next to the recipe.",
        "Use the id that the message suggests, or write ./ before a directory. `recipe models add` fetches "
        "the config.json and the list of tensors of another model.",
    ),
    "E0802": Code(
        "no readable config.json",
        "model.id is a directory, relative to the recipe's folder, without a readable config.json.",
        "Correct the path, or copy config.json there.",
    ),
    "E0803": Code(
        "checkpoint cannot be trained",
        "Its config.json asks for a feature that recipec's model of the family does not have. Training would "
        "be wrong without an error. For ids in the catalog, this is known from the family, or because a copy "
        "has quantized weights.",
        "Use another checkpoint. For a quantized copy, use its original.",
    ),
    "E0804": Code(
        "model in a bucket",
        "The compiler cannot read the config.json of a gs:// model.",
        "Use the Hugging Face id or a directory as model.id, and pass the address to train.py with --model.",
    ),
    "E0819": Code(
        "samples too long for sparse attention",
        "A token of this model sees the tokens that an indexer chooses, as many as config.json's index_topk. "
        "train.py computes dense attention, which is the same only in samples of at most that many tokens.",
        "Use a data.max_length of at most that many tokens.",
    ),
    "E0818": Code(
        "tensors are not known",
        "The headers of a folder's safetensors files cannot be read. Or these files are missing next to a "
        "config.json of no known family, for which they give the names and shapes of the tensors.",
        "Put the whole checkpoint into that folder, or use a model of one of the families.",
    ),
    "W0806": Code(
        "model key without effect",
        "A directory has no revisions, and attention dot has no blocks.",
        "Remove it.",
    ),
    "W0805": Code(
        "dropout of the model is not applied",
        "config.json asks for dropout within the model during training (attention_dropout and others), or "
        "for noise (router_jitter_noise). recipec does not apply it. Other libraries do.",
        "Use `lora.dropout` for dropout of the adapters' inputs.",
    ),
    "W0807": Code(
        "float32 on a TPU",
        "In float32, weights take twice the memory, and the TPU computes at a fraction of its bfloat16 rate. "
        "Tunix computes in float32 by default; artifacts always state the type.",
        "Write `model.dtype: bfloat16`.",
    ),
    "E0810": Code(
        "added model was changed",
        "`recipe models add` wrote a folder next to the recipe. One of its files is missing or differs from "
        "the lock file. The model that was checked may not be the one that is trained.",
        "Add the model again, or name the folder as a directory, which is used without a lock.",
    ),
    "E0811": Code(
        "tensor missing in the checkpoint",
        "The list of tensors from `recipe models add` lacks a tensor of the model, or has no text model at "
        "all. config.json and the weights belong to different models, or the tensors have other names than "
        "the family's.",
        "Use the model's original, or a checkpoint saved by transformers.",
    ),
    "E0812": Code(
        "tensor has another shape",
        "A tensor of the checkpoint does not have the shape that the keys of config.json in the message "
        "give.",
        "Use another revision or another checkpoint. config.json and the weights must belong together.",
    ),
    "E0813": Code(
        "checkpoint is stored quantized",
        "Its config.json, or the names and types of its tensors, are those of AWQ, GPTQ, bitsandbytes, "
        "compressed-tensors or another method that is not read. Of FP8, only the form with "
        "`weight_scale_inv` tensors and its quantization_config is read.",
        "Use the original. `lora.quantize` quantizes it during training.",
    ),
    "N0820": Code(
        "weights are read as bfloat16",
        "The checkpoint stores weights in FP8 with `weight_scale_inv`, or gpt-oss's experts in MXFP4. "
        "train.py and merge.py read them as the bfloat16 numbers that they represent, as transformers does "
        "with `dequantize=True`. The merged checkpoint has bfloat16 weights and no `quantization_config`.",
        "Nothing, if there is room. An unquantized original has more exact numbers. `merge.quantization` "
        "writes merged weights in eight bits.",
    ),
    "E0814": Code(
        "tensor of a layer that the model does not have",
        "The checkpoint has more layers than num_hidden_layers of its config.json.",
        "Use another revision or another checkpoint. config.json and the weights must belong together.",
    ),
    "E0815": Code(
        "revision differs from the added one",
        "model.revision is neither the revision with which the model was added next to the recipe nor its "
        "commit. The checkpoint that was checked would not be the one that is trained.",
        "Remove it, or add the model at that revision.",
    ),
    "W0816": Code(
        "added model differs from the catalog",
        "The config.json from `recipe models add` has other sizes than the catalog has for the id, or for "
        "the model of which it is a copy. The added one is used, because its weights are loaded.",
        "Nothing, if this is intended. Otherwise remove the folder, and the catalog is used.",
    ),
    "E0817": Code(
        "output head that is not supported",
        "The checkpoint has a separate output head, but the family's model uses the embedding as output "
        "head.",
        "Use a checkpoint without a separate output head, as published.",
    ),
}

UNAVAILABLE: dict[str, Code] = {
    "E0903": Code(
        "splash attention on a CPU",
        "The accelerator is a CPU, and splash attention is a TPU kernel.",
        "Write `attention: dot`.",
    ),
    "E0915": Code(
        "serving on several hosts",
        "The serving accelerator has several machines.",
        "Use a slice with one host.",
    ),
    "E0933": Code(
        "experts with TorchAX",
        "transformers' expert layers select rows depending on the data, which jax cannot compile.",
        "Use a dense model, or the backend tunix.",
    ),
    "N0934": Code(
        "rematerialization by layers with TorchAX",
        "`remat.policy: block` rematerializes attention and feed-forward blocks separately in Tunix. The "
        "TorchAX backend rematerializes whole layers.",
        "Nothing.",
    ),
    "N0935": Code(
        "sharding rules with TorchAX",
        "The rules name Tunix's arrays. Hugging Face's tensors join some dimensions of these arrays into "
        "one, which is split like the first of them.",
        "Nothing, if this is intended.",
    ),
    "N0936": Code(
        "Adafactor with TorchAX",
        "Adafactor keeps sums over an array's two largest dimensions, and Hugging Face's arrays have other "
        "shapes than Tunix's.",
        "Nothing.",
    ),
    "E0937": Code(
        "packed rows that transformers treats as one sample",
        "transformers' gated delta nets, Mamba mixers and short convolutions in torch ignore sample borders "
        "within a row. A sample would start from the state of the sample before it. Llama 4's chunks and its "
        "query scaling count from the first token of a row. train.py starts each sample anew.",
        "Write `data.packing: false`, or build without that `--backend`.",
    ),
    "E0957": Code(
        "state that transformers carries wrongly",
        "transformers 5.12's torch code of Nemotron-H sums over the wrong axis when it carries the state of "
        "a Mamba mixer from one chunk of tokens to the next. Its GPU kernels and train.py do not.",
        "Write a `data.max_length` of at most the model's chunk_size, or build without the `--backend`.",
    ),
    "E0938": Code(
        "eight-bit products with TorchAX",
        "The TorchAX backend computes with the dequantized numbers, in model.dtype.",
        "Remove `products`, or build without `--backend torchax`.",
    ),
    "E0939": Code(
        "split rows with TorchAX",
        "The TorchAX backend computes attention as transformers does, with all tokens of a row on one "
        "device.",
        "Give the devices of cp to fsdp, or build without `--backend torchax`.",
    ),
    "E0940": Code(
        "label smoothing, z-loss, eaft or asft with TRL",
        "They need the logits of the whole vocabulary. TRL's fused head returns only the log-probabilities "
        "of the targets.",
        "Write `0`, or `loss_type: nll` or `dft`, or build without `--backend trl`.",
    ),
    "E0941": Code(
        "embedding noise with TorchAX",
        "The TorchAX backend runs transformers' embedding without changes.",
        "Write `neftune_noise_alpha: null`, or build without `--backend torchax`.",
    ),
    "E0950": Code(
        "initial adapters from quantized weights with another backend",
        "pissa and olora take the adapters' part out of a weight before it is quantized. In TRL's run, "
        "bitsandbytes quantizes whole weights while it loads them. TorchAX stores nf4 in other blocks than "
        "train.py, and has no LoftQ.",
        "Write `init: peft` or `quantize: null`, or build without that `--backend`.",
    ),
    "E0942": Code(
        "DoRA with TorchAX",
        "The TorchAX backend adds A and B to transformers' projections, and does not scale their outputs.",
        "Write `kind: lora`, or build without `--backend torchax`.",
    ),
    "E0971": Code(
        "rows that another backend does not add",
        "`model.vocab_size` adds rows to the embedding and the head as train.py reads them. TRL and TorchAX "
        "train the checkpoint with its own rows, and no embedding in addition to adapters.",
        "Remove `vocab_size` and let `model.add_tokens` replace reserved tokens, or build without that "
        "`--backend`.",
    ),
    "E0970": Code(
        "start_from as a reference with another backend",
        "The objective compares with the model that training starts from. With `lora.start_from`, that is a "
        "copy of the adapter. Only train.py keeps such a copy: the other backends compare with the base "
        "without adapters, or with a second model.",
        "Use another objective, remove `start_from`, or build without that `--backend`.",
    ),
    "E0943": Code(
        "train_also or train_tokens with another backend",
        "With TRL, recipec trains only adapters and rows of the embedding; with TorchAX, only adapters.",
        "Write `train_also: []` or `train_tokens: []`, or build without that `--backend`.",
    ),
    "E0944": Code(
        "train.only with another backend",
        "The TorchAX backend trains all weights, or adapters.",
        "Remove `train.only`, or build without `--backend torchax`.",
    ),
    "E0955": Code(
        "actions at evaluations with TorchAX",
        "The TorchAX backend has its own training loop. It evaluates, but it does not stop early, keep the "
        "best checkpoint or write samples.",
        "Remove the line, or build without `--backend torchax`.",
    ),
    "E0956": Code(
        "best checkpoint or samples with TRL",
        "train_trl.py keeps the newest checkpoints, as transformers' Trainer does, and writes no samples.",
        "Remove the line, or build without `--backend trl`.",
    ),
    "E0958": Code(
        "quantization-aware training with another backend",
        "Only Tunix's train.py computes with rounded weights and activations.",
        "Remove `qat`, or build without that `--backend`.",
    ),
    "E0945": Code(
        "model that only TorchAX trains",
        "No family describes the model, so Tunix does not have it. Only transformers' own model can be "
        "trained.",
        "Use `recipe build --backend torchax`, and `--backend torchax` with other commands.",
    ),
    "N0946": Code(
        "model without a family",
        "No family describes the model. The TorchAX backend trains it with transformers' own code, with the "
        "limits that the message lists.",
        "Nothing, or use a model of one of the families.",
    ),
    "E0947": Code(
        "model that cannot be packed",
        "Samples that share a row are separated by their positions, in the attention mask. Layers that carry "
        "a state from token to token do not use this mask. Other models are packed only if all their layers "
        "are known to use it.",
        "Write `data.packing: false`.",
    ),
    "E0948": Code(
        "not available without a family",
        "For a model that no family describes, recipec trains only adapters, on weights in model.dtype, with "
        "transformers' own attention, on one host.",
        "Do what the help says, or use a model of one of the families.",
    ),
    "E0949": Code(
        "decoder of another name with TorchAX",
        "The TorchAX backend calls the decoder that transformers' classes hold as `model`. Older classes, "
        "such as GPT-NeoX's, hold it under another name.",
        "Build without `--backend torchax`.",
    ),
    "E0920": Code(
        "an optimizer that a backend lacks",
        "Neither torch nor transformers has the optimizer Lion, or a Muon that uses Adam for parameters that "
        "are not matrices. TorchAX lacks Muon too.",
        "Write `name: adamw`, or build without that `--backend`.",
    ),
    "E0922": Code(
        "shared A with PEFT",
        "The recipe is built for TRL or TorchAX, which train PEFT's adapters. PEFT gives each projection its "
        "own A, and `kv: shared` uses one for key and value.",
        "Write `kv: independent`, or build without that `--backend`.",
    ),
    "E0923": Code(
        "int8 with TRL",
        "The recipe is built for TRL. int8 of bitsandbytes quantizes activations as well as weights.",
        "Write `quantize: nf4`, or build without `--backend trl`.",
    ),
    "W0924": Code(
        "adafactor with TRL",
        "transformers' Adafactor factors the second moments of every matrix. train.py factors only those of "
        "large ones.",
        "Nothing, if the two runs need not be the same. Otherwise write `name: adamw`.",
    ),
    "E0925": Code(
        "expert adapters with TRL",
        "train_trl.py adapts linear layers with PEFT, and experts are not linear layers but parameters.",
        "Use only projections in `lora.targets`, or build without `--backend trl`.",
    ),
    "W0926": Code(
        "quantized experts with TRL",
        "`quantize: nf4` also quantizes a model's experts. bitsandbytes keeps them in model.dtype, because "
        "it supports only linear layers. The baseline takes more memory and trains on a different base.",
        "Nothing, if the two runs need not be the same. Otherwise remove `quantize`.",
    ),
}

PLAN: dict[str, Code] = {
    "E1001": Code(
        "the step does not fit",
        "By the compiler's result, the training step needs more memory than each device has.",
        "Use the change in the help, which was compiled and fits. `recipe plan --search` tries more.",
    ),
    "E1002": Code(
        "over the memory budget",
        "The step's share of each device's memory is above `budget.max_hbm_share`.",
        "Use a smaller micro-batch, more rematerialization, or a larger share.",
    ),
    "E1003": Code(
        "over the time budget",
        "The estimated training time is above `budget.max_hours`.",
        "Use a faster configuration (`recipe plan --search`), fewer steps, or more hours.",
    ),
    "E1004": Code(
        "over the cost budget",
        "The estimated cost of the training is above `budget.max_usd`.",
        "Use a cheaper configuration (`recipe plan --search`), fewer steps, or more US$.",
    ),
    "W1005": Code(
        "budget that cannot be checked",
        "The plan does not know the length of the run or the price of the machine, which the budget needs.",
        "Give `train.steps`, or put the data next to the recipe. Give `cost.train_usd_per_hour`.",
    ),
    "N1006": Code(
        "more sequences than the cache holds",
        "`serve.max_num_seqs` sequences of `serve.max_model_len` tokens do not fit the key/value cache at "
        "once. vLLM runs as many as fit, and delays the others.",
        "Nothing, if requests are shorter. Otherwise use a lower max_num_seqs or max_model_len.",
    ),
    "W1007": Code(
        "step did not fit when it was planned",
        "`recipe plan` compiled this step before, on this machine and with these versions. The step needs "
        "more memory than each device has. Flags that overlap weight gathers with computation keep more "
        "gathered weights in memory.",
        "`recipe plan` looks for a change that fits. Without the flags of `xla.profile` a step takes less "
        "memory.",
    ),
    "E1008": Code(
        "flag value that libtpu refuses",
        "libtpu has the flag, but the value has another type. libtpu reports this when it is loaded.",
        "Use a value of the flag's type.",
    ),
}

NOTEBOOK: dict[str, Code] = {
    "E1040": Code(
        "machine that no notebook has",
        "`recipe build --notebook` writes a notebook for the machine of the recipe. Colab has v5e-1 and "
        "v6e-1, Kaggle has v5e-8, and a recipe for virtual CPU devices runs anywhere.",
        "Use another `mesh.accelerator`, or leave --notebook out.",
    ),
    "E1041": Code(
        "notebook with a bucket",
        "A notebook session has no Google Cloud account, so it cannot read or write a bucket. Its results "
        "are kept in Drive, or as Kaggle's output.",
        "Use a folder instead of the bucket, or leave --notebook out.",
    ),
    "E1042": Code(
        "model that a notebook cannot download",
        "On Colab and Kaggle the model comes from the Hugging Face hub, but the recipe names a folder.",
        "Use the model's id on the hub, or leave --notebook out.",
    ),
}

PARITY: dict[str, Code] = {
    "E1050": Code(
        "fewer than two backends to compare",
        "`recipe parity` compares backends that run the same recipe. At most one of the requested backends "
        "can run this one. The others refuse it, or their packages are not installed.",
        "Name other backends, change the refused key, or install the missing packages.",
    ),
}

PORT: dict[str, Code] = {
    "E1101": Code(
        "unknown kind of config",
        "The file has none of the keys that identify a tool's config.",
        "Name a config of one of the tools that the message lists. `--from` names the tool if its config is "
        "unusual.",
    ),
    "E1102": Code(
        "file without a training run",
        "The file belongs to a run, but does not say what is trained: an accelerate or DeepSpeed config, an "
        "adapter_config.json, or a dataset_info.json.",
        "Name the config of the run before it, in the same command.",
    ),
    "E1103": Code(
        "tool of the config is unclear",
        "The file has keys of several tools, or two files belong to two tools.",
        "Name the tool with `--from`, or port one of the files.",
    ),
    "E1104": Code(
        "file of another tool",
        "A file belongs to another tool's config, such as a dataset_info.json next to an Axolotl config.",
        "Leave it out.",
    ),
    "E1105": Code(
        "not valid JSON",
        "The text breaks JSON's grammar at the place shown, so the tool cannot read it either.",
        "Correct it. JSON allows no comments, and no comma before a closing bracket.",
    ),
    "E1106": Code(
        "Jinja in a config",
        "A value is a Jinja expression, or the file is a Jinja template. A launcher fills it in, which a "
        "port does not run.",
        "Render the template, and port the result.",
    ),
    "E1107": Code(
        "value from the environment",
        "A value refers to an environment variable (`${NAME}`, `${oc.env:NAME}`), which is unknown here.",
        "Write the value instead.",
    ),
    "E1108": Code(
        "reference that cannot be followed",
        "A `${key}` of OmegaConf names a key that is not in the file, or refers to itself.",
        "Write the value instead.",
    ),
    "E1109": Code(
        "endless aliases",
        "A YAML alias is inside the value that it refers to, or nested aliases expand to millions of values.",
        "Write the values out.",
    ),
    "E1110": Code(
        "several runs",
        "There are two configs of one tool, two files of one kind, or a pipeline of stages. A recipe is one "
        "run.",
        "Port each stage separately. The `model.id` of each stage is the `merge.output` of the stage before "
        "it.",
    ),
    "E1111": Code(
        "no mesh fits the run",
        "The checks refused every arrangement of the accelerator's devices.",
        "Use another `--accelerator`.",
    ),
    "E1112": Code(
        "file exists already",
        "The file that `-o` or `--report` names exists already, is one of the ported files, or cannot be "
        "written.",
        "Name another file, or replace it with `--force`.",
    ),
    "E1113": Code(
        "not an exact port",
        "With `--strict` every key must have an exact counterpart, and some have none.",
        "The report lists them. Change the source, or port without `--strict`.",
    ),
    "W1114": Code(
        "unknown key",
        "The tool has no such key. It may refuse or ignore it. The port ignores it.",
        "Use the key that the message suggests, or remove it.",
    ),
    "W1115": Code(
        "key given twice in a config",
        "A section contains the same key twice. The tools use the last one, and so does the port.",
        "Remove one of the two.",
    ),
    "W1116": Code(
        "different number of rows in an optimizer step",
        "No mesh of the accelerator fits the source's global batch. The port rounds it up to one that fits.",
        "Use another `--accelerator`, or another batch size in the source.",
    ),
    "E1120": Code(
        "merge key with two values",
        "`<<` includes several mappings that give a key different values. PyYAML up to 6.0.3 uses the first "
        "value, as YAML specifies. PyYAML 6.0.4 uses the last.",
        "Remove the key from one of the mappings, or write the keys out instead of `<<`.",
    ),
    "E1117": Code(
        "file named twice",
        "The command names the same file twice.",
        "Name it once.",
    ),
    "W1119": Code(
        "additional file is not written",
        "The recipe needs a file next to it, such as the Python module of its `data.transform`.",
        "Give a file for the recipe with `-o`. The other files are written next to it.",
    ),
    "E1141": Code(
        "data set type without a counterpart",
        "A data set of the ported file has no type, an unknown type, or a type that no format of recipes "
        "covers.",
        "Convert the rows to messages, and name their type (`chat_template`). Or set `data` in the recipe "
        "that `--partial` writes.",
    ),
    "E1142": Code(
        "data sets of different forms",
        "The data sets of the ported file have rows that one recipe cannot mix: preferences and other rows, "
        "or packed texts and unpacked conversations.",
        "Convert them to one form, or train on them one after another.",
    ),
    "E1143": Code(
        "data set that cannot be read here",
        "The ported file names no data set, a data set of an unknown kind, or one in a place that a recipe "
        "cannot read.",
        "Copy it to a file or to the Hugging Face hub. Name that in the file, or with `--set` and the "
        "source's own key.",
    ),
    "E1144": Code(
        "key missing from a config",
        "A key for which the ported tool has no default is missing, such as the model, the optimizer or a "
        "rank.",
        "Add the key that the message names.",
    ),
    "E1145": Code(
        "keys that exclude each other",
        "The ported tool itself stops if these keys are given together, or if one is given without the "
        "other.",
        "Keep one of them, or change the other as the help says.",
    ),
    "E1146": Code(
        "quantized base without adapters",
        "A quantized base cannot be trained itself, and this file has no adapters. Or the base is stored "
        "with a quantization that recipes do not have.",
        "Train adapters, or do not quantize the base.",
    ),
    "E1147": Code(
        "unknown chat template",
        "The ported file names a chat template that is neither the model's own nor known here.",
        "Use the tokenizer's own template, or give the template as Jinja.",
    ),
    "E1148": Code(
        "no targets for adapters",
        "The ported file trains adapters but does not name the modules, and PEFT has no default for this "
        "model.",
        "Name the target modules.",
    ),
    "E1149": Code(
        "another kind of training",
        "The ported file uses a stage or a method that recipes do not have: reward models, reinforcement "
        "learning, distillation, or adapters other than LoRA.",
        "Port the supervised stage, or the preference stage (dpo, cpo, orpo, kto).",
    ),
    "E1150": Code(
        "images or sound",
        "The ported file trains on images, video or sound. The models here read only text.",
        "Train only on text.",
    ),
    "E1151": Code(
        "data set that is not in dataset_info.json",
        "LLaMA-Factory describes its data sets in a separate file. It is not among the files, or does not "
        "contain this name.",
        "Name dataset_info.json after the config, and correct the name of the data set.",
    ),
    "E1152": Code(
        "pre-training",
        "The ported file starts from new weights. A recipe fine-tunes the weights of a checkpoint.",
        "Start from a checkpoint, as the help says.",
    ),
    "E1160": Code(
        "value that the tool does not accept",
        "The value of a key has a type, range or word that the tool does not accept.",
        "Correct the value, or remove the key to use its default.",
    ),
    "E1161": Code(
        "DeepSpeed contradicts the trainer",
        "A DeepSpeed setting differs from the Trainer's setting. The tool would stop with an error.",
        "Write `auto` there, or the same number in both.",
    ),
    "E1162": Code(
        "devices that cannot be grouped",
        "The number of GPUs is not a multiple of the GPUs that share rows (tensor, context or sequence "
        "parallelism). The number of data-parallel devices and the global batch are therefore undefined.",
        "Give the number of GPUs that the run used with `--devices`.",
    ),
    "E1163": Code(
        "algorithm without a counterpart",
        "The source uses an optimizer, a schedule, a loss or a prompt style that recipes do not have, and "
        "none is close to it.",
        "Choose one of those that the message or the help names.",
    ),
    "E1164": Code(
        "targets without a counterpart",
        "The target modules match nothing that can carry an adapter, are not a regular expression, or depend "
        "on an unknown model.",
        "Name projections of the model, or all-linear.",
    ),
    "E1171": Code(
        "another script of TRL",
        "The file is for a TRL script that recipes have no counterpart for (GRPO, RLOO, reward models, "
        "distillation), or it has a key that the `--script` script does not have.",
        "Port the config of an SFT, DPO, CPO, ORPO or KTO run, or remove the key with `--set KEY=null`.",
    ),
    "E1172": Code(
        "TRL script is unclear",
        "Several scripts of TRL read such a file, or none has all of its keys. Each script trains "
        "differently.",
        "Name the script with `--script`: `sft`, `dpo`, `orpo`, `cpo` or `kto`.",
    ),
    "E1173": Code(
        "--script for another tool's file",
        "`--script` names a script of TRL, but the file belongs to another tool.",
        "Leave `--script` out.",
    ),
    "E1174": Code(
        "value known only at run time",
        "The port reads a script without running it. The value depends on an input, the environment, a "
        "download or a condition.",
        "Write the value instead, or give it with `--set KEY=VALUE`.",
    ),
    "E1175": Code(
        "script without a known trainer",
        "The script does not construct SFTTrainer, UnslothTrainer, DPOTrainer, ORPOTrainer, CPOTrainer, "
        "KTOTrainer or Trainer with a language model. It trains in its own loop, with another trainer or "
        "kind of model, or not at all.",
        "Port the script that constructs the trainer.",
    ),
    "E1176": Code(
        "script with several runs",
        "The script constructs several trainers, or one in a loop. A recipe is one run.",
        "Split the script into one for each run, and port each.",
    ),
    "E1177": Code(
        "training arguments outside the script",
        "The trainer's arguments are parsed from a command line or a file, or belong to a class that the "
        "script defines.",
        "Port the config file or the command with the values, or use the library's own class.",
    ),
    "W1178": Code(
        "function that must be copied by hand",
        "A function that changes or filters rows has no known form: a chat template over messages, a text "
        "template, a column.",
        "Write it into the file that the port puts next to the recipe. Until then a run stops with an error "
        "there.",
    ),
    "E1179": Code(
        "not valid Python",
        "The text breaks Python 3's grammar at the place shown, or the notebook has no cells.",
        "Correct it. 2to3 converts a script of Python 2.",
    ),
    "E1180": Code(
        "key that changes the result",
        "The source enables a feature that recipes do not have and that changes the trained model: another "
        "loss, other trained or initial parameters, another update, another model.",
        "Port the run without it, using `--set KEY=null` or `--partial`. A partial recipe names what is "
        "missing.",
    ),
    "E1181": Code(
        "several training commands",
        "The script runs more than one training command. A recipe is one run.",
        "Choose one with `--command N`. To chain stages, use the `merge.output` of one as the `model.id` of "
        "the next.",
    ),
    "E1182": Code(
        "no training command",
        "No command in the script is a training command of a known tool, or a launcher with a training "
        "script.",
        "Name the script that contains the command, or the tool's config.",
    ),
    "E1183": Code(
        "not valid shell syntax",
        "A quote, a bracket or a heredoc that starts at the place shown is not closed, or the file is not "
        "text.",
        "Close it. `bash -n SCRIPT` shows bash's own message.",
    ),
    "E1184": Code(
        "command with a custom script",
        "The command runs a training script that belongs to no tool. The meaning of its flags is defined in "
        "that script.",
        "Port the script itself. `--from trl` reads its flags as those of TRL's command line.",
    ),
    "E1185": Code(
        "config of a command not found",
        "The command names a config that is neither next to the script nor below the working folder, or "
        "whose name is known only at run time.",
        "Run `recipe port` in the folder where the script runs, or write the name out.",
    ),
    "W1186": Code(
        "part of a command is ignored",
        "A file of the launcher or of DeepSpeed that the command names does not exist, or a word of the "
        "command is not a flag. The rest is ported.",
        "Name the file on the command line, or give `--devices N`.",
    ),
    "E1187": Code(
        "path outside of the folders",
        "The command names a file outside of the script's folder and of the working folder. It is not "
        "opened.",
        "Copy the file next to the script, or name it on the command line.",
    ),
    "E1188": Code(
        "folder that cannot be ported this way",
        "The folder contains no run of a known tool, or an option applies to a single run only.",
        "Use `recipe port FOLDER -o RECIPES`, which ports each run of a folder into another folder.",
    ),
    "E1193": Code(
        "tool that is not supported",
        "The keys identify a tool whose files `recipe port` does not read. Read as another tool's file, it "
        "would become a different run.",
        "Start from a new recipe with `recipe new`. `--from` reads the file as one of a supported tool.",
    ),
    "E1198": Code(
        "value without a counterpart in the other tool",
        "With `recipe port --to`, the tool has no key for a value that affects the result, or the tool "
        "refuses the resulting config. The config would describe a different run.",
        "Change the value with `--set PATH=VALUE`, or use `--partial`. A partial config names what is "
        "missing.",
    ),
    "E1199": Code(
        "GPUs that cannot share a step",
        "The rows of an optimizer step stay those of the recipe, and the GPUs of `--devices` take equal "
        "shares of them.",
        "Use a number of GPUs that divides `train.global_batch_size`.",
    ),
    "W1194": Code(
        "old and new name of a key",
        "The file has a key by its old name and by its new name, with different values. Which one is used "
        "depends on the tool's version. The port uses the new name's value.",
        "Remove one of the two.",
    ),
    "W1168": Code(
        "format of the data was guessed",
        "The tool recognizes the format from the columns of the data set, which is not available here.",
        "Look at the data set, and set `data.format` and `data.loss_on` in the recipe.",
    ),
}

COMMANDS: dict[str, Code] = {
    "E1225": Code(
        "not a Weights & Biases project",
        "train.log.wandb_project is not a valid name for Weights & Biases: it contains one of `/ \\ # ? % "
        ":`, or more than 128 characters.",
        "Write only the name of the project. WANDB_ENTITY in the run's environment names its owner.",
    ),
    "E1226": Code(
        "API key instead of a project",
        "train.log.wandb_project looks like an API key of Weights & Biases, and recipes are kept in git.",
        "Name the project, and set the key in the run's environment.",
    ),
}

LAUNCH: dict[str, Code] = {
    "E1301": Code(
        "checkpoints on separate host disks",
        "Several hosts write a checkpoint together, each its own part. checkpoint.directory is a folder on "
        "their own disks, so no host would have a complete checkpoint.",
        "Use a gs:// address, which all hosts can reach.",
    ),
    "E1302": Code(
        "launcher that does not fit",
        "launch.kind names a launcher that cannot create these machines, or that would restart a run on a "
        "machine without its checkpoints.",
        "Do what the help says, or leave launch.kind out to get every launcher that fits.",
    ),
    "W1303": Code(
        "checkpoints on the disk of a spot VM",
        "When Google Cloud takes a spot VM away, its disk is lost. A run with its checkpoints there starts "
        "over.",
        "Use a gs:// address in checkpoint.directory.",
    ),
    "E1304": Code(
        "spot capacity with a reservation",
        "Capacity is either reserved or spot. Google Cloud refuses a request for both.",
        "Keep one of the two.",
    ),
    "N1305": Code(
        "launch key without effect",
        "None of the recipe's launchers reads this key of the launch section.",
        "Nothing, or remove the key.",
    ),
    "E1316": Code(
        "local checkpoints not more frequent than shared ones",
        "checkpoint.local saves on the hosts' own disks between the checkpoints of checkpoint.directory. "
        "With its every_steps there are none in between.",
        "Use a smaller checkpoint.local.every_steps, or leave checkpoint.local out.",
    ),
}

RETIRED = (
    *("E0412", "E0805", "E0901", "E0904", "E0905", "E0906", "E0907", "E0908", "E0909", "E0910", "E0913"),
    *("E0911", "E0912", "N0916", "E0917", "N0918", "E0919"),
    *("E0628", "E0932", "E1165", "E1166", "E1167", "E1169", "E1170"),
    *("E1235", "E1236", "N1237"),
)
"""Codes of earlier versions that are no longer given. None of them is used again."""

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
    """Return the anchor of a code's heading on its page, as Markdown readers derive it."""
    title = re.sub(r"[^\w\s-]", "", f"{code}: {CODES[code].title}".lower())
    return re.sub(r"[-\s]+", "-", title).strip("-")


def page() -> str:
    """Return docs/diagnostics.md: every code with its cause and cure, by group."""
    lines = [
        "# Diagnostics",
        "",
        "Every message of `recipe` has one of these codes: E is an error, W a warning, N a note. The meaning",
        "of a code never changes. `python -m recipec.spec.codes` writes this page from `spec/codes.py`.",
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
