"""Directives that show code from its file, so that a page can't differ from what runs.

``{source-of} ddtree_numba.stages.accept_walk.accept_walk_kernel`` shows the source of an object, and
``{api} ...`` its documentation with the source folded below it; ``{modules} ddtree_numba.engine`` documents a package,
``{instructions} ddtree_numba.ptx`` a module of intrinsics, ``{from-text} ...`` a module that may not import here.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.errors import ExtensionError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]


def find(name: str) -> tuple[Any, str, str]:
    """Return (object, its name in its file, the file below the root with a leading slash) of a dotted `name`."""
    module_name, _, qualified = name.rpartition(".")
    module = importlib.import_module(module_name)
    target = getattr(module, qualified)
    file = Path(inspect.getsourcefile(inspect.unwrap(target)) or "").resolve()
    return target, qualified, "/" + file.relative_to(ROOT).as_posix()


class SourceOf(SphinxDirective):
    """Show the source of a function, kernel or class."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"folded": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Return the code block, with the file's name above it."""
        _, name, file = find(self.arguments[0])
        lines = [f"```{{literalinclude}} {file}", f":pyobject: {name}", f":caption: {file[1:]}", "```"]
        if "folded" in self.options:
            lines = [f":::{{dropdown}} Source of `{name}`", *lines, ":::"]
        return _parse(self, lines)


class Api(SphinxDirective):
    """Show the documentation of an object and, folded, its source; of a constant the documentation alone."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return both."""
        dotted = self.arguments[0]
        module, _, name = dotted.rpartition(".")
        target = getattr(importlib.import_module(module), name)
        if not _has_source(target):
            return _parse(self, ["```{eval-rst}", f".. autodata:: {dotted}", "   :no-value:", "```"])
        lines = ["```{eval-rst}"]
        if inspect.isclass(target):
            lines += [f".. autoclass:: {dotted}", "   :members:"]
        else:
            lines += [f".. autofunction:: {dotted}"]
        lines += ["```", f"```{{source-of}} {dotted}", ":folded:", "```"]
        return _parse(self, lines)


def _has_source(target: Any) -> bool:
    """Tell whether `target` is code of this project: a constant is not, nor is a module of another one."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(target))
    except TypeError:
        return False
    return bool(file) and Path(file).resolve().is_relative_to(ROOT)


class Modules(SphinxDirective):
    """Show the documentation of every module of a package, one section each, in the order of their names."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"first": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Return the sections; those of the modules named in `first` come first."""
        package = importlib.import_module(self.arguments[0])
        names = [info.name for info in pkgutil.iter_modules(package.__path__) if not info.ispkg]
        first = self.options.get("first", "").split()
        lines: list[str] = []
        for name in [*first, *(name for name in names if name not in first)]:
            lines += [f"## `{name}`", "", *_module(f"{package.__name__}.{name}"), ""]
        return _parse(self, lines)


def _module(name: str) -> list[str]:
    """Return the lines that document a module; constants without their value, which may be a path of this machine."""
    documented = {attribute for _, attribute in ModuleAnalyzer.for_module(name).find_attr_docs()}
    module = importlib.import_module(name)
    constants = [item for item in getattr(module, "__all__", ()) if not callable(getattr(module, item))]
    lines = ["```{eval-rst}", f".. automodule:: {name}", "   :members:"]
    lines += [f"   :exclude-members: {', '.join(constants)}"] if constants else []
    if silent := [constant for constant in constants if constant not in documented]:
        raise ExtensionError(f"{name}: {', '.join(silent)} has no words below it")
    for constant in constants:
        lines += ["", f".. autodata:: {name}.{constant}", "   :no-value:"]
    return [*lines, "```"]


class Instructions(SphinxDirective):
    """Show the documentation of a module of intrinsics, read from its text: without a GPU they are not there."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the public names in the order of the file."""
        name = self.arguments[0]
        module = importlib.import_module(name)
        text = Path(module.__file__ or "").read_text()
        intrinsics: dict[str, ast.FunctionDef] = {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "intrinsic" for d in node.decorator_list):
                intrinsics.setdefault(node.name, node)
        lines = ["```{eval-rst}"]
        for public in sorted(module.__all__, key=lambda public: _place(text, public)):
            if public in intrinsics:
                lines += _intrinsic(name, intrinsics[public])
            elif inspect.isfunction(getattr(module, public)) and f"def {public}(" in text:
                lines += [f".. autofunction:: {name}.{public}", ""]
            else:
                lines += [f".. autodata:: {name}.{public}", "   :no-value:", ""]
        return _parse(self, [*lines, "```"])


