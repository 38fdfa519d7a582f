"""Tests of a benchmark's summary: the measured machine, the table, and the published figures next to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.clients import bench_report
from recipec.runtime.clients.bench_points import LoadPoint, as_json
from recipec.runtime.clients.bench_report import HourlyPrice, MeasuredOn, Published
from recipec.runtime.clients.bench_server import ServerFacts, ServerMachine, look
from recipec.runtime.clients.output_files import write_whole
from tests.clients import stub_vllm

GOLDEN = Path(__file__).with_name("bench-summary.md")
URL = "http://127.0.0.1:8000"
V6E = MeasuredOn(f"Measured on v6e-8: vm, which shows 8 v6e chips and answered at {URL}.", True)
FIGURES = (
    {"input": 512, "peak_output_tokens_per_s": 1403, "usd_per_million_output_tokens": 4.27},
    {"input": 4096, "peak_output_tokens_per_s": 1206},
    {"input": 4096, "rate": 4, "median_ttft_ms": 61},
    {"lowest_tpot_ms": 13.5, "highest_tpot_ms": 24},
)


def record(length: int, rate: str, failure: str | None = None, **changes: Any) -> dict[str, Any]:
    result = stub_vllm.whole(length, 128, 100, rate) | changes
    return {
        "settings": {"prompts": 100, "output_length": 128},
        "measured": "2026-11-21T22:50:00Z",
        "failure": failure,
        "result": None if failure else result,
    }


def summary(place: MeasuredOn = V6E, **changes: Any) -> dict[str, Any]:
    """Summarize six points, of which one failed and one was not measured."""
    reason = "3 of 100 requests failed: Cannot connect to host | refused"
    records = [(LoadPoint(n, rate), record(n, rate)) for n in (512, 4096) for rate in ("1", "4", "inf")]
    records[1] = (records[1][0], record(512, "4", failure=reason))
    records[5] = (records[5][0], None)  # type: ignore[assignment]
    given: dict[str, Any] = {
        "model": "tuned",
        "settings": {"prompts": 100, "output_length": 128},
        "server": ServerFacts("0.32.0", "/model", 8192, {}),
        "place": place,
        "price": HourlyPrice(21.52, "list price of 2026-05"),
        "published": Published("arXiv 2605.25645", FIGURES),
        "records": records,
        "left_out": ["16,384 tokens in, 1 requests/s: with 128 out that is more than the 8,192 tokens"],
    }
    return bench_report.Measurements(**{**given, **changes}).summary()


def test_summary_markdown_matches_the_golden_file(request: pytest.FixtureRequest) -> None:
    text = bench_report.markdown(summary())
    if request.config.getoption("--update"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_token_cost_is_hourly_price_over_measured_throughput() -> None:
    first, failed, *_ = summary()["points"]
    # 128 tokens/s: 460,800 in an hour of US$ 21.52.
    assert first["usd_per_million_output_tokens"] == pytest.approx(21.52 / 0.4608)
    assert failed["outcome"] == "failed" and "output_tokens_per_s" not in failed
    assert HourlyPrice(1.0, "").per_million(0.0) is None
    assert summary(price=None)["points"][0]["usd_per_million_output_tokens"] is None


def test_failed_points_are_left_out_of_peak_cost_and_ranges() -> None:
    records = [
        (LoadPoint(512, "1"), record(512, "1")),
        (LoadPoint(512, "inf"), record(512, "inf", completed=97)),
    ]
    found = summary(records=records)
    assert [row["outcome"] for row in found["points"]] == ["measured", "not measured"]
    peak = "| peak output tokens/s, 512 tokens in | 1,403 | 128, of 1 of 2 points |"
    assert peak in bench_report.markdown(found)


def pci(folder: Path, *devices: tuple[str, str]) -> Path:
    for number, (vendor, device) in enumerate(devices):
        place = folder / f"0000:00:{number:02x}.0"
        place.mkdir(parents=True)
        (place / "vendor").write_text(vendor + "\n")
        (place / "device").write_text(device + "\n")
    return folder


def test_local_machine_is_identified_by_its_pci_chips(tmp_path: Path) -> None:
    disk = ("0x1af4", "0x1001")
    network = ("0x1ae0", "0x0042")
    tpus = pci(tmp_path / "v6e", disk, network, *[("0x1ae0", "0x006f")] * 8)
    assert look(URL, tpus).chips == {"v6e": 8}
    assert "which shows 8 v6e chips" in look("http://localhost:1", tpus).described
    assert look("http://[::1]:8000", pci(tmp_path / "none", disk, network)).chips == {}
    assert look(URL, tmp_path / "missing").chips == {}
    # Another machine's chips are unknown, whatever this machine has.
    far = look("http://10.0.0.7:8000", tpus)
    assert far.chips is None and far.described == "the machine that answered at http://10.0.0.7:8000"
    assert far.identity != look(URL, tpus).identity != look(URL, tmp_path / "missing").identity


@pytest.mark.parametrize(
    ("chips", "told", "is_accelerator", "said"),
    [
        ({"v6e": 8}, "", True, "Measured on v6e-8: it."),
        ({"v6e": 4}, "", False, "It is not the recipe's v6e-8, so these figures do not hold for that."),
        (None, "", False, "Nothing shows that it is the recipe's v6e-8; if it is, say so with"),
        (None, "V6e-8", True, f"Measured on V6e-8, as --machine says, which answered at {URL}."),
        ({}, "2x H100", False, "Measured on 2x H100, as --machine says"),
    ],
)
def test_figures_are_credited_to_the_accelerator_only_if_seen_or_stated(
    chips: dict[str, int] | None, told: str, is_accelerator: bool, said: str
) -> None:
    place = bench_report.place(ServerMachine("it", "it", chips), "v6e-8", 8, told, URL)
    assert place.is_accelerator is is_accelerator
    assert said in place.sentence


def test_bench_report_prints_table_and_writes_json_and_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "of today"
    folder.mkdir()
    bench_report.write(folder, summary())
    said = capsys.readouterr().out
    assert said.endswith(f"and a JSON file of each point\nplots: recipe report '{folder}'\n")
    assert f"\n{bench_report.markdown(summary())}\n" in said
    assert sorted(path.name for path in folder.iterdir()) == ["summary.json", "summary.md"]
    assert json.loads((folder / "summary.json").read_text()) == summary()


def test_half_of_a_surrogate_pair_in_an_answer_is_written_as_an_escape(tmp_path: Path) -> None:
    answer = {"root": "\ud83d, a whole \U0001f600"}
    write_whole(tmp_path / "summary.json", as_json(answer))
    assert json.loads((tmp_path / "summary.json").read_text("utf-8")) == answer
