"""Tests of jobs in worker processes: results, the cache, kills and Ctrl-C. The worker compiles nothing."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from recipec.compiler import packages, store
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.program import Program
from recipec.compiler.packages import install
from recipec.compiler.plan import identity, pool
from recipec.compiler.plan.results import Compiled, Failed, Job
from tests.plan.plans import lowered
from tests.waiting import running

pytestmark = pytest.mark.usefixtures("fake")


def job(told: str, layers: int = 6) -> Job:
    return Job(Path("/recipe.yaml"), (f"fake={told}",), tuple(range(layers)))


def starts(log: Path) -> int:
    return len(list(log.iterdir()))


def test_results_come_in_the_order_of_the_jobs(program: Program) -> None:
    work = [(program, job("compiled", layers)) for layers in (6, 18, 12)]
    results = pool.compile_jobs(work)
    assert [result.layers for result in results if isinstance(result, Compiled)] == [6, 18, 12]


def test_repeated_job_comes_from_the_cache(program: Program, fake: Path) -> None:
    first = pool.compile_jobs([(program, job("compiled"))])
    seen: list[bool] = []
    again = pool.compile_jobs(
        [(program, job("compiled"))], on_done=lambda index, result, cached: seen.append(cached)
    )
    assert again == first and seen == [True] and starts(fake) == 1


def test_damaged_cache_entry_is_compiled_again(program: Program, fake: Path) -> None:
    pool.compile_jobs([(program, job("compiled"))])
    entry = store.folder() / (name := identity.name(program, job("compiled")))[:2] / f"{name}.json"
    entry.write_text(entry.read_text()[:-9])
    results = pool.compile_jobs([(program, job("compiled"))])
    assert isinstance(results[0], Compiled) and starts(fake) == 2
    assert pool.cached(name) == results[0]


def test_failed_jobs_are_reported_and_not_cached(program: Program, fake: Path) -> None:
    results = pool.compile_jobs([(program, job("failed")), (program, job("silent", 12))])
    assert results == [
        Failed("it is not to be", help="do else"),
        Failed("the compile ended without a result: no room for maneuver"),
    ]
    pool.compile_jobs([(program, job("failed"))])
    assert starts(fake) == 3


def test_killed_compile_is_retried_once_and_then_reported(program: Program, fake: Path) -> None:
    (once,) = pool.compile_jobs([(program, job("killed once"))])
    assert isinstance(once, Compiled) and starts(fake) == 2
    (result,) = pool.compile_jobs([(program, job("killed", 12))])
    assert isinstance(result, Failed) and result.killed and starts(fake) == 4
    assert result.message == "the compile was killed, most likely because this machine's memory ran out"


def test_ctrl_c_ends_the_workers_and_caches_finished_results(
    program: Program, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "available_memory", lambda: 1e12)

    def interrupt(index: int, result: object, cached: bool) -> None:
        assert index == 1
        while starts(fake) < 2:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        pool.compile_jobs([(program, job("slow", 12)), (program, job("compiled"))], most=2, on_done=interrupt)
    pids = [int(path.name.split("-")[1]) for path in fake.iterdir()]
    assert len(pids) == 2 and not any(map(running, pids))
    assert pool.cached(identity.name(program, job("compiled"))) is not None


def test_second_worker_waits_while_memory_is_low(
    program: Program, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "available_memory", lambda: 0.0)
    running: list[int] = []
    monkeypatch.setattr(pool._Pool, "_report", lambda self, total: running.append(len(self._running)))
    results = pool.compile_jobs([(program, job("late", layers)) for layers in (6, 12)], most=2)
    assert len(results) == 2 and max(running) == 1


def test_pool_progress_never_falls_and_names_the_job(program: Program) -> None:
    seen: list[tuple[float, str]] = []
    pool.compile_jobs(
        [(program, job("late", layers)) for layers in (6, 12)],
        lambda share, what: seen.append((share, what)),
    )
    shares = [share for share, _ in seen]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1, "a compile counts when it ends"
    assert any("12 layers (tracing)" in what for _, what in seen)


def test_missing_libtpu_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(pool, "find_spec", lambda name: None)
    with pytest.raises(ArtifactError) as caught:
        pool.require_compiler()
    assert str(caught.value) == (
        "planning needs libtpu, whose compiler runs without a TPU, and it is not installed"
    )
    assert caught.value.help == install("train", "plan")

    monkeypatch.setattr(packages.require_packages, "__defaults__", (("no_such_package",), ("train",)))
    with pytest.raises(ArtifactError, match="no_such_package cannot be imported") as caught:
        pool.require_compiler()
    assert caught.value.help == install("train", "plan")


@pytest.mark.parametrize(
    ("change", "other"),
    [
        ("train.micro_batch_size=2", True),
        ("train.optimizer.learning_rate=2e-4", True),
        ("data.max_length=2048", True),
        ("remat.policy=decoder", True),
        ("model.attention_block=1024", True),
        ("model.attention_block=512", False),
        ("lora.rank=32", True),
        ("mesh.axes={fsdp: 2, tp: 2}", True),
        ("model.id=google/gemma-3-27b-it", True),
        ("sharding.rules=[{match: '.*down_proj.*', spec: [tp, fsdp]}]", True),
        ("name=another", False),
        ("budget.max_hours=3", False),
        ("cost.train_usd_per_hour=3", False),
        ("train.epochs=3", False),
        ("data.packing=false", False),
        ("checkpoint.every_steps=7", False),
        ("serve.max_num_seqs=7", False),
    ],
)
def test_step_identity_changes_only_with_settings_that_affect_the_compile(change: str, other: bool) -> None:
    sets = ("train.global_batch_size=8", change)
    base, changed = lowered("gemma4-31b-v5p8", sets[0]), lowered("gemma4-31b-v5p8", *sets)
    assert (identity.step(base) != identity.step(changed)) is other


def test_cache_key_depends_on_versions_sources_and_depth(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job("compiled")
    names = {identity.name(program, one), identity.name(program, job("compiled", 12))}
    monkeypatch.setattr(identity, "versions", lambda backend: {"libtpu": "another"})
    names.add(identity.name(program, one))
    monkeypatch.setattr(identity, "sources", lambda: "others")
    names.add(identity.name(program, one))
    assert len(names) == 4


def test_cache_key_depends_on_libtpu_flags_of_the_environment(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a changed flag gives another name, and that a removed flag gives the first name again."""
    one, flags = job("compiled"), "--xla_tpu_scoped_vmem_limit_kib=98304"
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    names = [identity.name(program, one)]
    for value in (flags, f"{flags} --xla_enable_async_all_gather=true", flags.replace("98304", "65536")):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", value)
        names.append(identity.name(program, one))
        assert pool.environment()["LIBTPU_INIT_ARGS"] == value
    assert len(set(names)) == 4
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    assert identity.name(program, one) == names[0]


def test_unwritable_cache_stores_nothing_and_raises_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RECIPEC_CACHE", str(tmp_path / "file"))
    store.put("ab", "value")
    assert store.get("ab") is None
