"""A hook of MkDocs: images load when they come into view, and drawings open by themselves, to be enlarged."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """The page with images that wait for the reader; not the plots of all studies at once."""
    html = re.sub(r'<img [^>]*src="([^"]+\.svg)"[^>]*>', r'<a href="\1" title="Enlarge">\g<0></a>', html)
    return html.replace("<img ", '<img loading="lazy" ')
