"""Pictures of samples: where they are, what is refused, and how they are opened.

A picture is a file, an address of a bucket, or bytes within a row. Nothing is fetched from the web. A path
has to stay within the folder that pictures start from, and a file is opened only if it is a regular file.
Its header gives the number of pixels before anything is decoded. Only formats that Pillow itself decodes are
read: no format that starts another program.

Pictures are opened as transformers opens them: turned as their EXIF orientation says, and converted to RGB
with Pillow's `convert`, which drops an alpha channel. Of an animation the first frame is read.
"""

from __future__ import annotations

import atexit
import base64
import binascii
import io
import math
import os
import posixpath
import shutil
import tempfile
import urllib.parse
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import stores
from ..errors import UserError, first_line
from ..untrusted import is_endless
from .row_values import Malformed, kind

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats that are read."""

MOST_PIXELS = 89_478_485
"""The most pixels of a picture, 256 MiB in RGB: the number from which Pillow warns of decompression bombs."""

MOST_BYTES = 1 << 28
"""The largest size of a picture's file."""

WEB = ("http://", "https://")

BUCKET = "gs://"

KEPT = "kept:"
"""The beginning of the place of a picture whose bytes stand in a row: its content's digest follows."""

GEMMA4_TOKENS = (70, 140, 280, 560, 1120)
TOKEN_LIMITS: Mapping[str, Sequence[int]] = {
    "gemma4": GEMMA4_TOKENS,
    "gemma4_unified": GEMMA4_TOKENS,
    "paddleocr_vl": (),
    "qwen_vl": (),
}
"""The kinds of image processors that can limit the tokens of a picture, with the limits that each accepts;
none for any number."""

TILED = ("llama4",)
"""The kinds of image processors that cut pictures into tiles."""

LOCAL_COPY = "a run fetches no picture from the web: download it, and name the file"


def refused_setting(tokens: int | None, tiles: int | None, kind: str) -> tuple[str, str, str] | None:
    """Return the key of data.images that a kind of image processor does not take, the reason, and what to
    type instead; None if it takes all."""
    if tiles is not None and kind not in TILED:
        return "data.images.tiles", "this model's image processor cuts no tiles", "remove the line"
    if tokens is None:
        return None
    key, limits = "data.images.tokens", TOKEN_LIMITS.get(kind)
    if limits is None:
        return key, "this model's image processor has no such setting", "use longest_side, or remove the line"
    if limits and tokens not in limits:
        nearest = min(limits, key=lambda limit: abs(limit - tokens))
        return key, f"{tokens} is not one of {', '.join(map(str, limits))}", f"tokens: {nearest}"
    return None


@dataclass(frozen=True)
class Picture:
    """A picture of a sample.

    Attributes:
        place: an absolute path, an address, or KEPT and a digest.
        content: the bytes of its file, if they stand in the row.
    """

    place: str
    content: bytes | None = None


def picture_of(value: Any, what: str, folder: str) -> Picture:
    """Return the picture that a value of a row names.

    Args:
        value: a path or an address, or an object with one of "bytes", "path", "url", "base64" and "image".
        what: names it in the reason.
        folder: the folder or the bucket's address that relative paths start from.

    Raises:
        Malformed: it is none, or its place is refused.
    """
    if isinstance(value, Mapping):
        for key in ("bytes", "base64", "url", "path", "image"):
            if value.get(key) is not None:
                inner = value[key]
                if key == "base64":
                    return _inline(_decoded(inner, what))
                return picture_of(inner, what, folder)
        raise Malformed(f"{what} has none of bytes, path, url and base64")
    if isinstance(value, bytes | bytearray | memoryview):
        return _inline(bytes(value))
    if not isinstance(value, str):
        raise Malformed(f"{what} is {kind(value)}, not a path, an address or bytes")
    if not value.strip():
        raise Malformed(f"{what} is blank")
    if value.lstrip()[:5].lower() == "data:":
        head, comma, body = value.partition(",")
        if not comma:
            raise Malformed(f"{what} is a data: address without content")
        content = urllib.parse.unquote_to_bytes(body)
        if head.rstrip().lower().endswith(";base64"):
            return _inline(_decoded(content.decode("latin-1"), what))
        return _inline(content)
    if value.lower().startswith(WEB):
        raise Malformed(f"{what} is a web address; {LOCAL_COPY}")
    if value.startswith("file:"):
        parts = urllib.parse.urlsplit(value)
        if parts.netloc not in ("", "localhost"):
            raise Malformed(f"{what} is a file: address of another host, {parts.netloc}")
        value = urllib.parse.unquote(parts.path)
    elif "://" in value and not value.startswith(BUCKET):
        raise Malformed(f"{what} is an address of another kind than file:, data: and gs://")
    return Picture(_within(value, what, folder))


