"""Apply `--set path=value` arguments of the command line."""

from __future__ import annotations

from collections.abc import Sequence

from recipec.spec import key_paths
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, Span
from recipec.spec.key_paths import Part
from recipec.spec.tree import Entry, Items, Mapping, Node, Provenance, Scalar
from recipec.spec.yaml_document import E0005, Refused, read

FILE = "--set"


def apply(root: Mapping, arguments: Sequence[str]) -> list[Diagnostic]:
    """Put every argument's value into the tree, in order; return the diagnostics about the arguments."""
    diagnostics: list[Diagnostic] = []
    for number, argument in enumerate(arguments, 1):
        try:
            keys, value, problems = _parse(argument, number)
            diagnostics += problems
            if value is not None:
                _put(root, keys, value)
        except Refused as refused:
            diagnostics.append(refused.diagnostic)
    return diagnostics


E0030 = Code(
    "E0030",
    "`--set` is not PATH=VALUE",
    cause="The argument has no `=`, no valid path before it, or no value after it.",
    cure="Write for example `--set train.steps=100`, or `--set lora=null` to remove a section.",
)

E0033 = Code(
    "E0033",
    "key cannot be set on the command line",
    cause="`extends` is read before `--set` is applied.",
    cure="Write the key into the file.",
)


def _parse(argument: str, number: int) -> tuple[list[tuple[Part, Provenance]], Node | None, list[Diagnostic]]:
    """Return the path's parts with their positions, the value, and the value's diagnostics."""

    def place(start: int, end: int) -> Provenance:
        return Provenance("set", Span(FILE, number, start + 1, argument, max(1, end - start)))

    def refused(code: Code, message: str, help: str, start: int, end: int, path: str = "") -> Refused:
        return Refused(Diagnostic(code, message, path, help, place(start, end).span))

    if len(argument.splitlines()) > 1:
        argument = argument.splitlines()[0]
        raise refused(E0030, "a --set argument must be one line", "--set 'mesh.axes={fsdp: 2, tp: 2}'", 0, 1)
    parts, end = key_paths.prefix(argument)
    equals = end + len(argument[end:]) - len(argument[end:].lstrip(" "))
    if not parts or argument[equals : equals + 1] != "=":
        if "=" not in argument:
            message = "a --set argument is PATH=VALUE; the `=` is missing"
            raise refused(E0030, message, "--set train.steps=100", len(argument), len(argument))
        raise refused(E0030, "this is not a path", "--set train.steps=100", end, argument.index("="))
    keys = [(part, place(start, end)) for part, start, end in parts]
    if parts[0][0] == "extends":
        message = "`extends` cannot be set on the command line"
        raise refused(E0033, message, "write it into the file", parts[0][1], parts[0][2], "extends")
    after = equals + 1
    document = read(" " * after + argument[after:], FILE, "set", number, shown=argument)
    if document.root is None and [d.code for d in document.diagnostics] == [E0005]:
        if argument[after:].strip() not in ("null", "~", "Null", "NULL"):
            path = key_paths.join([part for part, _, _ in parts])
            raise refused(E0030, "no value follows the `=`", f"--set {path}=null", equals, after, path)
        start = after + len(argument[after:]) - len(argument[after:].lstrip())
        return keys, Scalar(None, place(start, len(argument.rstrip()))), []
    return keys, document.root, document.diagnostics


E0031 = Code(
    "E0031",
    "`--set` path does not exist",
    cause="A part of the path other than the last is a single value or a list, which has no keys.",
    cure="Set the section as a whole, or correct the path.",
)

E0032 = Code(
    "E0032",
    "`--set` index out of range",
    cause="The list has no item with that index. Indices start at 0.",
    cure="Use an index of the list, or set the whole list.",
)


def _put(root: Mapping, keys: list[tuple[Part, Provenance]], value: Node) -> None:
    """Put the value at the path; create sections on the way that are absent or null."""
    node: Node = root
    for depth, (part, place) in enumerate(keys):
        last = depth == len(keys) - 1
        done = [key for key, _ in keys[:depth]]
        if isinstance(part, int):
            if not isinstance(node, Items):
                raise _refused(
                    E0031,
                    f"`{key_paths.join(done)}` is not a list",
                    done,
                    place,
                    f"--set '{key_paths.join(done)}=[...]' sets it as a whole",
                )
            if part >= len(node.items):
                count = len(node.items)
                has = f"{count} item{'' if count == 1 else 's'}" if count else "no items"
                raise _refused(
                    E0032,
                    f"`{key_paths.join(done)}` has {has}; there is no [{part}]",
                    done,
                    place,
                    "items count from 0; set the list as a whole to make it longer",
                )
            items = node.items
            items[part] = node = value if last else _opened(items[part], keys[depth + 1], [*done, part])
        else:
            if not isinstance(node, Mapping):
                what = (
                    "is a list; its items are [0], [1], ..."
                    if isinstance(node, Items)
                    else "is not a section"
                )
                message = f"`{key_paths.join(done)}` {what}, so it has no key `{part}`"
                help = f"--set '{key_paths.join(done)}=...' sets it as a whole"
                raise _refused(E0031, message, done, place, help)
            entries, old = node.entries, node.entries.get(part)
            node = value if last else _opened(old.node if old else None, keys[depth + 1], [*done, part])
            entries[part] = Entry(place if last or old is None else old.key, node)


def _opened(node: Node | None, following: tuple[Part, Provenance], path: list[Part]) -> Node:
    """Return the node to continue from: an empty section for none or null, a mapping for a source path."""
    part, place = following
    if node is None or (isinstance(node, Scalar) and node.value is None):
        return Items([], place) if isinstance(part, int) else Mapping({}, place)
    is_source = path[0] == "data" and len(path) == 3 and path[1] in ("train", "eval")
    if is_source and isinstance(node, Scalar) and isinstance(node.value, str):
        return Mapping({"path": Entry(node.place, node)}, node.place)
    return node


def _refused(code: Code, message: str, done: list[Part], place: Provenance, help: str) -> Refused:
    return Refused(Diagnostic(code, message, key_paths.join(done), help, place.span))
