"""The bad files of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from inside import fill, recipe

CONFIG = "base_model: meta-llama/Llama-3.2-1B-Instruct\nadapter: lora\nlora_r: 8\nsequence_len: 512\n"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Write bad files into the working folder, and return their names by kind."""
    folder = tmp_path_factory.mktemp("bad")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder / "home"))
        names = fill(folder)
        (folder / "config.yaml").write_text(CONFIG)
        assert recipe("build", "good.yaml", "-o", "built").status == 0
        yield names
        (folder / "locked").chmod(0o700)
