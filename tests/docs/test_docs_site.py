"""The documentation builds as a site, without a warning: no dead link, no page that the navigation names and is not
there.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def pages_of(nav: list[dict[str, str]]) -> set[str]:
    return {page for entry in nav for page in entry.values()}


def test_navigation_names_every_page_and_no_other():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    there = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages_of(nav) == there, "name each page of docs/ under nav in mkdocs.yml"
    titles = [title for entry in nav for title in entry]
    assert titles[1:6] == ["Quick start", "Your own reward", "Two GPUs", "Flags", "From slime"]


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path: Path):
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in ("index.html", "quick_start.html", "from_slime.html", "configuration.html"):
        assert (tmp_path / "site" / page).is_file()
