"""`recipe lsp`: the protocol's side, by pygls."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path

from compiler.lsp import diagnostics
from compiler.lsp.analysis import Analysis, Document
from compiler.lsp.pages import Pages
from compiler.lsp.process import Process, Unanswered
from compiler.lsp.scan import scan
from compiler.lsp.text import Text

log = logging.getLogger("recipe")

PAUSE = 0.15
"""Seconds after a change in which a further one puts the check off."""
CHECK_SECONDS = 30.0
"""What checking may take."""
SECTIONS = frozenset({"model", "mesh", "lora", "data", "train", "checkpoint", "serve"})


@dataclass
class State:
    """What is known of an open document.

    Attributes:
        checked: the text that `analysis` is of; None before the first check.
        shown: the diagnostics that the editor has.
        stale: whether something changed since the last check began.
        task: that waits for a pause, or checks.
    """

    checked: str | None = None
    analysis: Analysis = field(default_factory=lambda: Analysis([], {}, ()))
    shown: list[diagnostics.Shown] = field(default_factory=list)
    stale: bool = False
    task: asyncio.Task[None] | None = None


class Server(LanguageServer):
    """The server with its documents."""

    def __init__(self) -> None:
        from compiler import __version__

        # Each change brings the whole text: recipes are short, and pygls breaks lines at more characters
        # than the protocol, so that edits by line would go astray.
        super().__init__("recipe", __version__, text_document_sync_kind=types.TextDocumentSyncKind.Full)
        self.process = Process()
        self.states: dict[str, State] = {}
        self.pages: Pages | None = None
        self.asked_to_end = False

    def text(self, uri: str) -> Text:
        encoding = types.PositionEncodingKind(self.server_capabilities.position_encoding or "utf-16")
        return Text(self.workspace.get_text_document(uri).source, encoding.value)

    def document(self, uri: str) -> Document:
        """A document with the contents of all others that are open."""
        opened = {to_path(other): self.workspace.get_text_document(other).source for other in self.states}
        path = to_path(uri)
        return Document(path, opened.pop(path, ""), opened)

    def schedule(self, uri: str, pause: float = PAUSE) -> None:
        """Checks a document soon, once for all changes until then."""
        state = self.states.get(uri)
        if state is None:
            return
        state.stale = True
        if state.task is None or state.task.done():
            state.task = asyncio.create_task(self._check(uri, state, pause))

    def schedule_all(self, changed: str | None = None) -> None:
        """Checks again what rests on a file, or everything."""
        for uri, state in list(self.states.items()):
            if changed is None or to_path(changed) in state.analysis.bases:
                self.schedule(uri)

    async def _check(self, uri: str, state: State, pause: float) -> None:
        while state.stale and self.states.get(uri) is state:
            # A flood of changes is waited out, though not forever.
            for _ in range(10):
                state.stale = False
                await asyncio.sleep(pause)
                pause = PAUSE
                if not state.stale:
                    break
            state.stale = False
            await self._check_once(uri, state)

    async def _check_once(self, uri: str, state: State) -> None:
        if self.states.get(uri) is not state:
            return
        document = self.document(uri)
        text, version = self.text(uri), self.workspace.get_text_document(uri).version
        try:
            made = Analysis([], {}, ())
            if _is_recipe(document, self.states.values()):
                await self.process.ask(CHECK_SECONDS, "forget")
                made = await self.process.ask(CHECK_SECONDS, "check", document)
            if not made.raw:
                # What was known of the recipe holds while it cannot be read.
                made = Analysis(made.diagnostics, state.analysis.raw, made.bases or state.analysis.bases)
            related = _shows_related(self.client_capabilities)
            shown = diagnostics.show(made.diagnostics, document.path, text, self.pages, related)
        except Unanswered as reason:
            self.tell(f"{Path(document.path).name} could not be checked: {reason}")
            return
        except Exception:
            log.exception("checking %s failed", uri)
            return
        if self.states.get(uri) is state:
            state.checked, state.analysis, state.shown = document.text, made, shown
            published = [item.diagnostic for item in shown]
            self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, published, version))

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Into the log; pygls would open a window."""
        self.tell(f"{source.__name__}: {str(error).partition(chr(10))[0]}")

    def tell(self, message: str) -> None:
        """Writes to the editor's log of this server."""
        self.window_log_message(types.LogMessageParams(types.MessageType.Warning, message))


def to_path(uri: str) -> str:
    """The absolute path of a document; of one that is no file yet, a name in the working folder."""
    found = to_fs_path(uri) if uri.startswith("file:") else None
    return str(Path(found or f"{re.sub(r'[^A-Za-z0-9]+', '-', uri)}.yaml").absolute())


def _is_recipe(document: Document, states: Any) -> bool:
    """Whether a YAML file is a recipe, by its keys, its schema, or because an open recipe extends it."""
    if re.search(r"^#\s*yaml-language-server:.*recipe\.schema\.json", document.text, re.MULTILINE):
        return True
    if any(document.path in state.analysis.bases for state in states):
        return True
    top = {str(entry.path[0]) for entry in scan(document.text).entries}
    return "recipe" in top or len(top & SECTIONS) > 1 or ("extends" in top and bool(top & SECTIONS))


def _shows_related(capabilities: types.ClientCapabilities) -> bool:
    text = capabilities.text_document
    published = text.publish_diagnostics if text else None
    return bool(published and published.related_information)
