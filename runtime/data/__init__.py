"""The path from data sources to training batches.

sources    each source -> its rows, streamed; malformed rows are counted, with their place
             (places, files, text_files, json_files, csv_files, column_files, huggingface: how rows are
             stored; transform: the user's function; parsers, formats, instructions, prompted, messages,
             values: what rows mean; advice: on columns of other names)
division   the rows for training and the rows for evaluation, if both are of the same sources (counting)
tokenizer  the checkpoint's tokenizer and the chat template
template   a conversation -> text, as transformers renders it
reasoning  keeps or drops the assistant's reasoning, before and after rendering
masking    which characters of the rendered text carry loss
encoding   text -> tokens, and which of them are targets (texts: of rows without a chat template); unusable
             rows are counted
tokenizing encoding of all rows, in several processes (worker) if there are many rows
samples    tokens and targets of all samples, as flat arrays
cache      those arrays on disk, under a key computed from their inputs
epochs     the samples of an epoch, packed into rows (weighted, tempering: drawn by the sources' weights)
batches    rows -> micro-batches, in an order that depends only on the seed and the epoch (evaluation: those
             of the evaluation data; stream, shards: of data that is read during the run)
prepare    runs all of these steps and writes the report (report, usable, unpaired)
prompts    the prompts of train.samples; new_tokens: tokens that a recipe adds; showing: for recipe preview
"""
