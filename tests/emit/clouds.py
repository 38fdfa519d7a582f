"""A fake cloud in a folder: its gcloud has folders as machines, and runs commands in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO

from recipec.compiler.artifacts.runtime import runtime_files

GCLOUD = r"""#!/usr/bin/env bash
# $CLOUD: account, vms/NAME/state, vms/NAME/host-N/ (a home folder each), queue/NAME (states yet to come, a
# line each), labels/NAME (the fields that describe prints after the state).
trap 'exit 130' INT # where bash waits for a command that has ended well, a Ctrl-C is lost without
if [[ "$1" == config ]]; then cat "$CLOUD/account"; exit; fi
printf '%s\n' "$*" >> "$CLOUD/calls"
[[ "$1" == storage ]] && exit 0
if [[ -e "$CLOUD/refusal" ]]; then cat "$CLOUD/refusal" >&2; exit 1; fi
[[ "$1" == alpha ]] && shift
group="$3" verb="$4" name="$5"
shift 5
worker=0 command='' count=1 prefix='' labels='' files=()
for word; do
    case "$word" in
        --worker=*) worker="${word#*=}" ;;
        --command=*) command="${word#*=}" ;;
        --node-count=*) count="${word#*=}" ;;
        --node-prefix=*) prefix="${word#*=}" ;;
        --labels=*) labels="$(tr ',' '\n' <<< "${word#*=}" | cut -d = -f 2 | paste -s -)" ;;
        --*) ;;
        *) files+=("$word") ;;
    esac
done
make() {
    local i
    for ((i = 0; i < $(< "$CLOUD/hosts"); i++)); do mkdir -p "$CLOUD/vms/$1/host-$i"; done
    echo READY > "$CLOUD/vms/$1/state"
}
machines() {
    if [[ "$worker" == all ]]; then echo "$CLOUD/vms/$1"/host-*; else echo "$CLOUD/vms/$1/host-$worker"; fi
}
mkdir -p "$CLOUD/labels"
if [[ "$verb" == create ]]; then echo "$labels" > "$CLOUD/labels/$name"; fi
labeled() {
    printf '%s\t%s\n' "$1" "$(cat "$CLOUD/labels/$name")"
}
case "$group $verb" in
    "tpu-vm describe")
        [[ -e "$CLOUD/vms/$name" ]] || { echo "ERROR: NOT_FOUND: $name" >&2; exit 1; }
        labeled "$(< "$CLOUD/vms/$name/state")"
        ;;
    "tpu-vm create")
        [[ ! -e "$CLOUD/full" ]] || { rm "$CLOUD/full"; echo "no more capacity" >&2; exit 1; }
        make "$name"
        ;;
    "tpu-vm delete") rm -r "$CLOUD/vms/$name" ;;
    "queued-resources create")
        mkdir -p "$CLOUD/queue"
        printf 'WAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE\n' > "$CLOUD/queue/$name"
        if [[ -n "$prefix" ]]; then
            for ((i = 0; i < count; i++)); do make "$prefix-$i"; done
        else
            make "$name"
        fi
        ;;
    "queued-resources describe")
        [[ -e "$CLOUD/queue/$name" ]] || { echo "ERROR: NOT_FOUND: $name" >&2; exit 1; }
        labeled "$(head -n 1 "$CLOUD/queue/$name")"
        if (($(wc -l < "$CLOUD/queue/$name") > 1)); then sed -i 1d "$CLOUD/queue/$name"; fi
        ;;
    "queued-resources delete") rm -r "$CLOUD/queue/$name" "$CLOUD/vms/$name"* ;;
    "tpu-vm ssh")
        status=0 jobs=()
        for home in $(machines "$name"); do
            fault="$CLOUD/fault-${home##*-}"
            if [[ -s "$fault" ]]; then
                sed -i 1d "$fault"
                status=255
            elif [[ -d "$home" ]]; then
                # In a session of its own: a terminal's Ctrl-C does not reach a machine.
                (cd "$home" && HOME="$home" HOST="$name-${home##*-}" exec setsid bash -c "$command") &
                jobs+=("$!")
            else
                status=255
            fi
        done
        for job in "${jobs[@]}"; do wait "$job" || status="$?"; done
        exit "$status"
        ;;
    "tpu-vm scp")
        if [[ "$name" == *:* ]]; then
            # The other side expands the stars.
            cp -r "$CLOUD/vms/${name%%:*}/host-$worker"/${name#*:} "${files[0]}"
        else
            node="${files[0]%%:*}" to="${files[0]#*:}"
            for home in $(machines "$node"); do cp -p "$name" "$home/${to:-${name##*/}}"; done
        fi
        ;;
    *) echo "this gcloud has no $group $verb" >&2; exit 2 ;;
esac
"""

PYTHON3 = rf"""#!/usr/bin/env bash
# pip and uv of a host; the environment has stand-ins of train.py's interpreter and of hf.
if [[ "$2" == runtime.launch ]]; then exec {sys.executable} "$@"; fi
echo "$HOST $*" >> "$CLOUD/python3"
[[ "$*" == "-m uv venv"* ]] || exit 0
mkdir -p venv/bin
cp "$CLOUD/bin/trainer" venv/bin/python
cp "$CLOUD/bin/hf" venv/bin/hf
"""

HF = """#!/usr/bin/env bash
echo "$HOST $* token=${HF_TOKEN:-none}" >> "$CLOUD/hf"
"""

DF = """#!/usr/bin/env bash
echo Avail
cat "$CLOUD/free" 2> /dev/null || echo 1000000
"""

SLEEP = """#!/usr/bin/env bash
# Whatever is waited for comes quickly here.
exec /bin/sleep 0.05
"""

TRAINER = r"""#!/usr/bin/env bash
# Does what the next line of $CLOUD/plan-HOST says: a status to end with, or `wait` for the file $CLOUD/go.
plan="$CLOUD/plan-$HOST"
next="$(head -n 1 "$plan" 2> /dev/null)"
[[ ! -s "$plan" ]] || sed -i 1d "$plan"
trap 'echo "saved at a signal"; exit 143' TERM
echo "$HOST $*" >> "$CLOUD/trainings"
if [[ "$1" == *probe.py && "$next" != wait ]]; then echo "{}" > probe.json; fi
echo "step 1 on $HOST"
mkdir -p sample/logs && echo "process of $HOST" > "sample/logs/process-${HOST##*-}.log"
if [[ "$next" == wait ]]; then
    until [[ -e "$CLOUD/go" ]]; do /bin/sleep 0.05; done
