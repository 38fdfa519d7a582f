"""Chat files to training batches.

reading    JSON lines -> rows of messages; what is malformed is counted, with its place
tokenizer  the checkpoint's tokenizer and the chat template
masking    a conversation -> its text, and the characters that carry loss
samples    text -> tokens and the tokens that are targets
packing    samples -> rows of at most `max_length` tokens
batches    rows -> micro-batches, in an order that depends on the seed and the epoch alone
prepare    all of it, and the report
"""

from __future__ import annotations

from runtime.data.prepare import PreparedData, prepare
from runtime.data.report import DataReport
from runtime.data.tokenizer import load_tokenizer

__all__ = ["DataReport", "PreparedData", "load_tokenizer", "prepare"]
