"""Just enough SVG for pictures of plans: rectangles, ribbons and text, with tooltips."""

from xml.sax.saxutils import escape, quoteattr

FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"

HATCHED = "url(#hatch)"
"""A fill of white stripes."""

_HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="2.5" height="6" fill="#ffffff"/></pattern>'
)


class Canvas:
    """Shapes in the order in which they are painted; all lengths are pixels."""

    def __init__(self) -> None:
        self._shapes: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        opacity: float = 1.0,
        stroke: str = "none",
        tip: str = "",
    ) -> None:
        """A rectangle; ``tip`` is shown by a browser under the pointer."""
        self._add(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
            f'fill="{fill}" fill-opacity="{opacity:g}" stroke="{stroke}"',
            "rect",
            tip,
        )

    def ribbon(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        thickness: float,
        color: str,
        *,
        tip: str = "",
    ) -> None:
        """A band between the middles of its two vertical ends."""
        (x0, y0), (x1, y1) = start, end
        middle, half = (x0 + x1) / 2, thickness / 2
        self._add(
            f'<path d="M{x0:.2f},{y0 - half:.2f} C{middle:.2f},{y0 - half:.2f} '
            f"{middle:.2f},{y1 - half:.2f} {x1:.2f},{y1 - half:.2f} L{x1:.2f},{y1 + half:.2f} "
            f"C{middle:.2f},{y1 + half:.2f} {middle:.2f},{y0 + half:.2f} {x0:.2f},{y0 + half:.2f} "
            f'Z" fill="{color}" fill-opacity="0.38"',
            "path",
            tip,
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: str = "start",
        bold: bool = False,
        color: str = "#222222",
    ) -> None:
        """One line of text; ``y`` is its baseline, ``anchor`` start, middle or end."""
        weight = ' font-weight="bold"' if bold else ""
        self._shapes.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{escape(text)}</text>'
        )

    def document(self, width: float, height: float, title: str) -> str:
        """The whole file."""
        size = f'width="{width:.0f}" height="{height:.0f}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:.0f} '
            f'{height:.0f}" role="img" aria-label={quoteattr(title)} '
            f"font-family={quoteattr(FONT)}>"
        )
        return "\n".join(
            [head, _HATCH, f'<rect {size} fill="#ffffff"/>', *self._shapes, "</svg>\n"]
        )

    def _add(self, start: str, kind: str, tip: str) -> None:
        if tip:
            self._shapes.append(f"{start}><title>{escape(tip)}</title></{kind}>")
        else:
            self._shapes.append(f"{start}/>")