def _within(path: str, what: str, folder: str) -> str:
    """Return the whole path of a picture, which must not leave the folder.

    Links within the folder are followed: a data set may keep its pictures on another disk.
    """
    if "\0" in path:
        raise Malformed(f"{what} holds a zero byte")
    if not folder and not path.startswith(BUCKET):
        raise Malformed(f"{what} is a path, and a data set of the hub has no folder: set data.images.folder")
    if path.startswith(BUCKET):
        whole = path
    elif "://" in folder:
        whole = posixpath.join(folder, path)
    else:
        whole = os.path.join(folder, path)
    scheme, mark, rest = whole.rpartition("://")
    whole = f"{scheme}{mark}{posixpath.normpath(rest)}"
    root = folder.rstrip("/") + "/"
    if not whole.startswith(root) and not path.startswith(BUCKET):
        raise Malformed(f"{what} lies outside of {folder}; data.images.folder may name a folder above both")
    return whole


def _decoded(text: Any, what: str) -> bytes:
    if not isinstance(text, str):
        raise Malformed(f"{what}: base64 is {kind(text)}, not a string")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Malformed(f"{what} is not base64 ({first_line(error)})") from error


def digest_of(content: bytes) -> int:
    """Return a hash of a picture's bytes, in 64 bits."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def _inline(content: bytes) -> Picture:
    return Picture(KEPT + blake2b(content, digest_size=16).hexdigest(), content)


def kept_pictures(cache: Path | None) -> Path:
    """Return the folder of pictures that stand in rows: in the cache, or one that this process removes."""
    if cache is not None:
        return cache / "pictures"
    folder = tempfile.mkdtemp(prefix="pictures-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def keep(picture: Picture, folder: Path) -> None:
    """Write the bytes of a picture that stands in a row into the folder of kept pictures, once.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    assert picture.content is not None
    file = kept_file(picture.place, folder)
    if file.is_file():
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        number, unfinished = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(number, "wb") as stream:
            stream.write(picture.content)
        os.replace(unfinished, file)
    except OSError as error:
        raise UserError(
            f"a picture of the data cannot be kept in {folder}: {first_line(error)}",
            "free some space there: the pictures that stand in rows are read again for each batch",
        ) from error


def kept_file(place: str, folder: Path) -> Path:
    """Return the file of a picture that stands in a row."""
    name = place.removeprefix(KEPT)
    return folder / name[:2] / name


def stamps_of(places: Sequence[str], kept: Path) -> list[int]:
    """Return a hash of what the file systems say of pictures' files, in 64 bits; 0 for a missing one.

    The pictures of a bucket are listed folder by folder.
    """
    told: dict[str, Any] = {}
    for folder in {posixpath.dirname(place) for place in places if place.startswith(BUCKET)}:
        import fsspec

        try:
            system, path = fsspec.core.url_to_fs(folder)
            told |= {
                f"{BUCKET}{entry['name']}": [str(entry.get(name)) for name in IDENTIFYING]
                for entry in system.ls(path, detail=True)
            }
        except Exception:  # file systems raise any exception; reading the picture reports it
            continue
    for place in places:
        if not place.startswith(BUCKET):
            file = kept_file(place, kept) if place.startswith(KEPT) else Path(place)
            try:
                state = file.stat()
            except OSError:
                continue
            told[place] = [state.st_size, 0 if place.startswith(KEPT) else state.st_mtime_ns]
    return [digest_of(repr(told[place]).encode()) if place in told else 0 for place in places]


IDENTIFYING = ("size", "ETag", "etag", "md5Hash", "crc32c", "generation", "mtime", "updated", "LastModified")
"""The entries of a file system that identify a file's contents."""


