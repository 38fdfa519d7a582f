"""`recipe lsp`: the server's reactions to an editor's requests and notifications, with pygls."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

from recipec.compiler import __version__
from recipec.compiler.lsp.process import Checked, EditorDocument, Process
from recipec.compiler.lsp.view import View, described
from recipec.spec.yaml_document import LINE_BREAK

PAUSE = 0.15
"""Seconds to wait after a change; a further change in this time postpones the check."""
SECTIONS = frozenset({"model", "mesh", "lora", "data", "train", "checkpoint", "serve"})


@dataclass
class State:
    """The state of an open document.

    Attributes:
        text: the text that `checked` belongs to; None before the first check.
        shown: the diagnostics that the editor has, in the order of `checked`.
        stale: whether something has changed since the last check began.
        task: the task that waits for a pause, or checks.
    """

    text: str | None = None
    checked: Checked = field(default_factory=Checked)
    shown: list[types.Diagnostic] = field(default_factory=list)
    stale: bool = False
    task: asyncio.Task[None] | None = None


class Server(LanguageServer):
    """The server with its open documents."""

    def __init__(self) -> None:
        # Each change sends the whole text: recipes are short. pygls breaks lines at more characters than the
        # protocol does, so edits by line would be applied at wrong positions.
        super().__init__("recipe", __version__, text_document_sync_kind=types.TextDocumentSyncKind.Full)
        self.process = Process(self.tell)
        self.states: dict[str, State] = {}
        self.docs: str | None = None
        self.related = False
        self.asked_to_end = False

    def text(self, uri: str) -> str:
        return self.workspace.get_text_document(uri).source

    def document(self, uri: str) -> EditorDocument:
        """Return a document with the contents of all other open documents."""
        opened = {to_path(other): self.text(other) for other in self.states if other != uri}
        return EditorDocument(to_path(uri), self.text(uri), opened)

    def view(self, uri: str) -> View:
        """Return the document as the editor sees it."""
        lines = LINE_BREAK.split(self.text(uri))
        return View(to_path(uri), lines, self.workspace.position_codec, self.related, self.docs)

    def schedule(self, uri: str, pause: float = PAUSE) -> None:
        """Check a document soon, once for all changes until then."""
        state = self.states.get(uri)
        if state is None:
            return
        state.stale = True
        if state.task is None or state.task.done():
            state.task = asyncio.create_task(self._check(uri, state, pause))

    def schedule_all(self, changed: str | None = None) -> None:
        """Check again all documents that depend on a file, or all documents."""
        for uri, state in list(self.states.items()):
            if changed is None or to_path(changed) in state.checked.bases:
                self.schedule(uri)

    async def _check(self, uri: str, state: State, pause: float) -> None:
        while state.stale and self.states.get(uri) is state:
            # Wait until a burst of changes ends, up to a limit.
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
        document, view = self.document(uri), self.view(uri)
        version = self.workspace.get_text_document(uri).version
        checked = await self.process.ask("check", document) if self._is_recipe(document) else Checked()
        if checked is not None and self.states.get(uri) is state:
            state.text, state.checked, state.shown = document.text, checked, view.diagnostics(checked)
            self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, state.shown, version))

    def _is_recipe(self, document: EditorDocument) -> bool:
        """Return whether a YAML file is a recipe: by its keys or schema, or as the base of an open recipe."""
        if re.search(r"^#\s*yaml-language-server:.*recipe\.schema\.json", document.text, re.MULTILINE):
            return True
        if any(document.path in state.checked.bases for state in self.states.values()):
            return True
        top = set(re.findall(r"^(\w+)[ \t]*:", document.text, re.MULTILINE))
        return "recipe" in top or len(top & SECTIONS) > 1 or ("extends" in top and bool(top & SECTIONS))

    def shutdown(self) -> None:
        self.process.stop()
        super().shutdown()

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Write to the log; pygls would open a window."""
        self.tell(f"{source.__name__}: {str(error).partition(chr(10))[0]}")

    def tell(self, message: str) -> None:
        """Write to the editor's log of this server."""
        self.window_log_message(types.LogMessageParams(types.MessageType.Warning, message))


def to_path(uri: str) -> str:
    """Return the absolute path of a document; for a document without a file, a name in the working folder."""
    path = to_fs_path(uri) if uri.startswith("file:") else None
    return str(Path(path or f"{re.sub(r'[^A-Za-z0-9]+', '-', uri)}.yaml").absolute())


