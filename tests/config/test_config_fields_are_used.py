"""A flag without an effect is a defect: every field of the schema is read somewhere outside `rlkit/config/`.

A read is `x.field` where `x` is known to be the field's section: `cfg.optimizer.lr`, or `optimizer.lr` after
`optimizer = cfg.optimizer`, or a parameter annotated with the section's class. A field that only a property of the
schema reads counts when that property is read.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlkit.config.fields import PASS_THROUGH, all_fields, sections

ROOT = Path(__file__).parents[2]
RESOLVERS = [ROOT / "rlkit" / "config" / "eval_sets.py"]
"""Modules of the configuration whose results are what the run uses."""
SECTION_OF_CLASS = {cls.__name__: section for section, cls in sections().items()} | {"RunConfig": "run"}


def sources() -> Iterator[Path]:
    for path in [*sorted((ROOT / "rlkit").rglob("*.py")), ROOT / "train.py"]:
        if "config" not in path.relative_to(ROOT).parts[:2] or path in RESOLVERS:
            yield path


def aliases(tree: ast.AST) -> dict[str, set[str]]:
    """Variable or attribute name -> sections, from annotations and assignments of one module."""
    known: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            section = SECTION_OF_CLASS.get(last_name(node.annotation))
            if section is not None:
                name = node.arg if isinstance(node, ast.arg) else last_name(node.target)
                known.setdefault(name, set()).add(section)
    for target, value in assignments(tree):
        owner = last_name(value)
        if isinstance(value, ast.Attribute) and owner in sections():  # optimizer = cfg.optimizer
            known.setdefault(last_name(target), set()).add(owner)
        elif owner in known:  # self._cfg = cfg, of an annotated cfg
            known.setdefault(last_name(target), set()).update(known[owner])
    return known


def assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of every assignment, tuples taken apart."""
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=True)
            else:
                yield target, node.value


def last_name(node: ast.AST) -> str:
    """`a.b.c` -> `c`, `c` -> `c`, anything else -> an empty string."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def reads(tree: ast.AST, known: dict[str, set[str]]) -> set[tuple[str, str]]:
    """(section, attribute) of every attribute read whose owner is known to be a section."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = last_name(node.value)
            itself = {owner} if owner in sections() else {"run"} if owner in ("cfg", "config") else set[str]()
            found |= {(section, node.attr) for section in known.get(owner, itself)}
    return found


def properties() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """(section, property) of the schema -> what it reads."""
    table: dict[tuple[str, str], set[tuple[str, str]]] = {}
    modules = [ast.parse(path.read_text()) for path in (ROOT / "rlkit" / "config" / "schema").glob("*.py")]
    for node in (node for module in modules for node in module.body):
        if isinstance(node, ast.ClassDef):
            section = SECTION_OF_CLASS[node.name]
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    table[section, item.name] = reads(item, {"self": {section}})
    return table


@pytest.fixture(scope="module")
def all_reads() -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for path in sources():
        tree = ast.parse(path.read_text())
        found |= reads(tree, aliases(tree))
    by_property = properties()
    waiting = [read for read in found if read in by_property]
    while waiting:
        new = by_property[waiting.pop()] - found
        found |= new
        waiting += [read for read in new if read in by_property]
    return found


DESCRIPTION = "architecture"
"""Section whose fields are compared with config.json and do nothing else: `test_architecture_flags.py`."""
USED = [name for name, info in all_fields().items() if info.section != DESCRIPTION]


@pytest.mark.parametrize("name", [*USED, PASS_THROUGH])
def test_field_is_read_outside_the_configuration(all_reads: set[tuple[str, str]], name: str):
    section = "engine" if name == PASS_THROUGH else all_fields()[name].section
    assert (section, name) in all_reads, f"{section}.{name} has no effect: nothing outside rlkit/config/ reads it"


def test_the_search_does_not_see_what_is_not_there():
    source = (
        "def f(o: OptimizerConfig, x):\n    y, self._z = x.train, o\n    return o.lr, y.seed, x.lr, x.data.input_key"
    )
    tree = ast.parse(source + ", self._z.min_lr, x.adam_eps, cfg.batch_size")
    found = {
        ("optimizer", "lr"),
        ("train", "seed"),
        ("data", "input_key"),
        ("optimizer", "min_lr"),
        ("run", "batch_size"),
    }
    assert reads(tree, aliases(tree)) == found
