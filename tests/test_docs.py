"""The site of bindings/docs: it builds without a warning, no link is dead, its programs run, and
the reference has every name of the header."""
import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "bindings" / "docs"
sys.path += [str(ROOT / "bindings"), str(DOCS)]
import manual  # noqa: E402
import programs  # noqa: E402
import python_api  # noqa: E402

pytestmark = pytest.mark.timeout(1500)  # less than a minute where nothing else runs
PAGES = sorted(DOCS.glob("*.md"))
C_PROGRAMS = [(page.stem, number, block["code"]) for page in PAGES for number, block in
              enumerate(programs.blocks(page.read_text(encoding="utf-8"), "c"))]


@pytest.fixture(scope="module", name="site")
def _site(tmp_path_factory):
    pytest.importorskip("sphinx", reason="no Sphinx: it could not be installed for this Python")
    out = tmp_path_factory.mktemp("docs")
    done = subprocess.run([sys.executable, str(DOCS / "manual.py"), "--out", str(out)], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    return out, done


def test_builds(site):
    """Warnings, programs that fail and dead links end it with a status."""
    out, done = site
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(list((out / "html").glob("*.html"))) > len(PAGES)
    assert list(manual.dead_links(out / "html")) == []


WITH_PROGRAMS = [page for page in PAGES if programs.blocks(page.read_text("utf-8"))]


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=lambda page: page.stem)
def test_programs_run(site, page):
    """The build has run them: here is what became of each page's."""
    result = json.loads((site[0] / "programs.json").read_text("utf-8"))[page.stem]
    assert not result["error"]
    if result["not_run"]:
        pytest.skip("; ".join(result["not_run"]))
    assert len(result["outputs"]) == len(programs.blocks(page.read_text("utf-8")))
    shown = [block["output"] for block in programs.blocks(page.read_text("utf-8"))]
    assert all(output for output, wanted in zip(result["outputs"], shown) if wanted)


@pytest.mark.parametrize("page, number, program", C_PROGRAMS,
                         ids=[f"{page}-{number}" for page, number, _ in C_PROGRAMS])
def test_c_programs(page, number, program, tmp_path):
    """They compile without a warning, and what they compute is what they say."""
    source, folder = tmp_path / "program.c", ROOT / "build" / "release" / "src"
    source.write_text(program, encoding="utf-8")
    command = [*os.environ.get("CC", "cc").split(), "-std=c99", "-Wall", "-Wextra", "-Wpedantic",
               "-Werror", "-I", ROOT / "include", source, "-o", tmp_path / "program",
               "-L", folder, "-lflashattn", f"-Wl,-rpath,{folder}"]
    for words in (command, [tmp_path / "program"]):
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True,
                              check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_reference_has_every_name(site):
    """Every function, structure, member and enumerator of the header is on its page."""
    from generator.model import read
    model = read((ROOT / "include" / "flashattn.h").read_text(encoding="utf-8"))
    pages = {name: (site[0] / "html" / f"{name}.html").read_text("utf-8")
             for name in ("functions", "structures", "enumerations")}
    for function in (*model.functions, *model.callbacks):
        assert f'id="{function.name.replace("_", "-")}"' in pages["functions"]
    for struct in model.structs:
        section = pages["structures"].partition(f'id="{struct.name.replace("_", "-")}"')[2]
        members = re.findall(r'<tr class="row-\w+"><td><p><code[^>]*><span class="pre">(\w+)<',
                             section.partition("</table>")[0])
        assert members == [field.name for field in struct.fields]
    for enum in model.enums:
        assert all(f">{member.name}<" in pages["enumerations"] for member in enum.members)
    assert model.sections["Running"].startswith("On the CPU the result is there")


def test_a_failing_program_is_an_error_with_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\n<!-- not run: a GPU -->\n"
                    "```python\ny\n```\n\n```python\nprint(x)\nassert x == 2\n```\n")
    result = programs.run(page)
    assert 'page.md", line 14' in result.error and result.not_run == ["a GPU"]
    page.write_text(page.read_text().replace("== 2", "== 1"))
    assert programs.run(page).outputs == ["", None, "1\n"]


def test_a_program_of_the_repository_is_found_by_its_heading():
    def included(comment):
        return manual._program(re.match(r"(\S+?)(?:#(\S+))?$", comment))

    assert included("README.md#from-c").startswith("```c\n#include <flashattn.h>")
    assert included("bindings/julia/README.md#ten-lines").startswith("```julia\nusing Flash")
    with pytest.raises(ValueError, match="no such program"):
        included("README.md#from-cobol")


def test_dead_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<p id="here"></p><a href="b.html#there">x</a>'
                                     '<a href="a.html#here">y</a>'
                                     '<a href="https://x.example">z</a>')
    (tmp_path / "b.html").write_text('<a href="c.html">x</a><script src="https://x.example/y.js">')
    found = sorted(manual.dead_links(tmp_path))
    assert len(found) == 3
    assert "b.html#there leads to no heading" in found[0] and "c.html leads to no file" in found[2]
    assert "<script> is fetched from" in found[1]


def parameters():
    """Of every function of the Python packages, by name, and the options of attention()."""
    names = set()
    for path in (ROOT / "bindings" / "python" / "flashattn").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names |= {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
    return names


@pytest.mark.parametrize("page, others", [
    ("c", []), ("python", ["NumPy"]), ("jax", ["jax.nn.dot_product_attention"]),
    ("pytorch", ["flash-attn", "scaled_dot_product_attention"]), ("rust", ["candle-flash-attn"]),
    ("julia", ["NNlib.dot_product_attention"]), ("transformers", ["another implementation"])])
def test_every_page_has_its_migration_tables(page, others):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    for other in others:
        (section,) = (s for s in sections if re.match(rf"From .*{re.escape(other)}$", s, re.M))
        assert re.search(r"^\|---", section, re.M), other
    assert others or "\n| There | Here |\n" in text


def test_migration_tables_name_what_there_is():
    """The functions and options of this library in the tables of the Python pages."""
    known = parameters()
    functions = {module: python_api.exported(folder)
                 for module, folder in python_api.MODULES.items()}
    seen = 0
    for page, module in (("python", "flashattn"), ("pytorch", "flashattn.torch"),
                         ("transformers", "flashattn.torch"), ("jax", "flashattn.jax")):
        lines = (DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines()
        ours = [cell for line in lines if line.startswith("|") for cell in line.split("|")[2:]]
        for code in re.findall(r"`([^`]+)`", " ".join(ours)):
            called = re.match(r"(fa|flashattn)\.(\w+)", code)
            if called:
                assert called[2] in functions[module if called[1] == "fa" else "flashattn"], code
                seen += 1
            for option in re.findall(r"\b(\w+)=", code):
                assert option in known or option == "attn_implementation", code
                seen += 1
    assert seen > 25
