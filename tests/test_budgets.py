"""Each room, file and class has a budget: what is new makes room for itself, or moves its budget.

So has each folder of tests, for the private names of other objects that its tests read: a test that
knows the inside of an object changes with it, although nobody outside sees a difference.

A budget that moves up says why in its commit. One that has become too wide is narrowed, so that
what was gained is held.
"""

import ast
import functools
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvferry

ROOT = Path(kvferry.__file__).parent
TESTS = Path(__file__).parent
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

ROOMS: dict[str, int] = {
    "(base)": 572,
    "benchmarks": 6879,
    "cache": 2391,
    "cli": 3349,
    "cluster": 1438,
    "config": 435,
    "connectors": 4628,
    "control": 2961,
    "engine": 3751,
    "explain": 1756,
    "integrations": 4922,
    "layouts": 3674,
    "observe": 610,
    "router": 5583,
    "serving": 1257,
    "testing": 3968,
    "topology": 2208,
    "transports": 6117,
}
"""Room → lines of code: no blank lines, comments and docstrings."""
SLACK = 0.02
"""Share of its budget that a room may leave unused."""

FILE_LINES = 400
"""Lines of code of a file."""
LONG_FILES: dict[str, int] = {
    "cli/bench.py": 465,
    "control/leases.py": 443,
    "control/server.py": 454,
    "layouts/kernels.py": 409,
}
"""Files above that, with what they have; none may come, and none may grow."""

CLASS = (25, 12, 400)
"""Methods, attributes and lines of a class, the blank ones and docstrings included."""
LARGE_CLASSES: dict[str, tuple[int, int, int]] = {
    "benchmarks/vllm_servers/server.py:ServerOptions": (3, 15, 88),
    "cache/manager.py:KVCacheManager": (20, 10, 431),
    "cli/bench.py:_Reader": (8, 15, 187),
    "cluster/engine_server.py:EngineServer": (19, 15, 271),
    "cluster/launcher.py:Cluster": (20, 15, 358),
    "serving/openai.py:_Common": (0, 13, 16),
    "config/cluster.py:EngineConfig": (2, 18, 75),
    "config/cluster.py:RouterConfig": (1, 17, 66),
    "observe/records.py:TransferRecord": (1, 18, 38),
    "connectors/pull/config.py:PullConfig": (11, 24, 222),
    "connectors/pull/lender.py:Lender": (18, 13, 317),
    "control/cache_events.py:CacheEventSubscriber": (12, 13, 169),
    "control/client.py:ControlClient": (31, 17, 475),
    "control/leases.py:_Open": (2, 16, 45),
    "control/leases.py:LeaseTable": (35, 12, 505),
    "control/server.py:ControlService": (36, 17, 377),
    "control/messages.py:StatusReport": (0, 13, 25),
    "control/tickets.py:Ticket": (2, 19, 59),
    "engine/engine.py:Engine": (23, 15, 290),
    "engine/loop.py:EngineLoop": (26, 15, 316),
    "engine/model_config.py:DecoderConfig": (7, 13, 56),
    "engine/request.py:EngineRequest": (13, 15, 103),
    "engine/scheduler.py:Scheduler": (27, 13, 427),
    "engine/weights_folder.py:TinyConfig": (0, 14, 24),
    "integrations/vllm/caches.py:LayerCache": (0, 14, 23),
    "integrations/vllm/connector.py:KVFerryConnector": (32, 4, 243),
    "integrations/vllm/scheduler.py:SchedulerHalf": (27, 22, 462),
    "integrations/vllm/worker.py:WorkerHalf": (14, 19, 227),
    "mailbox.py:Mailbox": (17, 14, 214),
    "testing/connector_conformance.py:ConnectorConformance": (26, 4, 236),
    "testing/fake_engine.py:FakeEngine": (27, 15, 382),
    "testing/fake_rank.py:FakeRequest": (7, 19, 65),
    "testing/transport_conformance.py:TransportConformance": (30, 1, 466),
    "topology/group.py:GroupGeometry": (35, 9, 325),
    "transports/base.py:Transfer": (13, 14, 135),
    "transports/tcp_link.py:TcpLink": (27, 15, 329),
    "transports/vm_bounce.py:Bounce": (0, 14, 31),
}
"""Classes above any of these, with what they have; none may come, and none may grow."""

PRIVATE_NAMES: dict[str, int] = {
    "cache": 7,
    "cli": 4,
    "cluster": 10,
    "connectors": 58,
    "control": 9,
    "engine": 7,
    "integrations": 20,
    "layouts": 7,
    "testing": 3,
    "topology": 7,
    "transports": 17,
    "vllm_servers": 1,
}
"""Folder of tests → private names of other objects that its tests read."""
DOCUMENTED = frozenset({"_asdict", "_fields", "_make", "_replace", "_exit"})
"""Names of named tuples and of ``os`` that are public although they begin with an underscore."""


