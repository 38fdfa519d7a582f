"""Test the report of a port, which shows first what changes the run, and the page with both sides."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.pages import markdown, text
from recipec.port.report import CHANGES, MOST_CHANGES, OTHER_DEFAULTS, document, headline
from tests.port.conftest import CONFIG, Port

OPTIM = "optim: {rate: 0.1}\nnoise: 0.1\nnoises: 0.2\nimages: 3\n"


def test_report_lists_changes_first_ordered_by_severity(ported: Port) -> None:
    made = ported(CONFIG.replace("fake_rank: 16\n", "") + OPTIM, partial=True)
    told = headline(made.rows)
    assert [*told] == [CHANGES, OTHER_DEFAULTS]
    changes = [(together[0].verdict.value, [row.key for row in together]) for together, _ in told[CHANGES]]
    assert changes == [
        ("unsupported", ["images"]),
        ("unsupported", ["noise"]),
        ("unsupported", ["noises"]),
        ("approximated", ["optim.rate"]),
    ]
    assert [row.key for together, _ in told[OTHER_DEFAULTS] for row in together] == ["fake_rank"], (
        "not fake_micro"
    )
    report = document(made.title, made.files, made.rows)
    lines = text.write(report).splitlines()
    assert lines[0] == "Port from Faketune" and lines[1].startswith("config.yaml: 3 keys exact")
    assert lines[3] == CHANGES and lines.index("config.yaml") > lines.index(OTHER_DEFAULTS)
    page = markdown.write(report)
    assert page.index(f"## {CHANGES}") < page.index("## config.yaml")
    assert "| unsupported | `images` | config.yaml:8 | images are not learned here |\n" in page


def test_report_summary_fits_on_one_screen(ported: Port) -> None:
    made = ported(CONFIG + "".join(f"unknown_{n}: {n}\n" for n in range(60)))
    made.rows = [replace(row, note=f"{row.key}: {row.note}") for row in made.rows]
    lines = text.write(document(made.title, made.files, made.rows)).splitlines()
    left = sum(len(groups) for groups in headline(made.rows).values()) - MOST_CHANGES
    assert lines.index("config.yaml") <= 40 and f"  and {left} more, in the tables" in lines


def test_html_page_shows_values_as_yaml(root: Path, tmp_path: Path) -> None:
    config = tmp_path / "support.yml"
    example = root / "tests" / "port" / "examples" / "axolotl-gemma4-qlora" / "support-qlora.yml"
    config.write_text(re.sub(r"^seed:.*\n", "", example.read_text(encoding="utf-8"), flags=re.M))
    page = tmp_path / "port.html"
    arguments = ["port", str(config), "-o", str(tmp_path / "recipe.yaml"), "--html", str(page)]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    words = re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8").partition("<body>")[2])
    assert re.search(r"\bseed\s+null\b", words) and not re.search(r"\b(None|True|False)\b", words)


def test_html_page_links_config_and_recipe_lines(
    faketune: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(
        CONFIG
        + "noise: <b>\nhub_token: abcdef\nother: hf_abcdefghijklmnopqrstuvwx\nwandb: {api_key: zyxwv}\n"
    )
    arguments = ["port", "config.yaml", "-o", "recipe.yaml", "--html", "port.html"]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    page = Path("port.html").read_text()
    assert "<script" not in page and "<b>" not in page
    assert not any(secret in page for secret in ("abcdef", "zyxwv", "hf_abc"))
    anchors = re.findall(r'<li id="([^"]+)"', page)
    links = re.findall(r'href="#([^"]+)"', page)
    assert len(set(anchors)) == len(anchors) and set(links) <= set(anchors)
    recipe = Path("recipe.yaml").read_text().splitlines()
    rank = next(number for number, line in enumerate(recipe, 1) if "rank: 16" in line)
    assert f'<a href="#r-{rank}">fake_rank: 16</a>' in page and 'href="#s0-2">  rank: 16' in page
    for extra, status in (([], 1), (["--force"], 0)):
        result = CliRunner().invoke(app, [*arguments, *extra], catch_exceptions=False)
        assert result.exit_code == status and (status == 0 or result.stderr.count("E1112") == 2)
    result = CliRunner().invoke(app, [*arguments[:2], "--html", "config.yaml"], catch_exceptions=False)
    assert result.exit_code == 1 and "error[E1112]" in result.stderr


def test_html_page_of_port_to_trl_links_recipe_to_config_lines(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text((root / "recipes" / "quickstart.yaml").read_text())
    arguments = ["port", "recipe.yaml", "--to", "trl", "-o", "trl.yaml", "--html", "trl.html"]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    page, config = Path("trl.html").read_text(), Path("trl.yaml").read_text().splitlines()
    assert "<h1>Port to TRL</h1>" in page
    rank = next(number for number, line in enumerate(config, 1) if line == "lora_r: 8")
    assert f'<a href="#r-{rank}">  rank: 8</a>' in page
