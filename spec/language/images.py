"""The section `data.images`: pictures in the samples."""

from __future__ import annotations

from recipec.spec.language.section import Section, field


class Images(Section):
    """Pictures in the samples. The checkpoint's image processor makes their tokens and their pixels, with its
    own settings where a key is null. A run fetches no picture from the web."""

    longest_side: int | None = field(
        "Larger pictures are scaled down so that their longer side has at most this many pixels, before the "
        "checkpoint's processor gets them; null leaves the size to the processor.",
        None,
        unit="pixels",
        ge=28,
        le=16_384,
        example=1024,
    )
    max_pixels: int | None = field(
        "Pictures with more pixels are scaled down to at most this many, before the checkpoint's processor "
        "gets them, as LLaMA-Factory does with image_max_pixels; null leaves the size to the processor.",
        None,
        unit="pixels",
        ge=784,
        le=89_478_485,
        example=589_824,
    )
    tokens: int | None = field(
        "The most tokens of a picture, for models whose processor can limit them (Gemma 4, Qwen VL); null "
        "uses the processor's own limit.",
        None,
        unit="tokens",
        ge=1,
        le=65_536,
        example=280,
    )
    tiles: int | None = field(
        "The most tiles that a picture is cut into, for models with tiles (Llama 4); null uses the "
        "processor's own number.",
        None,
        unit="tiles",
        ge=1,
        le=64,
        example=4,
    )
    per_row: int | None = field(
        "The most pictures of a packed row. Every row reserves room for the patches of the fullest row, so a "
        "lower number saves memory where few samples have many pictures. null packs by tokens, and by the "
        "patches of an average row.",
        None,
        unit="pictures",
        ge=1,
        example=4,
    )
    folder: str | None = field(
        "The folder in which relative paths of pictures start, relative to the recipe's folder; or a gs:// "
        "address. null uses the folder of the file that names them.",
        None,
        min_length=1,
        example="data/pictures",
    )
