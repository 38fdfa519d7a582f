"""A Docker engine for the tests only: Debian's package, with its socket and data in build/."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e import debian

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "docker"

SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))

FLAGS = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=overlay2")
"""Only the host's network, as in serving on TPUs: nothing on the machine changes."""

CAPABILITIES = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE "
    "NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO "
    "SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME "
    "SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG "
    "WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
)
"""Linux's capabilities, by their numbers."""

RUNTIME = """\
#!{python} -IS
import json, os, sys

words = sys.argv[1:]
for flag, keys in (("--bundle", ("process",)), ("--process", ())):
    if flag in words and ("create" in words or "exec" in words):
        path = words[words.index(flag) + 1]
        path = os.path.join(path, "config.json") if keys else path
        with open(path) as file:
            spec = json.load(file)
        process = spec["process"] if keys else spec
        for names in process.get("capabilities", {{}}).values():
            names[:] = [name for name in names if name not in {missing}]
        with open(path, "w") as file:
            json.dump(spec, file)
os.execv({runc!r}, [{runc!r}, *words])
"""
"""A runc for a machine that lacks capabilities: privileged containers get those that it has."""

START_SECONDS = 60

MORTAL = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
"""The engine ends with this process, however this process ends: PR_SET_PDEATHSIG, SIGTERM."""


@dataclass(frozen=True)
class Engine:
    """A running engine.

    Attributes:
        host: DOCKER_HOST's value.
        client: the engine's own command line.
        config: DOCKER_CONFIG's value: a folder with the plug-in `docker compose`, and without registry
            passwords.
    """

    host: str
    client: str
    config: Path

    def environment(self, **more: str) -> dict[str, str]:
        """Return this process's environment with `more`, in which `docker` and its SDK find the engine."""
        return {**os.environ, "DOCKER_HOST": self.host, "DOCKER_CONFIG": str(self.config), **more}

    def docker(self, *arguments: str, check: bool = True, **more: str) -> str:
        """Run `docker ARGUMENTS` and return both output streams.

        Args:
            check: whether the command must succeed.
            more: environment variables.
        """
        command = [self.client, *arguments]
        done = subprocess.run(
            command, env=self.environment(**more), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}"
        return done.stdout

    def containers(self) -> list[str]:
        """Return the names of all containers, running or not."""
        return self.docker("ps", "--all", "--format", "{{.Names}}").split()


def install() -> str:
    """Return dockerd's path, and install Debian's package if it is missing (45 s)."""
    return debian.program("dockerd", "docker.io", SYSTEM_PATH)


@contextmanager
def engine() -> Iterator[Engine]:
    """Run an engine until the block ends, without containers, and with the images of earlier engines.

    Only one runs at a time: a second one waits until the first one ends.
    """
    daemon = install()
    FOLDER.mkdir(parents=True, exist_ok=True)
    host = f"unix://{FOLDER / 'docker.sock'}"
    # If there are two clients, use Debian's: newer clients need a plug-in for BuildKit.
    client = "/usr/bin/docker" if os.access("/usr/bin/docker", os.X_OK) else shutil.which("docker")
    assert client is not None, "no docker command"
    flags = [*FLAGS, "--data-root", str(FOLDER / "data"), "--exec-root", str(FOLDER / "exec")]
    flags += _runtime()
    flags += ["--pidfile", str(FOLDER / "pid"), "--host", host]
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # A private mount namespace: nobody else sees the engine's mounts, and they end with it.
        apart = [shutil.which("unshare") or "/usr/bin/unshare", "--mount", "--propagation", "private"]
        with (FOLDER / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", MORTAL, *apart, daemon, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            running = Engine(host, client, _config())
            _wait(running, process)
            clear(running)
            yield running
            clear(running)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def clear(engine: Engine) -> None:
    """Remove all containers and volumes, and the build cache of layers that no image has."""
    if containers := engine.docker("ps", "--all", "--quiet").split():
        engine.docker("rm", "--force", "--volumes", *containers)
    if volumes := engine.docker("volume", "ls", "--quiet").split():
        engine.docker("volume", "rm", "--force", *volumes)
    engine.docker("image", "prune", "--force")
    # BuildKit keeps the layers of a removed base image.
    engine.docker("builder", "prune", "--all", "--force")


def _config() -> Path:
    """Write the client's settings, with the path of `docker compose`, which comes from PyPI."""
    plugin = FOLDER / "config" / "cli-plugins" / "docker-compose"
    plugin.parent.mkdir(parents=True, exist_ok=True)
    plugin.unlink(missing_ok=True)
    plugin.symlink_to(Path(sys.executable).with_name("docker-compose"))
    return plugin.parents[1]


def _runtime() -> list[str]:
    """Return runtime flags for a machine that lacks capabilities, because an engine requests all of them."""
    status = Path("/proc/self/status").read_text()
    bounds = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd")), 16)
    names = enumerate(CAPABILITIES.split())
    missing = [f"CAP_{name}" for number, name in names if not bounds >> number & 1]
    runc = shutil.which("runc", path=SYSTEM_PATH)
    if not missing or runc is None:
        return []
    program = FOLDER / "runc"
    program.write_text(RUNTIME.format(python=sys.executable, missing=missing, runc=runc))
    program.chmod(0o755)
    return ["--add-runtime", f"narrowed={program}", "--default-runtime", "narrowed"]


def _wait(engine: Engine, process: subprocess.Popen[bytes]) -> None:
    """Wait until the engine answers."""
    deadline = time.monotonic() + START_SECONDS
    while "Server:" not in engine.docker("version", check=False):
        log = FOLDER / "log"
        code = process.poll()
        assert code is None, f"dockerd ended with {code}\n{log.read_text(errors='replace')[-4000:]}"
        assert time.monotonic() < deadline, f"no engine\n{log.read_text(errors='replace')[-4000:]}"
        time.sleep(0.2)
