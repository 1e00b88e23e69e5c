"""./run docs: builds the site of bindings/docs into build/docs/html.

    ./run docs [--out FOLDER]

The pages are Markdown. Before Sphinx sees them, their programs run (programs.py) and three kinds of
comments become text: "output" after a program, "program: PATH[#HEADING]" (a program of the
repository, which its own tests run) and "generated: NAME" (what is made from the header and the
sources). Links into the repository lead to copies on the site. Warnings, programs that fail and
dead links are errors.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import html.parser
import json
import os
import pathlib
import re
import shutil
import sys
import urllib.parse
from typing import Callable, Dict, Iterator, List, NamedTuple, Set, Tuple

import programs

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = pathlib.Path(__file__).resolve().parent
# Pages of the repository that the site has, too.
REPOSITORY = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "src/README.md",
              "tests/bench/README.md", "tests/bench/CPU.md", "tests/bench/PORTABLE.md",
              "bindings/python/README.md", "bindings/rust/README.md",
              "bindings/julia/README.md", "bindings/packaging/README.md")
FENCED = re.compile(r"(^```.*?^```$)", re.S | re.M)
LANGUAGES = {".py": "python", ".rs": "rust", ".jl": "julia", ".c": "c"}


class Site(NamedTuple):
    pages: Dict[str, str]  # by name without suffix: Markdown for Sphinx
    files: Dict[str, pathlib.Path]  # by path on the site: copied as they are
    pictures: Dict[str, str]  # by path on the site
    results: Dict[str, programs.Result]  # by page: what its programs did


def prepare() -> Site:
    """Everything but Sphinx's part."""
    import pictures
    pages = {page.stem: page for page in sorted(DOCS.glob("*.md"))}
    texts = {name: page.read_text(encoding="utf-8") for name, page in pages.items()}
    # From the end of the alphabet: those of PyTorch take longest.
    with_programs = [name for name in reversed(texts) if programs.blocks(texts[name])]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = dict(zip(with_programs, pool.map(
            lambda name: programs.run(pages[name]), with_programs)))
    made, known = _generated()
    files: Dict[str, pathlib.Path] = {}
    prepared: Dict[str, str] = {}
    for name, text in texts.items():
        if name in results and not results[name].error:
            text = _with_outputs(text, results[name].outputs)
        text = re.sub(r"<!-- generated: ([\w-]+) -->", lambda m: made[m[1]], text)
        text = re.sub(r"<!-- program: ([^\s#]+)(?:#(\S+))? -->", _program, text)
        text = _outside_fences(text, lambda part: _names_linked(part, known))
        prepared[name] = _relinked(text, pages[name], "", files)
    for path in REPOSITORY:
        text = (ROOT / path).read_text(encoding="utf-8")
        prepared["repository/" + path[:-3]] = _relinked(text, ROOT / path, "repository/", files)
    prepared.update({name: made[name] for name in ("functions", "structures", "enumerations",
                                                   "python-reference")})
    return Site(prepared, files, pictures.draw(), results)


def _generated() -> Tuple[Dict[str, str], Dict[str, str]]:
    """What is made from the header and the sources, by the name that a page gives it; and the
    labels of the header's names."""
    sys.path.insert(0, str(ROOT / "bindings"))
    from generator import emit_docs
    from generator.model import read
    import pictures
    import python_api
    model = read((ROOT / "include" / "flashattn.h").read_text(encoding="utf-8"))
    known = emit_docs.labels(model)
    enums = {enum.name: enum for enum in model.enums}
    made = {"functions": emit_docs.emit_functions(model),
            "structures": emit_docs.emit_structs(model),
            "enumerations": emit_docs.emit_enums(model), "python-reference": python_api.page(),
            "statuses": emit_docs.enum_table(enums["flashattn_status"], known),
            "reasons": emit_docs.enum_table(enums["flashattn_reason"], known),
            "determinism": emit_docs.enum_table(enums["flashattn_determinism"], known),
            "forward-budget": pictures.forward_budget(),
            "backward-budget": pictures.backward_budget()}
    return made, known


def _with_outputs(text: str, outputs: List[object]) -> str:
    waiting = iter(outputs)

    def shown(block: "re.Match[str]") -> str:
        if block["language"] != "python":
            return block.group()
        output = next(waiting)
        if not block["output"] or output is None:
            return block.group()
        if not output:
            raise ValueError(f"a program shall show its output and prints none:\n{block.group()}")
        return block.group().replace("<!-- output -->\n", f"```text\n{output}```\n")

    return programs.BLOCK.sub(shown, text)