def content_of(place: str, kept: Path, what: str) -> bytes:
    """Read the bytes of a picture.

    Raises:
        Malformed: it is missing, too large, not a file, or cannot be read.
        UserError: a bucket refuses access or does not answer, and all its pictures would be left out.
    """
    if place.startswith(KEPT):
        place = str(kept_file(place, kept))
    try:
        if place.startswith(BUCKET):
            content = _from_bucket(place)
        else:
            if is_endless(place):
                raise Malformed(f"{what} is no regular file")
            with open(place, "rb") as stream:
                content = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise Malformed(f"{what} is missing: {place}") from None
    except OSError as error:
        raise Malformed(f"{what} cannot be read: {first_line(error)}") from error
    if len(content) > MOST_BYTES:
        raise Malformed(f"{what} is larger than {MOST_BYTES >> 20} MiB")
    return content


def _from_bucket(place: str) -> bytes:
    try:
        import fsspec

        stores.silence()
        with fsspec.open(place, "rb") as stream:
            content: bytes = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except Exception as error:  # file systems raise any exception
        raise stores.failed(place, "read", error) from error
    return content


ORIENTATION = 0x0112
"""The EXIF tag of a picture's orientation; from 5 on width and height are exchanged."""


def opened(content: bytes, what: str, most: int = MOST_PIXELS) -> tuple[Image, tuple[int, int]]:
    """Open a picture, of which only the header is read.

    Returns:
        The picture, and its height and width as it is seen.

    Raises:
        Malformed: it is no picture of FORMATS, or has too many pixels.
    """
    from PIL import Image

    Image.init()  # lists the formats of this build
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(content), formats=formats)
        width, height = image.size
        turned = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    except Image.DecompressionBombError:
        raise Malformed(f"{what} has too many pixels; at most {most:,} are read") from None
    except Image.UnidentifiedImageError:
        raise Malformed(f"{what} is no picture of a known format") from None
    except Exception as error:  # Pillow's readers raise any exception on broken files
        raise Malformed(f"{what} is broken: {first_line(error)}") from error
    if width * height > most:
        raise Malformed(f"{what} has {width:,} x {height:,} pixels; at most {most:,} are read")
    if not width or not height:
        raise Malformed(f"{what} has no pixels")
    return image, (width, height) if turned else (height, width)


@dataclass(frozen=True)
class Limits:
    """The size that larger pictures are scaled down to, before an image processor gets them.

    Attributes:
        longest_side: the most pixels of the longer side, None for any.
        max_pixels: the most pixels of the picture, None for any.
    """

    longest_side: int | None = None
    max_pixels: int | None = None

    def of(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the height and the width to which a picture of a height and a width is scaled."""
        height, width = size
        if self.max_pixels is not None and height * width > self.max_pixels:
            factor = math.sqrt(self.max_pixels / (height * width))
            height, width = max(1, int(height * factor)), max(1, int(width * factor))
        most = max(height, width)
        if self.longest_side is not None and most > self.longest_side:
            sides = (max(1, round(side * self.longest_side / most)) for side in (height, width))
            height, width = sides
        return height, width


def check_decodes(image: Image, what: str) -> None:
    """Decode a picture, at an eighth of its size if its format can do that.

    Raises:
        Malformed: it is broken, or RGB would not show it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.draft("RGB", (1, 1))
            image.load()
            if image.mode[0] in WIDE:
                _check_range(image, what)
            if image.mode != "RGB":
                image.resize((1, 1), 0).convert("RGB")
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"{what} is broken: {first_line(error)}") from error


WIDE = "IF"
"""First letters of Pillow's modes of gray pictures with more than 8 bits: integers, and fractions."""


def _check_range(image: Image, what: str) -> None:
    """Refuse a gray picture that RGB would not show: Pillow cuts its values off at 255, without scaling.

    Raises:
        Malformed
    """
    least, most = image.getextrema()
    if image.mode == "F" or least < 0 or most > 255:  # type: ignore[operator]
        raise Malformed(
            f"{what} has gray values from {least:g} to {most:g}, of which RGB keeps 0 to 255: save it with 8 "
            "bits a color"
        )


def decoded(image: Image, what: str, limits: Limits) -> Image:
    """Return a picture in RGB, as transformers gives it to an image processor, within some limits.

    Raises:
        Malformed: it is broken.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise Malformed(f"{what} is broken: {first_line(error)}") from error
    height, width = limits.of((image.height, image.width))
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)
    return image
