"""A hook of MkDocs: images are loaded when they come into view, not the plots of all studies at once."""

from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """The page with images that wait for the reader."""
    return html.replace("<img ", '<img loading="lazy" ')
