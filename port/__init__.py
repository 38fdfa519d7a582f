"""`recipe port`: turn a GPU recipe of another tool into a recipe of this project, with a report on every key.

read, source            the files as trees, in which every key has its place (file, line, column)
python_source, follow   scripts and notebooks: follow their statements to find the trainer's arguments
copies                  functions of a script, with the statements at its top that they need
recognize, settle       which tool the files belong to; current key names, references and --set
typed                   maps of hyperparameters, in which every value is a text
keys, engine, ledger    the keys of a section and statements on them; records what rules state; the verdicts
common_keys, rules      the table of keys that mean the same in all tools; the rules that dialects share
tool_names              the tools' names of models, templates and tokenizers
dialects/, meaning/     what each key of a tool becomes; the meanings that several tools share
mesh, plan              the devices
report, page            the report as a document, and the files next to each other, for its page
back                    the other way: a recipe into a tool's config
options, cli            the arguments of the command, and its work
port                    the complete port: the checked recipe, and the files that it needs
"""
