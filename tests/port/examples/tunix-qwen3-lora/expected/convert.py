"""Rows of opus-100 as Tunix asks for a translation: a prompt, and what is learned."""


def convert(row):
    """A row of `translation`, with the texts `en` and `fr`."""
    english, french = row["translation"]["en"], row["translation"]["fr"]
    return {"prompt": f"Translate this into French:\n{english}\n", "completion": french}
