"""What is this model: all that the compiler knows of a base model.

A recipe's model: `find` returns the Model of a Hugging Face id, or of a directory with a config.json; `known`
returns None instead of an error, and `folder_of` the local files. An id is looked up among the models that
were added next to the recipe, then in the catalog. An id of a family that cannot be trained is refused before
anything is downloaded. For a directory, its own config.json counts, because that file will be loaded.

A Model tells its positions (`positions.py`), the tensors that its files list (`tensor_list.py`), and the
format in which they are stored (`quantized_checkpoints.py`).

The catalog: `entries` has its ids; `entry_of`, `original_of`, `nearest` and `title` take any id.

A family: `facts_of` returns what tokenizers, servers and transformers need of it (`family_facts.py`), and
`class_name` and `architecture_class` transformers' classes of a config.json.

Other rooms import only this module, and `added.py`, which reads and writes the folder of an added model.
"""

from recipec.compiler.catalog.family_facts import (
    Served,
    Tokens,
    architecture_class,
    class_name,
    facts_of,
    family_titles,
    with_pictures,
)
from recipec.compiler.catalog.finding import E0801 as E0801
from recipec.compiler.catalog.finding import E0802 as E0802
from recipec.compiler.catalog.finding import E0803 as E0803
from recipec.compiler.catalog.finding import E0813 as E0813
from recipec.compiler.catalog.finding import (
    Model,
    UnknownModel,
    find,
    folder_of,
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
    "Listed",
    "Model",
    "Served",
    "Tokens",
    "UnknownModel",
    "architecture_class",
    "causal_models",
    "class_name",
    "entries",
    "entry_of",
    "facts_of",
    "family_titles",
    "find",
    "folder_of",
    "is_directory",
    "is_quantized",
    "known",
    "nearest",
    "of_hub",
    "original_of",
    "positions_of",
    "tensors_in",
    "title",
    "untrainable_families",
    "with_pictures",
]
