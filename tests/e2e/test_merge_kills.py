"""Tests of merges of some hundred megabytes, in processes that are killed, interrupted or started twice."""

from __future__ import annotations

import filecmp
import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipec.runtime.errors import UserError
from recipec.runtime.merging.journal import JOURNAL, RECORD
from recipec.runtime.merging.output_folder import PARTIAL
from recipec.runtime.weights.checkpoint import CONFIG, INDEX, HFCheckpoint
from tests.runtime import artifacts
from tests.runtime.lives import ROOT, Life, Lives
from tests.runtime.llama_bases import TINY, write_base
from tests.runtime.runs import lora_section, save_run

pytestmark = pytest.mark.e2e

KILLS = 20
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
"""320 MB in bfloat16."""

SCRIPT = """
import sys
from pathlib import Path

sys.path.insert(0, {root!r})

from runtime.merging.merge import main
from runtime.settings import ModelSettings

ARTIFACT = Path(__file__).resolve().parent
MODEL = ModelSettings(id="./base", family="llama")

if __name__ == "__main__":
    sys.exit(
        main(
            ARTIFACT,
            MODEL,
            checkpoint={run!r},
            output="merged",
            dtype="bfloat16",
            max_shard_size="40MB",
            adapter=True,
        )
    )
"""


@dataclass
class Merges:
    """Merges of one base and one run, each in its own working folder."""

    lives: Lives
    place: Path
    seconds: float = 0.0
    """The duration of an undisturbed merge."""

    def begin(self, work: str) -> Life:
        return self.lives.begin(
            self.place / "merge.py", "--model", self.place / "base", "--output", self.place / work
        )

    @property
    def shards(self) -> int:
        return len(list((self.place / "whole" / "merged").glob("*.safetensors")))

    def finish(self, work: str) -> None:
        """Run the merge until it ends, and compare both folders with an undisturbed merge."""
        life = self.begin(work)
        assert life.wait() == 0, life.stderr
        assert "Traceback" not in life.stderr
        for folder in ("merged", "merged-adapter"):
            assert not differing(self.place / "whole" / folder, self.place / work / folder)


@pytest.fixture(scope="module")
def merges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Merges]:
    place = tmp_path_factory.mktemp("kills")
    base = HFCheckpoint.open(write_base(place / "base", TINY | SIZES, files=3))
    save_run(place / "run", base, lora_section(rank=16))
    (place / "merge.py").write_text(SCRIPT.format(root=str(ROOT), run=str(place / "run")))
    lives = Lives(artifacts.environment(place), tmp_path_factory.mktemp("lives"))
    merges = Merges(lives, place)
    try:
        assert merges.begin("whole").wait() == 0
        begun = time.monotonic()
        merges.finish("again")
        merges.seconds = time.monotonic() - begun
        shutil.rmtree(place / "again")
        yield merges
    finally:
        lives.close()
        shutil.rmtree(place)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def differing(one: Path, other: Path) -> set[str]:
    """Return the names of the files that differ between two folders."""
    both = names(one) & names(other)
    _, unlike, unread = filecmp.cmpfiles(one, other, both, shallow=False)
    return (names(one) ^ names(other)) | set(unlike) | set(unread)


def noted(folder: Path) -> set[str]:
    """Return the files that an unfinished folder's journal lists as complete."""
    journal = folder / JOURNAL
    return set(json.loads(journal.read_bytes())["files"]) if journal.exists() else set()


def phase(work: Path) -> str:
    """Return the phase in which a merge was stopped."""
    merged, adapter = work / "merged", work / "merged-adapter"
    if not (merged / JOURNAL).exists():
        return "finished" if (merged / INDEX).exists() else "start, reading"
    if any((merged / name).exists() for name in (RECORD, CONFIG, INDEX)):
        return "record, config, index"
    if noted(merged) != {path.name for path in (work.parent / "whole" / "merged").glob("*.safetensors")}:
        return f"shards, {len(noted(merged))} whole"
    if (adapter / JOURNAL).exists() or not (adapter / RECORD).exists():
        return "adapter"
    return "small files"


def check_stopped(merges: Merges, work: str) -> dict[str, tuple[int, int]]:
    """Check an unfinished merge.

    Its complete files are correct, and the folder opens as a checkpoint only if the merge has finished.

    Returns:
        By name, the identity of each complete file, which changes if the file is written again.
    """
    merged, whole = merges.place / work / "merged", merges.place / "whole" / "merged"
    kept = noted(merged)
    assert all(filecmp.cmp(merged / name, whole / name, shallow=False) for name in kept)
    try:
        HFCheckpoint.open(merged)
    except UserError:
        pass
    else:
        assert differing(merged, whole) <= {JOURNAL}
    return {name: stamp(merged / name) for name in kept}


def stamp(path: Path) -> tuple[int, int]:
    entry = path.stat()
    return entry.st_ino, entry.st_mtime_ns


