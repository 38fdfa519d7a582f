"""`recipe port`: a GPU recipe of another tool, taken over as a recipe, with a report on every key.

read, yaml_tree, json_tree, tree    the files, as trees whose every key knows its place (source)
recognise, references               whose they are, and what in them stands elsewhere
dialects/, meaning/                 what every key of a tool becomes, into the ledger
unread                              the keys that no one spoke of
mesh, plan                          the devices
write, report, report_text          the recipe's text, and the report
check, beside, port                 the recipe under its checks; the files that go with it; the whole
"""
