"""`recipe serve pin`: write the digest of the server's image into the recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from recipec.compiler.deployment.docker_engine import PLATFORM, Engine
from recipec.compiler.errors import ArtifactError
from recipec.compiler.vllm.image_name import ImageName
from recipec.compiler.writing import write_text
from recipec.spec import recipe_edits, tree, yaml_document
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, Span
from recipec.spec.language import Serve
from recipec.spec.load import Loaded, display, load, read_text
from recipec.spec.tree import Entry, Mapping, Scalar
from recipec.spec.yaml_document import LINE_BREAK

KEY = "serve.image"

E0667 = Code(
    "E0667",
    "image cannot be pinned here",
    cause="`recipe serve pin` writes the digest into the file that it is given. The recipe takes its image, "
    "or its whole section serve, from a file that it extends, or has no section serve, or has the name of "
    "the image over several lines.",
    cure="Name the file that the message shows, or give the recipe an image of its own.",
)


class CannotPin(Exception):
    """The recipe's own text has no place for the digest."""

    def __init__(self, diagnostics: list[Diagnostic]) -> None:
        super().__init__(diagnostics[0].message)
        self.diagnostics = diagnostics


@dataclass(frozen=True)
class PinnableImage:
    """The server's image in a recipe's own text.

    Attributes:
        path: the recipe.
        text: of the file.
        image: its name, by default the language's.
        value: position of the name; None if the file has none.
        section: the section serve, in which a missing name is added.
    """

    path: Path
    text: str
    image: ImageName
    value: Span | None
    section: Mapping

    def pinned(self, digest: str) -> str:
        """Return the recipe's text with a digest. Every other character stays."""
        name = str(self.named(digest))
        lines = LINE_BREAK.split(self.text)
        if self.value is not None:
            quote = self.value.text[self.value.column - 1]
            quote = quote if quote in "\"'" else ""
            edit = recipe_edits.replaced(self.value, f"{quote}{name}{quote}")
        else:
            keys = [entry.key for entry in self.section.entries.values()]
            spans = [key.span for key in keys if key.kind == "file"]
            edit = recipe_edits.added(self.section.place.span, spans, f"image: {name}", lines)
        return edit.apply(self.text)

    def named(self, digest: str) -> ImageName:
        """Return the name with a digest. It keeps its tag, from which the checks read vLLM's version."""
        if self.image.digest and not self.image.tag:
            return replace(self.image, digest=digest)
        return replace(self.image, tag=self.image.tag or "latest", digest=digest)


def find_image(path: Path) -> PinnableImage:
    """Find the server's image in a recipe. Errors in other parts of the recipe do not matter.

    Raises:
        CannotPin: the file cannot be read, or the image is not in it.
    """
    text, problem = read_text(path)
    if problem is not None:
        raise CannotPin([problem])
    loaded = load(path, text=text)
    root = loaded.sources.root
    problems = [problem for problem in loaded.diagnostics if root is None or problem.path == KEY]
    if root is None or any(problem.severity == "error" for problem in problems):
        raise CannotPin(problems)
    entry = root.entries.get("serve")
    section = entry.node if entry is not None else None
    if not isinstance(section, Mapping):
        message = "the recipe has no section serve, and thus no image"
        raise _refused(loaded, "serve", message, "serve: {accelerator: v6e-8}")
    image = section.entries.get("image")
    if image is None:
        if section.place.kind != "file":
            raise _elsewhere(loaded, "serve", section.place.span)
        return PinnableImage(path, text, ImageName.read(_default()), None, section)
    if image.node.place.kind != "file":
        raise _elsewhere(loaded, KEY, image.node.place.span)
    return PinnableImage(path, text, _name(loaded, image, text), image.node.place.span, section)


def pin(pinnable: PinnableImage, engine: Engine) -> ImageName:
    """Return the image with the digest that its registry has for its tag now.

    A name with a digest alone stays as it is, once the registry has it.

    Raises:
        ArtifactError: the registry does not have the image, or it has none for the TPU's machines.
    """
    image = pinnable.image
    asked = image if image.digest and not image.tag else pinnable.named("")
    published = engine.published(asked)
    for_tpus = "/".join(PLATFORM)
    if published.platforms and not any(platform.startswith(for_tpus) for platform in published.platforms):
        raise ArtifactError(
            f"{asked} has {', '.join(published.platforms)}, and TPU machines are {for_tpus}",
            "name an image for that platform",
        )
    return pinnable.named(published.digest)


def write(pinnable: PinnableImage, image: ImageName) -> None:
    """Write the recipe with a pinned image: completely or not at all.

    Raises:
        ArtifactError: the file cannot be written, or was changed meanwhile.
    """
    text = pinnable.pinned(image.digest)
    before, after = (yaml_document.read(version, "").root for version in (pinnable.text, text))
    assert isinstance(before, Mapping) and isinstance(after, Mapping)
    wanted = tree.plain(before)
    wanted["serve"]["image"] = str(image)
    assert tree.plain(after) == wanted, "the edit changed more than the image"
    now, problem = read_text(pinnable.path)
    if problem is not None or now != pinnable.text:
        raise ArtifactError(
            f"{display(pinnable.path)} changed while the registry was asked", "run the command again"
        )
    write_text(pinnable.path, text)


def by_hand(image: ImageName) -> str:
    """Return what to do where no engine or no registry can be reached."""
    return (
        f"copy the digest from the registry's page, and write image: {image.repository}:"
        f"{image.tag or 'latest'}@sha256:DIGEST"
    )


def _default() -> str:
    return str(Serve.model_fields["image"].default)


def _name(loaded: Loaded, image: Entry, text: str) -> ImageName:
    node = image.node
    assert isinstance(node, Scalar) and isinstance(node.value, str), "the language takes only text"
    if not recipe_edits.on_one_line(node, LINE_BREAK.split(text)):
        message = "the name of the image goes over several lines"
        raise _refused(loaded, KEY, message, f"image: {node.value.strip()}")
    return ImageName.read(node.value)


def _elsewhere(loaded: Loaded, path: str, span: Span) -> CannotPin:
    message = f"`{path}` is not in {display(loaded.path)}: it comes from {span.file}, line {span.line}"
    return _refused(
        loaded, path, message, f"recipe serve pin {span.file}; or write serve.image into this recipe", span
    )


def _refused(loaded: Loaded, path: str, message: str, help: str, span: Span | None = None) -> CannotPin:
    place = span or loaded.sources.span(path) or Span(display(loaded.path), 1, 1, "")
    return CannotPin([Diagnostic(E0667, message, path, help, place)])
