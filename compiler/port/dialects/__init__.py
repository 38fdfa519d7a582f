"""The tools whose files can be ported, one module each.

A dialect module has:
    NAME        its name for --from, "axolotl"
    TITLE       for messages, "Axolotl"
    MARKS       keys that tell it from the others: the more of them stand in a file, the likelier it is
    port(ledger)    goes through ledger.sources and says of every key what became of it
"""
