"""What is this model: all that the compiler knows of a base model, and the only module that others import.

`find` returns the Model that a recipe names, by a Hugging Face id or by a directory with a config.json. It
looks an id up first among the models that were added next to the recipe (`added.py`), then in the catalog
(`listing.py`). An id of a family that cannot be trained is refused before anything is downloaded. For a
directory, its own config.json takes precedence, because that is the file that will be loaded.

A Model tells its positions (`positions.py`), the tensors that its files list (`tensor_list.py`), and the
format in which they are stored (`quantized_checkpoints.py`). `facts_of` returns what tokenizers, servers and
transformers need of its family (`family_facts.py`).
"""

from recipec.compiler.catalog.added import (
    LOCK,
    MAX_FILE,
    MODELS,
    TENSORS,
    NotWhole,
    add_command,
    added_at,
    folder_name,
    lock_text,
    models_folder,
    tensors_text,
)
from recipec.compiler.catalog.family_facts import (
    Served,
    architecture_class,
    class_name,
    decoder_layer,
    facts_of,
    family_titles,
)
from recipec.compiler.catalog.finding import E0801 as E0801
from recipec.compiler.catalog.finding import E0802 as E0802
from recipec.compiler.catalog.finding import E0803 as E0803
from recipec.compiler.catalog.finding import E0813 as E0813
from recipec.compiler.catalog.finding import (
    Model,
    Shapes,
    UnknownModel,
    find,
    folder_of,
    instead_of_quantized,
    known,
    of_hub,
    positions_of,
)
from recipec.compiler.catalog.listing import (
    causal_models,
    entries,
    entry_of,
    is_directory,
    is_quantized,
    nearest,
    original_of,
    title,
    untrainable_families,
)
from recipec.compiler.catalog.tensor_list import Listed, tensors_in

__all__ = [
    "LOCK",
    "MAX_FILE",
    "MODELS",
    "TENSORS",
    "Listed",
    "Model",
    "NotWhole",
    "Served",
    "Shapes",
    "UnknownModel",
    "add_command",
    "added_at",
    "architecture_class",
    "causal_models",
    "class_name",
    "decoder_layer",
    "entries",
    "entry_of",
    "facts_of",
    "family_titles",
    "find",
    "folder_name",
    "folder_of",
    "instead_of_quantized",
    "is_directory",
    "is_quantized",
    "known",
    "lock_text",
    "models_folder",
    "nearest",
    "of_hub",
    "original_of",
    "positions_of",
    "tensors_in",
    "tensors_text",
    "title",
    "untrainable_families",
]
