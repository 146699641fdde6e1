"""What a docstring owes its reader: a word on every public name, and on every argument and error of the main ones."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import ddtree_numba

MODULES = [info.name for info in pkgutil.walk_packages(ddtree_numba.__path__, "ddtree_numba.")]
PUBLIC = [name for name in ddtree_numba.__all__ if callable(getattr(ddtree_numba, name))]
# Without arrays or numbers to refuse: records of arrays.
RECORDS = ("AcceptedPath", "DraftTree")


def public_names(module: ast.Module) -> list[str]:
    """Return a module's `__all__`, read from its source."""
    for node in module.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            return ast.literal_eval(node.value)
    return []


def functions_of(name: str) -> list[tuple[str, Callable, str]]:
    """Return (name, function, the words on it) of a public function, or of a class's public methods."""
    target = getattr(ddtree_numba, name)
    if not inspect.isclass(target):
        return [(name, target, inspect.getdoc(target) or "")]
    methods = {key: value for key, value in vars(target).items() if inspect.isfunction(value)}
    shown = {key: value for key, value in methods.items() if not key.startswith("_") or key == "__init__"}
    words = inspect.getdoc(target) or ""
    return [(f"{name}.{key}", value, f"{inspect.getdoc(value)}\n{words}") for key, value in shown.items()]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    """Read from the source: intrinsics are there on a GPU alone, and a bridge needs the package that it leads to."""
    found = importlib.util.find_spec(module)
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    for name in public_names(tree):
        for node in (node for node in nodes if node.name == name):
            assert ast.get_docstring(node), f"{module}.{name}"
            for method in (part for part in node.body if isinstance(part, ast.FunctionDef)):
                if isinstance(node, ast.ClassDef) and not method.name.startswith("_"):
                    assert ast.get_docstring(method), f"{module}.{name}.{method.name}"


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in RECORDS])
def test_every_argument_of_the_main_names_is_explained(name: str) -> None:
    for label, function, words in functions_of(name):
        for argument in inspect.signature(function).parameters:
            if argument == "self" or "The arrays are those of `draft` and `commit`" in words:
                continue
            assert re.search(rf"\b{argument}\b", words), f"{label}: says nothing about {argument}"


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in RECORDS])
def test_errors_of_the_main_names_are_named(name: str) -> None:
    words = "\n".join(text for _, _, text in functions_of(name))
    assert re.search(r"(Raises?|raises?) `(TypeError|ValueError)`|which raise as they do", words), name


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.endswith("_reference")])
def test_every_reference_names_its_source_and_its_dtypes(name: str) -> None:
    words = inspect.getdoc(getattr(ddtree_numba, name)) or ""
    assert "arXiv" in words and re.search(r"\b(u?int|float)(8|16|32|64)\b", words) and ">>> " in words


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_of_a_record_has_its_shape_and_dtype(name: str) -> None:
    record = getattr(ddtree_numba, name)
    source = inspect.getsource(record)
    for field in record._fields:
        assert re.search(rf"{field}: .*\n\s+\"\"\".*\[B.*\] u?(int|float)\d+", source), f"{name}.{field}"