fi
[[ "$next" =~ ^[0-9]+$ ]] || next=0
exit "$next"
"""


def launch_scripts() -> dict[str, bytes]:
    """Return the runtime's files that run before anything is installed, by path relative to it."""
    files = runtime_files()
    return {path: files[path] for path in files if path == "__init__.py" or path.startswith("launch/")}


@dataclass
class Ran:
    """The result of a script."""

    status: int
    out: str
    err: str


@dataclass
class Started:
    """A running script.

    Its output goes into files. A pipe would stay open as long as a machine of the cloud has a process that
    the script's connection started.
    """

    process: subprocess.Popen[bytes]
    out: IO[str]
    err: IO[str]

    def interrupt(self) -> None:
        """Send the script a terminal's Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ends(self) -> Ran:
        """Wait for the end."""
        status = self.process.wait(60)
        with self.out, self.err:
            self.out.seek(0)
            self.err.seek(0)
            return Ran(status, self.out.read(), self.err.read())


class Cloud:
    """A folder with a fake gcloud, a laptop's folder with launch/ and runtime/, and a log of calls.

    Args:
        folder: an empty folder.
        files: the artifact's files.
        name: the artifact's name.
        hosts: the hosts of each VM.
    """

    def __init__(self, folder: Path, files: Mapping[str, bytes], name: str, hosts: int) -> None:
        self.folder, self.name, self.vm = folder, name, f"{name}-ada"
        self.laptop = folder / "laptop"
        commands = folder / "bin"
        commands.mkdir()
        stubs = {"gcloud": GCLOUD, "python3": PYTHON3, "hf": HF, "df": DF, "sleep": SLEEP, "trainer": TRAINER}
        for stub, text in stubs.items():
            (commands / stub).write_text(text)
            (commands / stub).chmod(0o755)
        (folder / "hosts").write_text(str(hosts))
        self.sign_in("ada@example.com")
        packed = {f"{name}/{path}": content for path, content in files.items()}
        packed |= {f"runtime/{path}": content for path, content in launch_scripts().items()}
        for path, content in packed.items():
            target = self.laptop / "generated" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        with tarfile.open(self.laptop / f"{name}.tar.gz", "w:gz") as tar:
            for path, content in packed.items():
                info = tarfile.TarInfo(path)
                info.size = len(content)
                tar.addfile(info, BytesIO(content))

    def sign_in(self, account: str) -> None:
        """Set the account of gcloud."""
        (self.folder / "account").write_text(f"{account}\n")

    def environment(self, **more: str) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:/usr/bin:/bin"
        own = {"PATH": path, "HOME": str(self.laptop), "CLOUD": str(self.folder), "ZONE": "a-zone"}
        return own | {"WEIGHTS": "weights", "PYTHONDONTWRITEBYTECODE": "1"} | more

    def start(self, *arguments: str, **environ: str) -> Started:
        command = ["bash", f"generated/{self.name}/launch/tpu-vm.sh", *arguments]
        said = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 (closed with the script's end)
        process = subprocess.Popen(
            command,
            cwd=self.laptop,
            env=self.environment(**environ),
            stdin=subprocess.DEVNULL,
            stdout=said[0],
            stderr=said[1],
            start_new_session=True,
        )
        return Started(process, *said)

    def run(self, *arguments: str, **environ: str) -> Ran:
        return self.start(*arguments, **environ).ends()

    def plan(self, host: str, *statuses: object) -> None:
        """Set the exit statuses of a host's successive trainings. Without a plan, they are 0."""
        (self.folder / f"plan-{host}").write_text("".join(f"{status}\n" for status in statuses))

    def lines(self, record: str) -> list[str]:
        path = self.folder / record
        return path.read_text().splitlines() if path.exists() else []

    def calls(self, *words: str) -> list[str]:
        """Return the gcloud commands that contain all of these words."""
        return [line for line in self.lines("calls") if all(word in line for word in words)]

    def home(self, worker: int, vm: str | None = None) -> Path:
        return self.folder / "vms" / (vm or self.vm) / f"host-{worker}"

    def preempt(self, vm: str | None = None) -> None:
        """Preempt a VM: remove its processes and disks, and set its state."""
        self.end()
        machine = self.folder / "vms" / (vm or self.vm)
        for host in machine.glob("host-*"):
            host.rename(self.folder / f"taken-{len(list(self.folder.glob('taken-*')))}")
        (machine / "state").write_text("PREEMPTED\n")

    def close(self) -> None:
        """Kill all remaining processes, which would outlive the test and might use a core."""
        self.end()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"CLOUD={self.folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)

    def end(self) -> None:
        """Kill the trainings."""
        for file in self.folder.glob("vms/*/host-*/train.pid"):
            try:
                os.kill(int(file.read_text()), signal.SIGKILL)
            except (ProcessLookupError, ValueError):
                continue