def _program(match: "re.Match[str]") -> str:
    """A file of the repository, or the first block of code below a heading of a Markdown page."""
    path = ROOT / match[1]
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        return f"```{LANGUAGES[path.suffix]}\n{text}```"
    headings = [heading for heading in re.finditer(r"^#+ (.*)$", text, re.M)
                if heading[1].lower().replace(" ", "-") == match[2]]
    block = FENCED.search(text, headings[0].end()) if headings else None
    if not block:
        raise ValueError(f"{match.group()}: there is no such program")
    return block.group()


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    return "".join(part if part.startswith("```") else change(part) for part in FENCED.split(text))


def _names_linked(text: str, known: Dict[str, str]) -> str:
    """Names of C in backticks lead to the reference."""
    return re.sub(r"(?<!\[)`((?:flashattn|FLASHATTN)_\w+)`", lambda name:
                  f"[{name[0]}](project:#{known[name[1]]})" if name[1] in known else name[0], text)


def _relinked(text: str, page: pathlib.Path, prefix: str, files: Dict[str, pathlib.Path]) -> str:
    """Relative links of a page, to where the site has their targets."""
    here = pathlib.PurePosixPath(prefix + page.relative_to(ROOT).as_posix() if prefix
                                 else page.name).parent

    def moved(match: "re.Match[str]") -> str:
        shown, link = match[1], match[2]
        if re.match(r"[a-z]+:|#", link):
            return match.group()
        path, mark, heading = link.partition("#")
        target = (page.parent / path).resolve()
        if target.is_dir():
            if not (target / "README.md").exists():
                return shown if shown.startswith("`") else f"`{target.relative_to(ROOT)}`"
            target /= "README.md"
        name = target.relative_to(ROOT).as_posix()
        on_site = target.name if target.parent == DOCS else "repository/" + name
        if target.parent != DOCS and name not in REPOSITORY:
            # Sphinx would read another .md as a page.
            on_site = re.sub(r"\.md$", ".txt", on_site)
            files[on_site] = target
        return (f"{'!' * match.group().startswith('!')}[{shown}]"
                f"({os.path.relpath(on_site, here)}{mark}{heading})")

    return _outside_fences(text, lambda part: re.sub(r"!?\[([^\]]*)\]\(([^)\s]+)\)", moved, part))


def write(site: Site, source: pathlib.Path) -> None:
    shutil.rmtree(source, ignore_errors=True)
    for name, text in site.pages.items():
        path = source / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name, file in site.files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, source / name)
    (source / "pictures").mkdir()
    for name, text in site.pictures.items():
        (source / "pictures" / name).write_text(text, encoding="utf-8")


class _Page(html.parser.HTMLParser):
    """The ids and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: Set[str] = set()
        self.links: List[Tuple[str, str]] = []  # of an element: its name, where it leads
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, object]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.add(str(value))
            elif name in ("href", "src") and value:
                self.links.append((tag, str(value)))


def dead_links(site: pathlib.Path) -> Iterator[str]:
    """Links that lead nowhere on the site; and what a page would fetch from elsewhere."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for tag, link in page.links:
            parts = urllib.parse.urlsplit(link)
            name = path.relative_to(site)
            if parts.scheme or parts.netloc:
                if tag != "a":
                    yield f"{name}: <{tag}> is fetched from {link}"
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path \
                else path
            if not target.is_file():
                yield f"{name}: {link} leads to no file"
            elif parts.fragment and target in pages and \
                    urllib.parse.unquote(parts.fragment) not in pages[target].ids:
                yield f"{name}: {link} leads to no heading"


def main() -> int:
    parser = argparse.ArgumentParser(prog="./run docs", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "docs",
                        help="a folder for html/ and what it is made from; build/docs")
    out = parser.parse_args().out.resolve()
    try:
        from sphinx.cmd.build import main as sphinx
    except ImportError as error:
        print(f"docs: no Sphinx ({error}); the one that is installed needs Python 3.11 or newer: "
              "set PYTHON to one", file=sys.stderr)
        return 1
    site = prepare()
    errors = [f"{name}.md: {result.error}" for name, result in site.results.items()
              if result.error]
    write(site, out / "source")
    (out / "programs.json").write_text(json.dumps(
        {name: result._asdict() for name, result in site.results.items()}), encoding="utf-8")
    for name, result in site.results.items():
        for why in result.not_run:
            print(f"{name}.md: a program was not run: {why}", file=sys.stderr)
    shutil.rmtree(out / "html", ignore_errors=True)
    status = sphinx(["-q", "-W", "--keep-going", "-b", "html", "-c", str(DOCS), "-d",
                     str(out / "doctrees"), str(out / "source"), str(out / "html")])
    errors += dead_links(out / "html")
    for error in errors:
        print(f"docs: {error}", file=sys.stderr)
    if status or errors:
        return 1
    print(f"{os.path.relpath(out / 'html' / 'index.html')} is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
