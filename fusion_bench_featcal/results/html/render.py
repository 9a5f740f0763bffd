"""HTML text of a page, from the templates beside this file."""

import re
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from .parts import Page
from .svg import shapes


def _breakable(name: str) -> Markup:
    """A name that may be broken into lines after `/`, `+` and `:`."""
    return Markup(re.sub("([/+:])", r"\1<wbr>", str(escape(name))))


def html_text(page: Page) -> str:
    """Return the page as one document: style, script and figures are part of it."""
    folder = files(__package__ or "")
    environment = Environment(
        loader=PackageLoader(__package__ or "", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    # Both are files of this package, in which nothing of a run stands.
    inside = {
        name: Markup((folder / "templates" / f"page.{name}").read_text(encoding="utf-8"))
        for name in ("css", "js")
    }
    text = environment.get_template("page.html").render(page=page, shapes=shapes(), **inside)
    return text.strip() + "\n"
