"""Sphinx, for bindings/docs/manual.py."""
import pathlib
import re
from typing import Any

from pygments.lexers.rust import RustLexer

_header = (pathlib.Path(__file__).resolve().parents[2] / "include" / "flashattn.h").read_text()
project = "libflashattn"
release = ".".join(re.findall(r"#define FLASHATTN_VERSION_\w+ (\d+)\n", _header))
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
myst_enable_extensions = ["fieldlist"]
nitpicky = True
smartquotes = False  # quotes of programs stay as they are
html_theme = "alabaster"
html_theme_options = {
    "description": f"Exact attention behind a C ABI. Version {release}.",
    "fixed_sidebar": True,
    "page_width": "1100px",
    "sidebar_width": "250px",
}
html_static_path = ["static"]
html_title = f"libflashattn {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False


def setup(app: Any) -> None:
    # rustdoc does not compile a program of this language.
    app.add_lexer("rust,ignore", RustLexer)
