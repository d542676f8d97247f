"""Wall clocks step; whatever ends, stalls or expires goes by one that only grows."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
TOLD_TO_PEOPLE = {"store/core.py": 1, "store/cli_doctor.py": 2, "store/publisher.py": 1}
"""Where the time of day is shown, or compared with another machine's."""


def wall_clock_reads(source: str) -> int:
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return sum(
        isinstance(call, ast.Attribute)
        and isinstance(call.value, ast.Name)
        and (call.value.id, call.attr) in WALL
        for call in calls
    )


def test_nothing_is_decided_by_the_time_of_day():
    found = {
        str(path.relative_to(ROOT)): count
        for part in ("store", "connector", "replay")
        for path in (ROOT / part).rglob("*.py")
        if (count := wall_clock_reads(path.read_text(encoding="utf-8")))
    }
    assert found == TOLD_TO_PEOPLE


def test_a_reading_of_the_wall_clock_is_found():
    assert wall_clock_reads("import time\nif time.time() > 3: pass") == 1
