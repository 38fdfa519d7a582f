"""A process that tokenizes: reads chunks of rows from stdin, writes samples to stdout, both pickled.

It is started by runtime.data.tokenizing, and ends when its stdin does.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from typing import Any

from ..errors import UserError
from .encoding import Encoder


def main() -> None:
    """Serves until there is nothing left to read."""
    # A Ctrl-C goes to the whole group; this process ends when its parent closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = sys.stdin.buffer
    # Whatever a library prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    encoder = None
    try:
        while True:
            try:
                request = pickle.load(requests)
            except EOFError:
                return
            try:
                if encoder is None:
                    encoder = Encoder(request)
                    continue
                answer: tuple[str, Any] = ("samples", encoder.encode(*request))
            except UserError as error:
                answer = ("user", (error.message, error.help))
            except Exception:
                answer = ("fault", traceback.format_exc())
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
    except BrokenPipeError:
        os._exit(1)  # the parent is gone
