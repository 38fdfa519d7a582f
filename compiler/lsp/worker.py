"""The process that checks and explains: questions on stdin, answers on stdout, each a pickle.

A recipe can take long to check, by its size or by a regular expression in it, and the server goes on
answering meanwhile. The process ends with its stdin.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
import traceback
from typing import BinaryIO

from compiler.lsp import analysis

HEAD = struct.Struct(">Q")
"""The length of the pickle that follows, in bytes."""


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answers until there are no more questions: (name of a function of `analysis`, its arguments)."""
    while len(head := questions.read(HEAD.size)) == HEAD.size:
        name, arguments = pickle.loads(questions.read(HEAD.unpack(head)[0]))
        try:
            answer = (True, getattr(analysis, name)(*arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        packed = pickle.dumps(answer)
        answers.write(HEAD.pack(len(packed)) + packed)
        answers.flush()


def main() -> None:
    # What anything prints goes to the log rather than among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Imported before the first question, that it is answered at once.
    import compiler.explain
    import compiler.lower  # noqa: F401

    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
