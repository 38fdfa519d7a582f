"""`recipe schema`."""

from __future__ import annotations

import json

from recipec.compiler.cli.arguments.editors import SchemaArguments
from recipec.spec.schema import json_schema


def schema(args: SchemaArguments) -> None:
    """Run `recipe schema`."""
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
