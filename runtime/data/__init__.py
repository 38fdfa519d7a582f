"""The path from data sources to training batches.

prepare.py does all of it: rows of the sources (sources.py) become samples (formats.py), texts (template.py),
the characters that carry loss (masking.py), tokens (encoding.py), packed rows (epochs.py), and batches
(batches.py).

Words:
    row of a source: what a file or data set holds at one place, a dict of columns, before it is parsed.
    sample: one conversation, text or preference; `formats.ParsedSample` before it is tokenized, and
        `samples.Sample` afterwards. A preference is a group of two samples, which stay together.
    row: a line of at most data.max_length tokens in a micro-batch, which holds one or more samples.
"""
