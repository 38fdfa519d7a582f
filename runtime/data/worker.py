"""A process that tokenizes: it reads pickled chunks of rows from stdin, and writes pickled samples to stdout.

runtime.data.tokenizing starts it; it ends when its stdin ends.
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
    """Serve until stdin ends."""
    # Ctrl-C goes to the whole process group; this process ends when its parent closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = sys.stdin.buffer
    # Output of libraries must not come between the answers.
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
        os._exit(1)  # the parent has ended
