"""Leaves rows out that have no answer."""


def clean(row):
    return row if row["answer"].strip() else None
