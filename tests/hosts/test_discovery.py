"""Tests of how a process finds its number from the launcher's environment."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from recipec.runtime.errors import UserError
from recipec.runtime.hosts.discovery import PORT, Place, discover


def explicit(address: str, count: str, number: str) -> dict[str, str]:
    return {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": number}


def gke(names: str, worker: str, **megascale: str) -> dict[str, str]:
    more = {f"MEGASCALE_{key}": value for key, value in megascale.items()}
    return {"TPU_WORKER_HOSTNAMES": names, "TPU_WORKER_ID": worker, **more}


@pytest.mark.parametrize(
    ("hosts", "environment", "place"),
    [
        (1, {}, None),
        (1, explicit("host-a:1234", "2", "1"), Place("host-a", 1234, 2, 1)),
        (4, explicit("host-a", "2", "0"), Place("host-a", PORT, 2, 0)),
        (1, explicit("10.0.0.2:99", "1", "0"), None),
        (2, explicit("[fd00::1]:99", "2", "0"), Place("fd00::1", 99, 2, 0)),
        (2, explicit("[fd00::1]", "2", "0"), Place("fd00::1", PORT, 2, 0)),
        (2, explicit("fd00::1", "2", "0"), Place("fd00::1", PORT, 2, 0)),
        # Explicit variables override a platform's.
        (4, explicit("h:1", "2", "1") | gke("a,b,c,d", "3"), Place("h", 1, 2, 1)),
    ],
)
def test_coordinator_and_process_number_are_read_from_jax_variables(
    hosts: int, environment: Mapping[str, str], place: Place | None
) -> None:
    assert discover(hosts, environment) == place


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1"},
            "JAX_COORDINATOR_ADDRESS is set, and JAX_NUM_PROCESSES and JAX_PROCESS_ID are not",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": ""},
            "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID are set, and JAX_NUM_PROCESSES is not",
        ),
        (explicit("a:1", "2", "2"), "JAX_PROCESS_ID is 2, and JAX_NUM_PROCESSES is 2"),
        (explicit("a:1", "two", "0"), "JAX_NUM_PROCESSES is 'two', which is not a whole number"),
        (explicit("a:1", "2", "-1"), "JAX_PROCESS_ID is '-1', which is not a whole number"),
        (
            explicit("a:port", "2", "0"),
            "JAX_COORDINATOR_ADDRESS is 'a:port', which is not of the form HOST:PORT",
        ),
        (explicit(":1", "2", "0"), "JAX_COORDINATOR_ADDRESS is ':1', which is not of the form HOST:PORT"),
        (explicit("[::1", "2", "0"), "JAX_COORDINATOR_ADDRESS is '[::1', which is not of the form HOST:PORT"),
        (
            explicit("http://a:1", "2", "0"),
            "JAX_COORDINATOR_ADDRESS is 'http://a:1', which is not of the form HOST:PORT",
        ),
    ],
)
def test_missing_or_malformed_jax_variables_are_refused(environment: Mapping[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        discover(2, environment)
    assert caught.value.message == message
    assert caught.value.help


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (gke("localhost,b,c", "2"), Place("localhost", PORT, 3, 2)),
        (
            gke("b0,b1", "1", NUM_SLICES="2", SLICE_ID="1", COORDINATOR_ADDRESS="localhost:8080"),
            Place("localhost", PORT, 4, 3),
        ),
        (gke("localhost,b", "2"), "(process 2 of 2)"),
        (gke("localhost,b", "x"), "(invalid literal for int() with base 10: 'x')"),
    ],
)
def test_coordinator_and_process_number_are_read_from_gke_variables(
    environment: Mapping[str, str], place: Place | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read the variables of GKE's webhook; the metadata server has no others."""
    from jax._src.clusters import cloud_tpu_cluster

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_tpu_env_value_from_metadata", lambda key: None)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    for name in ("NUM_SLICES", "SLICE_ID", "COORDINATOR_ADDRESS"):
        monkeypatch.delenv(f"MEGASCALE_{name}", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(place, str):
        with pytest.raises(UserError) as caught:
            discover(2, environment)
        assert caught.value.message.endswith(place)
    else:
        assert discover(2, environment) == place


def test_several_hosts_without_a_process_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.clusters import ClusterEnv

    def nothing(*arguments: object) -> tuple[None, None, None, None]:
        return None, None, None, None

    def broken(*arguments: object) -> None:
        raise RuntimeError("no metadata\nat all")

    for found, why in ((nothing, "this is"), (broken, "this is (no metadata)")):
        monkeypatch.setattr(ClusterEnv, "auto_detect_unset_distributed_params", found)
        with pytest.raises(UserError) as caught:
            discover(4, {})
        assert caught.value.message == (
            f"the recipe's mesh spans 4 hosts, and no variable says which of them {why}"
        )
        assert "JAX_NUM_PROCESSES=4" in (caught.value.help or "")
    found_out = lambda *arguments: ("t1v-n-0:8476", 4, 3, None)  # noqa: E731
    monkeypatch.setattr(ClusterEnv, "auto_detect_unset_distributed_params", found_out)
    assert discover(4, {}) == Place("t1v-n-0", PORT, 4, 3)
