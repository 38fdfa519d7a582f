"""Data sources to training batches.

sources    each source -> its rows, streamed; what is malformed is counted, with its place
             (places, files, text_files, column_files, huggingface: whatever they lie in; transform: the
             user's function; formats, messages, values: what they mean; advice: for columns of other names)
splits     which of those rows are trained on and which evaluated on
tokenizer  the checkpoint's tokenizer and the chat template
template   a conversation -> text, as transformers renders it
reasoning  what becomes of the assistant's thoughts, before and after it is rendered
masking    the characters of that text that carry loss
encoding   text -> tokens and the tokens that are targets; what cannot be used is counted
tokenizing the same for all rows, in several processes (worker) where there are many
samples    tokens and targets of all samples, as flat arrays
cache      those arrays on disk, found by what they were made from
packing    samples -> rows of at most `max_length` tokens
epochs     the samples that an epoch draws, by the sources' weights, and their rows
batches    rows -> micro-batches, in an order that depends on the seed and the epoch alone
prepare    all of it, and the report
"""
