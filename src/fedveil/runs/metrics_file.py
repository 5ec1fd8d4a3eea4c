"""The metrics file of a run: one JSON document per line and round."""

import json
import math
import sys
from pathlib import Path
from typing import Any

_MOST = int(sys.float_info.max)

History = list[dict[str, Any]]


def read(path: Path) -> tuple[History, list[str]]:
    """The lines up to the first that is damaged, and a remark if there is one."""
    lines: History = []
    if not path.exists():
        return lines, []
    for text in path.read_text(errors="replace").splitlines():
        line = parsed(text)
        if line is None or (lines and line["round"] <= lines[-1]["round"]):
            damage = f"metrics.jsonl was damaged after {len(lines)} lines: the rest was left out"
            return lines, [damage]
        lines.append(line)
    return lines, []


def parsed(text: str) -> dict[str, Any] | None:
    """Parse a line of the metrics file. None if it is not one that a run writes."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("round")) is not int or "epsilon" not in line:
        return None
    wanted = ("clients", "clipped", "snr", "refused", "clip") if line["round"] else ()
    numbers = [value for name, value in line.items() if name != "claim"]
    good = all(name in line for name in wanted) and all(map(_is_number, numbers))
    return line if good and _claimed(line) else None


def last_round(history: History) -> int:
    """The last round that was measured."""
    return int(history[-1]["round"]) if history else 0


def json_text(value: dict[str, Any], indent: int | None = None) -> str:
    """One JSON document, with null in place of numbers that are not finite."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _is_number(value: object) -> bool:
    """Whether a run can have measured the value: null, or within the range of floats."""
    return (
        value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < _MOST)
    )


def _claimed(line: dict[str, Any]) -> bool:
    """Whether epsilon and the text of its claim are both there, or neither."""
    words = isinstance(line.get("claim"), str)
    return words if line["epsilon"] is not None else line.get("claim") is None
