"""A gauge as SVG: how much is left of something that runs out."""

import math

from fedveil.web.chart import frame
from fedveil.web.html import Content, Markup, tag

_WIDTH, _HEIGHT, _RADIUS, _X, _Y = 200, 118, 84.0, 100.0, 104.0
_LOW = 0.1
"""The share below which a gauge is drawn as a warning."""


def gauge(id: str, title: str, said: str, share: float, value: str, *below: Content) -> Markup:
    """Half a ring, full at a `share` of 1 and empty at 0, with `value` in it and words below.

    `said` is the same for those who do not see it. A share that is no number is drawn as empty.
    """
    left = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    low = " low" if left < _LOW else ""
    parts = [tag("path", class_="ring", d=_arc(1.0))]
    if left > 0:
        parts.append(tag("path", class_=f"left{low}", d=_arc(left)))
    text = tag("text", value, class_="middle value", x=_X, y=_Y - 14)
    picture = frame(id, title, said, *parts, text, width=_WIDTH, height=_HEIGHT, class_="gauge")
    return tag("figure", picture, tag("figcaption", *below), id=id, class_="gauge")


def _arc(share: float) -> str:
    """From the left end over the top, as far as the share goes."""
    angle = math.pi * (1 - share)
    x, y = _X + _RADIUS * math.cos(angle), _Y - _RADIUS * math.sin(angle)
    return f"M{_X - _RADIUS:.1f} {_Y:.1f}A{_RADIUS:.0f} {_RADIUS:.0f} 0 0 1 {x:.1f} {y:.1f}"
