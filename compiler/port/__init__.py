"""`recipe port`: a GPU recipe of another tool, taken over as a recipe, with a report on every key.

source     its files, as trees whose every key knows its place
ledger     what became of each key, and the recipe that comes of it
dialects/  one module for each tool: how it is recognised, and what its keys mean here
"""
