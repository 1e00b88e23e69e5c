"""The reference pages of the Python packages: signatures and docstrings of what they export, read
from their sources without importing them, so that no framework need be installed."""
from __future__ import annotations

import ast
import pathlib
from typing import Dict, List, Optional, Union

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "python" / "flashattn"
MODULES = {"flashattn": PACKAGE, "flashattn.torch": PACKAGE / "torch",
           "flashattn.jax": PACKAGE / "jax"}
WIDTH = 100
Definition = Union[ast.FunctionDef, ast.ClassDef]


def exported(folder: pathlib.Path) -> List[str]:
    """The names of a package's __all__."""
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{folder} has no __all__")


def definitions(folder: pathlib.Path) -> Dict[str, Definition]:
    found: Dict[str, Definition] = {}
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[node.name] = node
    return found


def page() -> str:
    parts = ["# Python reference", "Signatures and docstrings of `flashattn`, `flashattn.torch` "
             "and `flashattn.jax`, from their sources. `**options` are those of `attention`. "
             "Enumerations (`Dtype`, `Mask`, `Reason`, ...) and the tuples `Descriptor`, "
             "`PlanInfo` and `DeviceInfo` have the names and values of the "
             "[C header](project:#flashattn_desc)."]
    for module, folder in MODULES.items():
        known = definitions(folder)
        parts.append(f"## {module}")
        docs = [_entry(module, known[name]) for name in exported(folder) if name in known]
        parts += [doc for doc in docs if doc]
    return "\n\n".join(parts) + "\n"


def _entry(module: str, node: Definition) -> Optional[str]:
    if isinstance(node, ast.FunctionDef):
        return _function(f"{module}.{node.name}", "def", node)
    text = ast.get_docstring(node)
    if not text or any(isinstance(base, ast.Name) and base.id.startswith("Int")
                       for base in node.bases):
        return None  # an enumeration, which is the header's
    bases = ", ".join(map(ast.unparse, node.bases))
    head = f"class {node.name}" + (f"({bases})" if bases else "")
    parts = [f"({module}.{node.name})=\n### {module}.{node.name}\n\n```python\n{head}\n```\n\n"
             f"```text\n{text}\n```"]
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and ast.get_docstring(item) and item.name[0] != "_":
            parts.append(_function(f"{module}.{node.name}.{item.name}", "def", item, "####"))
    return "\n\n".join(parts)


def _function(name: str, keyword: str, node: ast.FunctionDef, level: str = "###") -> str:
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = ast.unparse(node.args)
    signature = f"{keyword} {node.name}({arguments}){result}"
    if len(signature) > WIDTH:
        signature = f"{keyword} {node.name}(\n{_wrapped(arguments)}){result}"
    return (f"({name})=\n{level} {name}\n\n```python\n{signature}\n```\n\n"
            f"```text\n{ast.get_docstring(node)}\n```")


def _wrapped(arguments: str) -> str:
    """Arguments in lines of at most WIDTH; commas inside of brackets do not part them."""
    lines, line, depth = [], "", 0
    for part in arguments.split(", "):
        joined = f"{line}, {part}" if line else part
        if line and depth == 0 and len(joined) > WIDTH - 8:
            lines.append(line + ",")
            line = part
        else:
            line = joined
        depth += part.count("[") + part.count("(") - part.count("]") - part.count(")")
    return "\n".join(f"    {text}" for text in [*lines, line])
