"""A small image whose `vllm` is a fake: a Python server that starts at once.

stand_in.json, in the folder of the weights, controls it, so that each test chooses its server's behavior:
answer_seconds.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from tests.e2e.docker_engine import Engine

NAME = "stand-in:2"

VLLM = r"""#!/usr/local/bin/python3
import json, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

arguments = sys.argv[1:]
told = {}
if os.path.exists("/model/stand_in.json"):
    told = json.load(open("/model/stand_in.json"))
say = lambda text: print(text, flush=True)
say("arguments: " + json.dumps(arguments))
say("environment: " + json.dumps(sorted(os.environ)))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/slow":
            say("a request is in flight")
            time.sleep(told.get("answer_seconds", 2))
        body = b"answered"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

class Server(ThreadingHTTPServer):
    daemon_threads = False  # requests in flight finish

host, port = (arguments[arguments.index(flag) + 1] for flag in ("--host", "--port"))
server = Server((host, int(port)), Handler)
def stop(*_):
    say("SIGTERM: finishing")
    threading.Thread(target=server.shutdown).start()
signal.signal(signal.SIGTERM, stop)
say("listening")
server.serve_forever()
server.server_close()
say("finished")
"""

MODULES = re.compile(
    r"^(test|idlelib|tkinter|turtledemo|lib2to3|ensurepip|site-packages|config-.*|__pycache__|pydoc_data)$"
)


def image(engine: Engine) -> str:
    """Return the image's name, and make the image if the engine does not have it."""
    if not engine.docker("image", "ls", "--quiet", NAME).strip():
        changes = ["--change", "ENV PATH=/usr/local/bin", "--change", "ENV LD_LIBRARY_PATH=/usr/local/lib"]
        subprocess.run(
            [engine.client, "import", *changes, "-", NAME],
            input=_root_file_system(),
            env=engine.environment(),
            stdout=subprocess.DEVNULL,
            check=True,
        )
    return NAME


def _root_file_system() -> bytes:
    """Archive this Python with its libraries, and `vllm`."""
    program, stdlib = Path(os.path.realpath(sys.executable)), Path(sysconfig.get_path("stdlib"))
    extensions = [
        path for path in stdlib.glob("lib-dynload/*.so") if not path.name.startswith(("_tk", "_test"))
    ]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for folder in ("dev", "proc", "sys", "tmp", "etc", "model", "cache"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(info)
        archive.add(program, "usr/local/bin/python3")
        for library in _libraries([program, *extensions]):
            if library.name.startswith("ld-"):
                archive.add(os.path.realpath(library), str(library).lstrip("/"))
            archive.add(os.path.realpath(library), f"usr/local/lib/{library.name}")
        for path in [*stdlib.glob("*.py"), *stdlib.glob("*/")]:
            if not MODULES.match(path.name):
                archive.add(path, f"usr/local/lib/{version}/{path.name}", filter=_without_caches)
        for name, text in {"usr/local/bin/vllm": VLLM, "etc/passwd": "root:x:0:0:root:/:/bin/sh\n"}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text.encode()), 0o755
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def _without_caches(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in info.name or "/test" in info.name else info


def _libraries(files: list[Path]) -> list[Path]:
    done = subprocess.run(["ldd", *map(str, files)], text=True, capture_output=True)
    return sorted(
        {Path(path) for path in re.findall(r"^\t(?:\S+ => )?(/\S+) \(0x", done.stdout, re.MULTILINE)}
    )
