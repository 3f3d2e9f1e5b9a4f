"""A minimal SVG writer for pictures of plans: rectangles, ribbons and text, with tooltips."""

from xml.sax.saxutils import escape, quoteattr

FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"

_LEAD = 30.0
"""Length in pixels of the straight part at each end of a ribbon, which a label fits on."""

HATCHED = "url(#hatch)"
"""A fill with white stripes."""

_HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="2.5" height="6" fill="#ffffff"/></pattern>'
)


class Canvas:
    """Shapes in the order in which they are painted; all lengths are in pixels."""

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
        """Adds a rectangle; browsers show ``tip`` under the pointer."""
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
        """Adds a band between two points, which are the middles of its vertical ends."""
        (x0, y0), (x1, y1) = start, end
        left, right, half = x0 + _LEAD, x1 - _LEAD, thickness / 2
        middle = (left + right) / 2

        def edge(*places: tuple[float, float], shift: float) -> str:
            return " ".join(f"{x:.2f},{y + shift:.2f}" for x, y in places)

        self._add(
            f'<path d="M{edge((x0, y0), shift=-half)} L{edge((left, y0), shift=-half)} '
            f"C{edge((middle, y0), (middle, y1), (right, y1), shift=-half)} "
            f"L{edge((x1, y1), shift=-half)} L{edge((x1, y1), (right, y1), shift=half)} "
            f"C{edge((middle, y1), (middle, y0), (left, y0), shift=half)} "
            f'L{edge((x0, y0), shift=half)} Z" fill="{color}" fill-opacity="0.38"',
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
        """Adds a line of text; ``y`` is its baseline, ``anchor`` is start, middle or end."""
        weight = ' font-weight="bold"' if bold else ""
        self._shapes.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{escape(text)}</text>'
        )

    def document(self, width: float, height: float, title: str) -> str:
        """The whole SVG file."""
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
