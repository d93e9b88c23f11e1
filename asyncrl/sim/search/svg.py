"""Elements of an SVG picture, as text."""

from xml.sax.saxutils import escape


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    """Return words whose ``anchor`` is at the point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Return a filled rectangle; a negative width is drawn as none."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" fill="{colour}"/>'
