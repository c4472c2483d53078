"""Settings of the site that `make docs` builds: these pages, and a reference made of docstrings."""

import re
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.util import logging

import skein

HERE = Path(__file__).parent
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)[^)]*\)")

project = "Skein"
version = release = skein.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.apidoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["plots"]
apidoc_modules = [
    {
        "path": f"../{package}",
        "destination": f"reference/{package}",
        # Neither what is generated, nor what only services and simulations compute with (it loads torch).
        "exclude_patterns": ["**/v1/**", "**/__main__.py", "**/numeric/**", "**/sim/**"],
        "max_depth": 2,
        "module_first": True,
        "separate_modules": True,
        "automodule_options": {"members", "show-inheritance"},
    }
    for package in ("client", "skein")
]
html_theme = "alabaster"
html_theme_options = {
    "description": "Training on machines that come and go",
    "fixed_sidebar": True,
    "page_width": "70rem",
}
html_show_copyright = False
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html", "relations.html"]}

default_role = "code"  # in docstrings single backquotes are code, as in Markdown
autodoc_member_order = "bysource"
autodoc_typehints_format = "fully-qualified"
python_use_unqualified_type_names = True
autodoc_use_type_comments = False
autodoc_inherit_docstrings = False
suppress_warnings = ["ref.python"]  # a name that two modules have may be linked to either
napoleon_numpy_docstring = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]


def setup(app: Sphinx) -> None:
    """Adds what these pages have beyond Sphinx: diagrams as text, and links to files of the repository."""
    app.add_lexer("mermaid", TextLexer)
    app.connect("source-read", _name_files)
    app.connect("autodoc-process-docstring", _as_text)


def _name_files(_app: Sphinx, page: str, source: list[str]) -> None:
    """Turns links to files of the repository that are no pages here into their names; those have to be there."""

    def named(match: re.Match[str]) -> str:
        path = (HERE / f"{page}.md").parent.joinpath(match[2]).resolve()
        if path.is_relative_to(HERE):
            return match[0]
        if not path.exists():
            logging.getLogger(__name__).warning("%s: no such file in the repository: %s", page, match[2])
        return f"{match[1]} (`{path.relative_to(HERE.parent)}`)"

    source[0] = _LINK.sub(named, source[0])


def _as_text(_app: Sphinx, what: str, _name: str, _of: object, _options: object, lines: list[str]) -> None:
    """Puts an empty line before each list, which docstrings here do without, marks examples, and lets bars be bars."""
    for at in range(len(lines) - 1, -1, -1):
        lines[at] = re.sub(r"(?<!`)\|", r"\\|", lines[at]) if "`" not in lines[at] else lines[at]
        is_first = at > 0 and lines[at - 1] and not lines[at - 1].startswith(("- ", "  "))
        if lines[at].lstrip().startswith("- ") and is_first:
            lines.insert(at, "")
        elif what == "module" and lines[at].startswith("    ") and not any(lines[at - 1 : at]):
            lines[at:at] = ["::", ""]
