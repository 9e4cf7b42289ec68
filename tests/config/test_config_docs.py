"""The generated reference is the one of the schema."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = ROOT / "tools" / "gen_config_docs.py"
    spec = importlib.util.spec_from_file_location("gen_config_docs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configuration_md_is_up_to_date(generator: ModuleType):
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == generator.render(), "run python tools/gen_config_docs.py"


def test_every_field_is_documented(generator: ModuleType):
    from rlkit.config.fields import all_fields

    text = generator.render()
    for field in all_fields().values():
        assert field.doc.endswith((".", "}'.", ")")), f"{field.name}: a sentence stands under every field"
        assert f"| `{field.flag}` |" in text