class FromText(SphinxDirective):
    """Show the documentation of a module's functions from its text: a bridge can't be imported without its package."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the module's words and its public functions, in the order of the file."""
        name = self.arguments[0]
        found = importlib.util.find_spec(name)
        tree = ast.parse(Path(found.origin if found and found.origin else "").read_text(encoding="utf-8"))
        [public] = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        lines = ["```{eval-rst}", *(ast.get_docstring(tree) or "").split("\n"), ""]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in public:
                for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                    argument.annotation = None  # shapes and dtypes stand in the text
                lines += _from_text(name, node, [ast.unparse(node.args)])
        return _parse(self, [*lines, "```"])


def _place(text: str, name: str) -> int:
    return min(at for at in (text.find(f"def {name}("), text.find(f"\n{name} = "), text.find(f"\n{name}: ")) if at >= 0)


def _intrinsic(module: str, function: ast.FunctionDef) -> list[str]:
    """Return the lines that document an intrinsic, called without its first argument."""
    return _from_text(module, function, [argument.arg for argument in function.args.args[1:]])


def _from_text(module: str, function: ast.FunctionDef, arguments: list[str]) -> list[str]:
    words = (ast.get_docstring(function) or "").split("\n")
    head = [f".. py:function:: {function.name}({', '.join(arguments)})", f"   :module: {module}", ""]
    return [*head, *(f"   {line}" if line else "" for line in words), ""]


def _parse(directive: SphinxDirective, lines: list[str]) -> list[nodes.Node]:
    holder = nodes.Element()
    source = directive.get_source_info()[0]
    directive.state.nested_parse(StringList(lines, source), directive.content_offset, holder, match_titles=True)
    return holder.children


_ARRAYS = r"\w+(, \w+)* \([^)]*\)"
_ARGUMENT = re.compile(rf"^{_ARRAYS}[^:]*:|^{_ARRAYS}(, {_ARRAYS})*\.$|^\w+ (float|int|uint)\d+:|^``\w+``")
_KEYWORD = re.compile(r"^(Launch|Needs):")


def _arrays_as_list(app: Any, what: str, name: str, target: Any, options: Any, lines: list[str]) -> None:
    """Make a list of a docstring's lines `name (shape, dtype): meaning`, which stand below each other there."""
    of_type = type(target).__doc__
    if what in ("data", "attribute") and isinstance(of_type, str) and "\n".join(lines).startswith(of_type[:40]):
        lines.clear()  # a constant without words of its own: those of `bool` or `int` would say nothing
    result: list[str] = []
    in_list = False
    for line in (line for line in lines if not line.startswith("Create new instance of ")):  # a NamedTuple's own words
        may_start = in_list or not result or not result[-1].strip()
        if _KEYWORD.match(line) or (may_start and _ARGUMENT.match(line)):
            result += [_item(line)] if in_list else ["", _item(line)]
            in_list = True
        elif in_list and line.strip():
            result.append("  " + line.strip())
        else:
            result.append(line)
            in_list = False
    lines[:] = result


def _item(line: str) -> str:
    label, colon, rest = line.partition(":")
    if _KEYWORD.match(line):
        return f"- **{label}**:{rest}"
    if line.startswith("``"):
        return f"- {line}"
    return f"- ``{label}``:{rest}" if colon else f"- ``{label.removesuffix('.')}``."


def setup(app: Any) -> dict[str, Any]:
    """Register the directives and the docstring rule."""
    app.add_directive("source-of", SourceOf)
    app.add_directive("api", Api)
    app.add_directive("modules", Modules)
    app.add_directive("instructions", Instructions)
    app.add_directive("from-text", FromText)
    app.connect("autodoc-process-docstring", _arrays_as_list)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
