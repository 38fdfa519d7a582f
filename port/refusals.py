"""Codes that several dialects give, when a key of theirs has no counterpart in a recipe."""

from __future__ import annotations

from recipec.spec.codes import Code

W1114 = Code(
    "W1114",
    "unknown key",
    cause="The tool has no such key. It may refuse or ignore it. The port ignores it.",
    cure="Use the key that the message suggests, or remove it.",
)

E1142 = Code(
    "E1142",
    "data sets of different forms",
    cause="The data sets of the ported file have rows that one recipe cannot mix: preferences and "
    "other rows, or packed texts and unpacked conversations.",
    cure="Convert them to one form, or train on them one after another.",
)

E1143 = Code(
    "E1143",
    "data set that cannot be read here",
    cause="The ported file names no data set, a data set of an unknown kind, or one in a place that a "
    "recipe cannot read.",
    cure="Copy it to a file or to the Hugging Face hub. Name that in the file, or with `--set` and "
    "the source's own key.",
)

E1144 = Code(
    "E1144",
    "key missing from a config",
    cause="A key for which the ported tool has no default is missing, such as the model, the "
    "optimizer or a rank.",
    cure="Add the key that the message names.",
)

E1145 = Code(
    "E1145",
    "keys that exclude each other",
    cause="The ported tool itself stops if these keys are given together, or if one is given without "
    "the other.",
    cure="Keep one of them, or change the other as the help says.",
)

E1146 = Code(
    "E1146",
    "quantized base without adapters",
    cause="A quantized base cannot be trained itself, and this file has no adapters. Or the base is "
    "stored with a quantization that recipes do not have.",
    cure="Train adapters, or do not quantize the base.",
)

E1147 = Code(
    "E1147",
    "unknown chat template",
    cause="The ported file names a chat template that is neither the model's own nor known here.",
    cure="Use the tokenizer's own template, or give the template as Jinja.",
)

E1148 = Code(
    "E1148",
    "no targets for adapters",
    cause="The ported file trains adapters but does not name the modules, and PEFT has no default for "
    "this model.",
    cure="Name the target modules.",
)

E1149 = Code(
    "E1149",
    "another kind of training",
    cause="The ported file uses a stage or a method that recipes do not have: reward models, agents, "
    "critics, other forms of distillation, or adapters other than LoRA.",
    cure="Port another stage: answers, preferences, or rewards of single answers.",
)

E1150 = Code(
    "E1150",
    "pictures, video or sound",
    cause="The ported file trains on video or sound, which no model here reads; or on pictures with a model "
    "whose vision tower is not here, or with another objective than `sft`.",
    cure="Train on text, or on pictures with a model that has its vision tower here (docs/images.md).",
)

E1160 = Code(
    "E1160",
    "value that the tool does not accept",
    cause="The value of a key has a type, range or word that the tool does not accept.",
    cure="Correct the value, or remove the key to use its default.",
)

E1163 = Code(
    "E1163",
    "algorithm without a counterpart",
    cause="The source uses an optimizer, a schedule, a loss or a prompt style that recipes do not "
    "have, and none is close to it.",
    cure="Choose one of those that the message or the help names.",
)

E1164 = Code(
    "E1164",
    "targets without a counterpart",
    cause="The target modules match nothing that can carry an adapter, are not a regular expression, "
    "or depend on an unknown model.",
    cure="Name projections of the model, or all-linear.",
)

W1168 = Code(
    "W1168",
    "format of the data was guessed",
    cause="The tool recognizes the format from the columns of the data set, which is not available here.",
    cure="Look at the data set, and set `data.format` and `data.loss_on` in the recipe.",
)

E1171 = Code(
    "E1171",
    "another script of TRL",
    cause="The file is for a TRL script that recipes have no counterpart for (reward models, "
    "`trl distillation`), or it has a key that the `--script` script does not have.",
    cure="Port the config of an SFT, DPO, CPO, ORPO, KTO, GRPO, RLOO or GKD run, or remove the key with "
    "`--set KEY=null`.",
)

E1180 = Code(
    "E1180",
    "key that changes the result",
    cause="The source enables a feature that recipes do not have and that changes the trained model: "
    "another loss, other trained or initial parameters, another update, another model.",
    cure="Port the run without it, using `--set KEY=null` or `--partial`. A partial recipe names what "
    "is missing.",
)
