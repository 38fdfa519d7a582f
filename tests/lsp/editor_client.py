"""An editor for tests: pygls's own client, and `recipe lsp` in another process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.lsp.client import LanguageClient

SECONDS = 60.0
"""The limit for an answer, on a busy machine."""


class Editor:
    """An editor with one server.

    Args:
        folder: the server's working folder.
        encodings: the position encodings that it offers.
        options: initializationOptions.
    """

    def __init__(self, folder: Path, encodings: tuple[str, ...] = (), options: Any = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = LanguageClient("tests", "1")
        self.published: dict[str, list[types.PublishDiagnosticsParams]] = {}
        self.logged: list[str] = []
        self.versions: dict[str, int] = {}

        @self.client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def _(params: types.PublishDiagnosticsParams) -> None:
            self.published.setdefault(params.uri, []).append(params)

        @self.client.feature(types.WINDOW_LOG_MESSAGE)
        def _(params: types.LogMessageParams) -> None:
            self.logged.append(params.message)

        command = (sys.executable, "-m", "recipec.compiler.cli.main", "lsp", "--stdio")
        self.run(self.client.start_io(*command, cwd=str(folder)))
        general = types.GeneralClientCapabilities(
            position_encodings=[types.PositionEncodingKind(name) for name in encodings]
        )
        shown = types.PublishDiagnosticsClientCapabilities(related_information=True)
        self.initialized = self.ask(
            self.client.initialize_async(
                types.InitializeParams(
                    capabilities=types.ClientCapabilities(
                        general=general if encodings else None,
                        text_document=types.TextDocumentClientCapabilities(publish_diagnostics=shown),
                    ),
                    initialization_options=options,
                )
            )
        )
        self.client.initialized(types.InitializedParams())

    @property
    def server(self) -> asyncio.subprocess.Process:
        process = self.client._server
        assert process is not None
        return process

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, SECONDS))

    def ask(self, work: Any) -> Any:
        async def waited() -> Any:
            return await work

        return self.run(waited())

    def open(self, path: Path, text: str | None = None) -> str:
        """Open a file, optionally with another text than the one on disk, and return its address."""
        uri = path.as_uri()
        text = path.read_text(encoding="utf-8") if text is None else text
        self.versions[uri] = 1
        self.published.pop(uri, None)
        self.client.text_document_did_open(
            types.DidOpenTextDocumentParams(types.TextDocumentItem(uri, "yaml", 1, text))
        )
        return uri

    def change(self, uri: str, text: str) -> None:
        self.versions[uri] += 1
        self.client.text_document_did_change(
            types.DidChangeTextDocumentParams(
                types.VersionedTextDocumentIdentifier(self.versions[uri], uri),
                [types.TextDocumentContentChangeWholeDocument(text)],
            )
        )

    def close(self, uri: str) -> None:
        self.client.text_document_did_close(
            types.DidCloseTextDocumentParams(types.TextDocumentIdentifier(uri))
        )

    def diagnostics(self, uri: str) -> list[types.Diagnostic]:
        """Return the diagnostics of the document's current text."""

        def made() -> types.PublishDiagnosticsParams | None:
            found = self.published.get(uri)
            return found[-1] if found and found[-1].version == self.versions[uri] else None

        return list(self.until(made).diagnostics)

    def until(self, condition: Any) -> Any:
        """Wait until a condition gives something."""
        end = time.monotonic() + SECONDS
        while not (found := condition()):
            assert time.monotonic() < end, "nothing came"
            assert self.server.returncode is None, "the server has ended"
            self.run(asyncio.sleep(0.01))
        return found

    def hover(self, uri: str, line: int, character: int) -> str:
        found = self.ask(self.client.text_document_hover_async(types.HoverParams(*at(uri, line, character))))
        return found.contents.value if found else ""

    def definition(self, uri: str, line: int, character: int) -> types.Location | None:
        found = self.ask(
            self.client.text_document_definition_async(types.DefinitionParams(*at(uri, line, character)))
        )
        return found if found is None or isinstance(found, types.Location) else found[0]

    def actions(self, uri: str, range: types.Range) -> list[types.CodeAction]:
        context = types.CodeActionContext(diagnostics=[])
        params = types.CodeActionParams(types.TextDocumentIdentifier(uri), range, context)
        return self.ask(self.client.text_document_code_action_async(params)) or []

    def end(self) -> int:
        """Send shutdown and exit, and return the server's exit status."""
        self.ask(self.client.shutdown_async(None))
        self.client.exit(None)
        return self.gone()

    def gone(self) -> int:
        """Wait for the server's end, and return its exit status."""
        status = self.run(self.server.wait())
        self.run(self.client.stop())
        self.loop.close()
        assert isinstance(status, int)
        return status


def at(uri: str, line: int, character: int) -> tuple[types.TextDocumentIdentifier, types.Position]:
    return types.TextDocumentIdentifier(uri), types.Position(line, character)


def checking(server: int) -> int:
    """Return the id of a server's checking process."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(server) and b"spawn_main" in (path / "cmdline").read_bytes():
                return int(path.name)
    raise AssertionError(f"{server} has started no process that checks")