def _initialize(ls: Server, params: types.InitializeParams) -> None:
    options = params.initialization_options
    docs = options.get("docs") if isinstance(options, dict) else None
    text = params.capabilities.text_document
    ls.related = bool(text and text.publish_diagnostics and text.publish_diagnostics.related_information)
    ls.docs = docs.partition("#")[0] if isinstance(docs, str) and docs.startswith("http") else None


async def _initialized(ls: Server, params: Any) -> None:
    workspace = ls.client_capabilities.workspace
    files = workspace.did_change_watched_files if workspace else None
    if files and files.dynamic_registration:
        watchers = [types.FileSystemWatcher(glob_pattern="**/*.{yaml,yml,json,jsonl,py,jinja}")]
        options = types.DidChangeWatchedFilesRegistrationOptions(watchers=watchers)
        wanted = types.Registration("watched", types.WORKSPACE_DID_CHANGE_WATCHED_FILES, options)
        ls.client_register_capability(types.RegistrationParams([wanted]))
    await ls.process.ask("ready")


def _ending(ls: Server, params: Any) -> None:
    ls.asked_to_end = True
    ls.states.clear()
    ls.process.stop()


def _opened(ls: Server, params: types.DidOpenTextDocumentParams) -> None:
    uri = params.text_document.uri
    ls.states[uri] = State()
    ls.schedule(uri, 0)
    ls.schedule_all(uri)


def _changed(ls: Server, params: types.DidChangeTextDocumentParams) -> None:
    ls.schedule(params.text_document.uri)
    ls.schedule_all(params.text_document.uri)


def _saved(ls: Server, params: Any) -> None:
    ls.schedule_all()


def _closed(ls: Server, params: types.DidCloseTextDocumentParams) -> None:
    uri = params.text_document.uri
    ls.states.pop(uri, None)
    ls.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, []))
    ls.schedule_all(uri)


async def _hover(ls: Server, params: types.HoverParams) -> types.Hover | None:
    uri, at = params.text_document.uri, params.position
    document, view, state = ls.document(uri), ls.view(uri), ls.states.get(uri, State())
    parts, range = [], None
    if answer := await ls.process.ask("explain", document, view.place(at)):
        text, range = answer[0].replace("```", "'''"), view.range(answer[1])
        parts.append(f"```text\n{text}```")
    if state.text == document.text:
        codes = [
            answer.code
            for shown, (answer, _) in zip(state.shown, state.checked.diagnostics, strict=True)
            if shown.range.start <= at <= shown.range.end
        ]
        parts += map(described, dict.fromkeys(codes))
    content = types.MarkupContent(types.MarkupKind.Markdown, "\n\n---\n\n".join(parts))
    return types.Hover(content, range) if parts else None


async def _definition(ls: Server, params: types.DefinitionParams) -> types.Location | None:
    uri = params.text_document.uri
    span = await ls.process.ask("base", ls.document(uri), ls.view(uri).place(params.position))
    if span is None:
        return None
    path = str(Path(span.file).absolute())
    file = next((other for other in ls.states if to_path(other) == path), from_fs_path(path) or "")
    return types.Location(file, ls.view(uri).range(span))


def _actions(ls: Server, params: types.CodeActionParams) -> list[types.CodeAction]:
    uri, range = params.text_document.uri, params.range
    state = ls.states.get(uri, State())
    if state.text != ls.text(uri):
        return []
    return [
        ls.view(uri).action(fix, uri, shown)
        for shown, (_, fix) in zip(state.shown, state.checked.diagnostics, strict=True)
        if fix is not None and shown.range.start <= range.end and range.start <= shown.range.end
    ]


FEATURES: dict[str, Callable[..., Any]] = {
    types.INITIALIZE: _initialize,
    types.INITIALIZED: _initialized,
    types.SHUTDOWN: _ending,
    types.TEXT_DOCUMENT_DID_OPEN: _opened,
    types.TEXT_DOCUMENT_DID_CHANGE: _changed,
    types.TEXT_DOCUMENT_DID_SAVE: _saved,
    types.TEXT_DOCUMENT_DID_CLOSE: _closed,
    types.WORKSPACE_DID_CHANGE_WATCHED_FILES: _saved,
    types.TEXT_DOCUMENT_HOVER: _hover,
    types.TEXT_DOCUMENT_DEFINITION: _definition,
    types.TEXT_DOCUMENT_CODE_ACTION: _actions,
}


def make_server() -> Server:
    """Create a server with every feature, without starting it."""
    server = Server()
    kinds = types.CodeActionOptions(code_action_kinds=[types.CodeActionKind.QuickFix])
    for name, feature in FEATURES.items():
        server.feature(name, kinds if feature is _actions else None)(feature)
    return server
