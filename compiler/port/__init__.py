"""`recipe port`: a GPU recipe of another tool, taken over as a recipe, with a report on every key.

read, source            the files, as trees whose every key knows its place
python_source, follow    scripts and notebooks: what their trainer is given, by following their statements
recognize, settle       whose they are; today's names, references and --set
typed                   maps of hyperparameters, whose values are all texts
keys, ledger            a section's keys and what becomes of each, by tables or one by one
common                  the table of keys that mean the same in all tools
names                   what the tools call models, templates and tokenizers
dialects/, meaning/     what every key of a tool becomes; what tools share
mesh, plan              the devices
write, report           the recipe's text, and the report
port                    the whole: the recipe under its checks, and the files that go with it
"""