def code_lines(source: str) -> int:
    """Lines of code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else []:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                docstrings |= set(range(child.lineno, (child.end_lineno or 0) + 1))
    nothing = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


@dataclass(frozen=True)
class Size:
    """How large a class is."""

    name: str
    methods: int
    attributes: int
    """Fields of a dataclass or struct, and what ``__init__`` sets."""
    lines: int

    @property
    def figures(self) -> tuple[int, int, int]:
        """As :data:`CLASS` has them."""
        return self.methods, self.attributes, self.lines


def classes_of(room_file: str, source: str) -> Iterator[Size]:
    """The classes of a module."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        functions = [
            each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        fields = {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        for function in functions:
            if function.name == "__init__":
                fields |= set(_set_by(function))
        lines = (node.end_lineno or 0) - node.lineno + 1
        yield Size(f"{room_file}:{node.name}", len(functions), len(fields), lines)


def _set_by(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                    yield part.attr


def private_names(source: str) -> Iterator[str]:
    """The private names that are read on something else than ``self``, ``cls`` and ``super()``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr not in DOCUMENTED:
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            if is_private and ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield node.attr


@functools.cache
def private_names_of_tests() -> dict[str, int]:
    """Folder of tests → how often its tests read a private name of another object."""
    found: Counter[str] = Counter()
    for path in sorted(TESTS.rglob("*.py")):
        folder = path.relative_to(TESTS).parts[0] if path.parent != TESTS else "(base)"
        found[folder] += sum(1 for _ in private_names(path.read_text(encoding="utf-8")))
    for path in sorted((TESTS.parent / "examples").rglob("test_*.py")):
        found["(examples)"] += sum(1 for _ in private_names(path.read_text(encoding="utf-8")))
    return dict(found)


@functools.cache
def sources() -> dict[str, str]:
    """Path below the package → source; the benchmarks are a room beside those of the package."""
    return {
        str(path.relative_to(base)): path.read_text(encoding="utf-8")
        for base, tree in ((ROOT, ROOT), (BENCHMARKS.parent, BENCHMARKS))
        for path in sorted(tree.rglob("*.py"))
    }


@functools.cache
def room_lines() -> dict[str, int]:
    """Room → lines of code; a module beside the rooms is one of its own name."""
    lines: dict[str, int] = {}
    for path, source in sources().items():
        room = path.split("/")[0] if "/" in path else "(base)"
        lines[room] = lines.get(room, 0) + code_lines(source)
    return lines


def test_every_room_has_a_budget_and_keeps_it():
    found = room_lines()
    assert found.keys() == ROOMS.keys()
    above = {room: (n, ROOMS[room]) for room, n in found.items() if n > ROOMS[room]}
    assert not above, f"lines and budget of rooms above it: {above}; take as much out, or say why"


@pytest.mark.parametrize("room", ROOMS)
def test_a_budget_is_not_wider_than_its_room(room):
    lines, budget = room_lines()[room], ROOMS[room]
    narrow = round(lines * (1 + SLACK / 2))
    assert lines >= budget * (1 - SLACK) - 5, f"{room}: {lines} of {budget} lines; write {narrow}"


def test_no_file_grows_above_the_budget_of_files():
    long = {path: n for path, text in sources().items() if (n := code_lines(text)) > FILE_LINES}
    above = {path: n for path, n in long.items() if n > LONG_FILES.get(path, FILE_LINES)}
    assert not above, f"more than {FILE_LINES} lines of code, or than before: {above}"
    assert not LONG_FILES.keys() - long.keys(), "shorter now: take them off the list"


def test_no_class_grows_above_the_budget_of_classes():
    sizes = [size for path, text in sources().items() for size in classes_of(path, text)]
    large = {
        size.name: size.figures
        for size in sizes
        if any(have > may for have, may in zip(size.figures, CLASS, strict=True))
    }
    above = {
        name: figures
        for name, figures in large.items()
        if any(
            have > max(may, before)
            for have, may, before in zip(
                figures, CLASS, LARGE_CLASSES.get(name, CLASS), strict=True
            )
        )
    }
    assert not above, f"methods, attributes and lines above {CLASS}, or than before: {above}"
    assert not LARGE_CLASSES.keys() - large.keys(), "smaller now: take them off the list"


def test_the_tests_of_no_folder_read_more_private_names_than_before():
    found = private_names_of_tests()
    above = {folder: n for folder, n in found.items() if n > PRIVATE_NAMES.get(folder, 0)}
    assert not above, f"read what the object tells, or give it a seam: {above}, {PRIVATE_NAMES}"


@pytest.mark.parametrize("folder", PRIVATE_NAMES)
def test_a_budget_of_private_names_is_what_the_tests_read(folder):
    found = private_names_of_tests()[folder]
    assert found == PRIVATE_NAMES[folder], f"fewer now: write {found}"


def test_private_names_are_those_of_other_objects():
    source = "self._a.b\nsuper()._c\ncls._d\nx._e.f\nself.g._h\nx.__i__\npoint._replace(y=1)\n"
    assert sorted(private_names(source)) == ["_e", "_h"]


def test_docstrings_comments_and_blank_lines_are_no_code():
    source = '"""Two\\nlines."""\n\n# a comment\nx = (\n    1\n)\n\n'
    source += 'def f():\n    """One."""\n    return x\n'
    assert code_lines(source) == 5


def test_fields_and_what_init_sets_are_attributes():
    source = (
        "class A:\n    x: int\n    def __init__(self):\n        self.y, self.z = 1, 2\n"
        "        self.w: int = 3\n    def f(self):\n        self.later = 1\n"
    )
    (size,) = classes_of("room/a.py", source)
    assert size == Size("room/a.py:A", methods=2, attributes=4, lines=7)
