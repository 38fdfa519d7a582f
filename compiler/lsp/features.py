"""What the server does when the editor asks or tells it something."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from lsprotocol import types
from pygls.uris import from_fs_path

from compiler.lsp import diagnostics, hover, places
from compiler.lsp.analysis import Explanation, Place
from compiler.lsp.completion import complete
from compiler.lsp.pages import pages
from compiler.lsp.process import Unanswered
from compiler.lsp.scan import scan
from compiler.lsp.server import Server, State, log, to_path

EXPLAIN_SECONDS = 10.0
"""What explaining may take."""

Answer = TypeVar("Answer")


def guarded(
    server: Server, feature: Callable[[Server, Any], Awaitable[Answer]]
) -> Callable[[Any], Awaitable[Answer | None]]:
    """A feature that answers nothing, and writes to the log, where it fails."""

    async def safe(params: Any) -> Answer | None:
        try:
            return await feature(server, params)
        except Unanswered as reason:
            server.tell(str(reason))
        except Exception:
            log.exception("%s failed", feature.__name__)
            server.tell(f"{feature.__name__} failed: see the output of `recipe lsp`")
        return None

    return safe


async def _initialized(server: Server, params: Any) -> None:
    await server.process.start()
    watching = server.client_capabilities.workspace
    files = watching.did_change_watched_files if watching else None
    if files and files.dynamic_registration:
        watchers = [types.FileSystemWatcher(glob_pattern="**/*.{yaml,yml,json,jsonl,py,jinja}")]
        options = types.DidChangeWatchedFilesRegistrationOptions(watchers=watchers)
        wanted = types.Registration("watched", types.WORKSPACE_DID_CHANGE_WATCHED_FILES, options)
        await server.client_register_capability_async(types.RegistrationParams([wanted]))


async def _ending(server: Server, params: Any) -> None:
    server.asked_to_end = True
    server.states.clear()
    server.process.stop()


async def _opened(server: Server, params: types.DidOpenTextDocumentParams) -> None:
    uri = params.text_document.uri
    server.states[uri] = State()
    server.schedule(uri, 0)
    server.schedule_all(uri)


async def _changed(server: Server, params: types.DidChangeTextDocumentParams) -> None:
    server.schedule(params.text_document.uri)
    server.schedule_all(params.text_document.uri)


async def _saved(server: Server, params: types.DidSaveTextDocumentParams) -> None:
    server.schedule_all()


async def _closed(server: Server, params: types.DidCloseTextDocumentParams) -> None:
    uri = params.text_document.uri
    server.states.pop(uri, None)
    server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, []))
    server.schedule_all(uri)


async def _watched(server: Server, params: types.DidChangeWatchedFilesParams) -> None:
    server.schedule_all()


async def _completion(server: Server, params: types.CompletionParams) -> types.CompletionList:
    uri = params.text_document.uri
    state = server.states.get(uri, State())
    position = (params.position.line, params.position.character)
    folder = Path(to_path(uri)).parent
    items = await asyncio.to_thread(complete, server.text(uri), position, folder, state.analysis.raw)
    return types.CompletionList(is_incomplete=False, items=items)


async def _hover(server: Server, params: types.HoverParams) -> types.Hover | None:
    uri, text = params.text_document.uri, server.text(params.text_document.uri)
    offset = text.offset((params.position.line, params.position.character))
    outline, state = scan(text.source), server.states.get(uri, State())
    parts, extent = [], None
    found = hover.target(outline, offset)
    if found is not None:
        path, extent, _ = found
        said = hover.text_of(outline, offset, await _explained(server, uri, path), to_path(uri))
        parts += [said] if said else []
    if state.checked == text.source:
        codes = [
            item.diagnostic.code for item in state.shown if _covers(item.diagnostic.range, params.position)
        ]
        parts += [diagnostics.described(str(code)) for code in dict.fromkeys(codes)]
    if not parts:
        return None
    content = types.MarkupContent(types.MarkupKind.Markdown, "\n\n---\n\n".join(parts))
    return types.Hover(content, diagnostics.range_of(text, *extent) if extent else None)


async def _explained(server: Server, uri: str, path: str) -> Explanation | None:
    try:
        made: Explanation | None = await server.process.ask(
            EXPLAIN_SECONDS, "explain", server.document(uri), path
        )
        return made
    except Unanswered as reason:
        server.tell(str(reason))
        return None


def _covers(range: types.Range, position: types.Position) -> bool:
    return range.start <= position <= range.end


async def _definition(server: Server, params: types.DefinitionParams) -> types.Location | None:
    uri, text = params.text_document.uri, server.text(params.text_document.uri)
    outline = scan(text.source)
    offset = text.offset((params.position.line, params.position.character))
    found = outline.at(offset)
    if found is None:
        return None
    entry, _ = found
    named = places.file_named(entry, outline, Path(to_path(uri)).parent)
    if named is not None:
        return named
    path = hover.target(outline, offset)
    place: Place | None = await server.process.ask(
        EXPLAIN_SECONDS, "inherited", server.document(uri), path[0] if path else ""
    )
    return None if place is None else _location(server, place)


def _location(server: Server, place: Place) -> types.Location:
    uri = next((uri for uri in server.states if to_path(uri) == place.file), None)
    if uri is None:
        return types.Location(from_fs_path(place.file) or "", diagnostics.range_in_file(place))
    text = server.text(uri)
    return types.Location(uri, diagnostics.range_of(text, *diagnostics.extent(place, text)))


async def _actions(server: Server, params: types.CodeActionParams) -> list[types.CodeAction]:
    uri, text = params.text_document.uri, server.text(params.text_document.uri)
    state = server.states.get(uri, State())
    if state.checked != text.source:
        return []
    out = []
    for item in state.shown:
        shown, fix = item.diagnostic.range, item.fix
        if fix is None or shown.end < params.range.start or params.range.end < shown.start:
            continue
        edit = types.TextEdit(diagnostics.range_of(text, fix.start, fix.end), fix.text)
        out.append(
            types.CodeAction(
                title=fix.title,
                kind=types.CodeActionKind.QuickFix,
                diagnostics=[item.diagnostic],
                is_preferred=True,
                edit=types.WorkspaceEdit(changes={uri: [edit]}),
            )
        )
    return out


async def _symbols(server: Server, params: types.DocumentSymbolParams) -> list[types.DocumentSymbol]:
    text = server.text(params.text_document.uri)
    return places.symbols(scan(text.source), text)


def make_server() -> Server:
    """A server with every feature; it has not started."""
    server = Server()

    @server.feature(types.INITIALIZE)
    def _(params: types.InitializeParams) -> None:
        options = params.initialization_options
        server.pages = pages(options.get("docs") if isinstance(options, dict) else None)

    triggers = types.CompletionOptions(trigger_characters=[":", " ", "[", "{", ",", "/", "-"])
    kinds = types.CodeActionOptions(code_action_kinds=[types.CodeActionKind.QuickFix])
    features: list[tuple[str, Any, Any]] = [
        (types.INITIALIZED, _initialized, None),
        (types.SHUTDOWN, _ending, None),
        (types.TEXT_DOCUMENT_DID_OPEN, _opened, None),
        (types.TEXT_DOCUMENT_DID_CHANGE, _changed, None),
        (types.TEXT_DOCUMENT_DID_SAVE, _saved, None),
        (types.TEXT_DOCUMENT_DID_CLOSE, _closed, None),
        (types.WORKSPACE_DID_CHANGE_WATCHED_FILES, _watched, None),
        (types.TEXT_DOCUMENT_COMPLETION, _completion, triggers),
        (types.TEXT_DOCUMENT_HOVER, _hover, None),
        (types.TEXT_DOCUMENT_DEFINITION, _definition, None),
        (types.TEXT_DOCUMENT_CODE_ACTION, _actions, kinds),
        (types.TEXT_DOCUMENT_DOCUMENT_SYMBOL, _symbols, None),
    ]
    for name, feature, options in features:
        server.feature(name, options)(guarded(server, feature))
    return server