def test_randomly_killed_merge_resumes_to_the_same_bytes(merges: Merges) -> None:
    """Resume after one or two kills, and compare the bytes with an undisturbed merge."""
    choose, seconds = random.Random(4), merges.seconds
    phases, late, twice, resumed, kept_files = Counter[str](), 0, 0, 0, 0
    for number in range(10 * KILLS):
        if phases.total() >= KILLS:
            break
        work = f"kill-{number}"
        merged = merges.place / work / "merged"
        kept: dict[str, tuple[int, int]] = {}
        for again in range(2 if number % 4 == 3 else 1):
            begun = time.monotonic()
            life = merges.begin(work)
            end = begun + choose.uniform(0.0, seconds)
            life.until(lambda end=end: time.monotonic() > end)
            life.send(signal.SIGKILL)
            assert life.wait() in (0, -signal.SIGKILL), life.stderr
            assert all(stamp(merged / name) == entry for name, entry in kept.items()), "written again"
            if life.wait() == 0:  # it was faster than the undisturbed one
                seconds = min(seconds, time.monotonic() - begun)
                late += 1
                break
            phases[phase(merges.place / work)] += 1
            twice += again
            kept = check_stopped(merges, work)
        merges.finish(work)
        assert all(stamp(merged / name) == entry for name, entry in kept.items()), "written again"
        resumed += bool(kept)
        kept_files += len(kept)
        shutil.rmtree(merges.place / work)
    print(
        f"\n{seconds:.1f} s undisturbed; {phases.total()} kills, {twice} of them a merge's second: ", end=""
    )
    print(f"{dict(sorted(phases.items()))}; {late} came after the end")
    print(f"{resumed} of the runs that followed kept {kept_files} whole shards")
    assert phases.total() >= KILLS and twice and resumed >= KILLS // 4


@pytest.mark.parametrize(
    "last, expected",
    [
        ("", "start, reading"),
        ("merged/.model-00002-of-0000{count}.safetensors.partial", "shards, 1 whole"),
        (f"merged-adapter/{JOURNAL}", "adapter"),
        ("merged/recipe.lock.json", "small files"),
        (f"merged/{RECORD}", "record, config, index"),
    ],
)
def test_merge_killed_in_each_phase_resumes_to_the_same_bytes(
    last: str, expected: str, merges: Merges
) -> None:
    """Kill as soon as a file exists. Small files take milliseconds, so that few kills hit them."""
    hit = ""
    for attempt in range(10):
        work = f"aimed-{attempt}"
        life = merges.begin(work)
        path = merges.place / (f"{work}/{last.format(count=merges.shards)}" if last else ".")
        while not path.exists() and life.status is None:
            spin = time.monotonic() + 0.01
            while not path.exists() and time.monotonic() < spin:
                pass
        life.send(signal.SIGKILL)
        life.wait()
        hit = phase(merges.place / work)
        kept = check_stopped(merges, work)
        merges.finish(work)
        assert all(stamp(merges.place / work / "merged" / name) == entry for name, entry in kept.items())
        shutil.rmtree(merges.place / work)
        if hit == expected:
            return
    pytest.fail(f"never killed in {expected}, at last in {hit}")


def writing(merges: Merges, work: str) -> Life:
    """Start a merge, and wait until it has written two shards."""
    life = merges.begin(work)
    assert life.until(lambda: len(noted(merges.place / work / "merged")) >= 2)
    return life


@pytest.mark.parametrize(
    "signum, status, words",
    [(signal.SIGINT, 130, "the same command continues"), (signal.SIGTERM, -signal.SIGTERM, "")],
)
def test_merge_stopped_by_a_signal_resumes_without_rewriting_shards(
    signum: int, status: int, words: str, merges: Merges
) -> None:
    life = writing(merges, f"signal-{signum}")
    life.send(signum)
    assert life.wait() == status, life.stderr
    assert words in life.stderr and "Traceback" not in life.stderr
    merged = merges.place / f"signal-{signum}" / "merged"
    if signum == signal.SIGINT:
        assert not [name for name in names(merged) if name.endswith(PARTIAL)]
    kept = check_stopped(merges, f"signal-{signum}")
    assert len(kept) >= 2
    merges.finish(f"signal-{signum}")
    assert all(stamp(merged / name) == entry for name, entry in kept.items())


def test_only_one_of_three_concurrent_merges_writes(merges: Merges) -> None:
    """Start three merges that do not know of each other: only one may write."""
    lives = [merges.begin("race") for _ in range(3)]
    statuses = sorted(life.wait() for life in lives)
    errors = "".join(life.stderr for life in lives)
    assert statuses[0] == 0 and set(statuses) <= {0, 1}, errors
    assert errors.count("another process is writing it") == statuses.count(1)
    merges.finish("race")
