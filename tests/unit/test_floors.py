"""Who may import whom: modules stand on floors and import from below, from their left, or inside their own room."""

from __future__ import annotations

import ast
from pathlib import Path

import esolm

ROOT = Path(esolm.__file__).parent
FLOORS = [
    "randomness terms nested options machine draw",
    "visibility noise order",
    "net",
    "system",
    "sampling speculative estimators likelihood counting",
    "systems",
    "data metrics parallel ema sharded checkpoint",
    "folder evaluate model learner runs",
    "ckpt train bench hf released convert export overlap harness progress judge mauve molecules "
    "info frames show picture",
    "config plan launch score variance demo generate reproduce cli __main__",
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}
PLACE = {room: place for rooms in FLOORS for place, room in enumerate(rooms.split())}
ROOMS = ("net", "data", "bench", "reproduce")  # folders whose modules may import each other; systems never do
EXTRAS = {
    *("datasets", "transformers", "matplotlib", "tensorboard", "wandb", "zstandard", "lm_eval", "huggingface_hub"),
    "rdkit",
}
EXTRAS_ALLOWED = (
    "data/corpora",
    "data/tokenizer",
    "metrics",
    "reproduce/document",
    "reproduce/smoke",
)  # besides floor 8
WRAPPERS = {"hf": {"transformers"}, "harness": {"lm_eval"}}  # subclasses of an extra's classes, nothing without it


def modules() -> list[tuple[str, ast.Module]]:
    """`data/loader` and the like, with their syntax trees; the package's own face is no module of a floor."""
    paths = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")
    return [(str(p.relative_to(ROOT).with_suffix("")), ast.parse(p.read_text())) for p in paths]


def imported(module: str, tree: ast.Module) -> set[str]:
    """Modules of esolm that the module imports, anywhere in it."""
    parents = ["esolm", *module.split("/")[:-1]]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{name}.{alias.name}" for alias in node.names} if name == "esolm" else {name}
    return {name.removeprefix("esolm.") for name in found if name.startswith("esolm.")}


def test_every_module_has_a_floor():
    rooms = {name.split("/")[0] for name, _ in modules()}
    assert rooms - FLOOR.keys() == set()


def test_imports_go_down_or_left_or_stay_in_the_room():
    wrong = []
    for module, tree in modules():
        room = module.split("/")[0]
        for target in imported(module, tree):
            other = target.split(".")[0]
            if other not in FLOOR or (room, other) == ("system", "systems"):
                continue  # a name of the package itself, as __version__; the folder whose files are the systems
            same = other == room and room in ROOMS
            systems = room == other == "systems"
            left = FLOOR[other] == FLOOR[room] and PLACE[other] < PLACE[room]
            lower = FLOOR[other] < FLOOR[room] and not (FLOOR[room] == 6 and FLOOR[other] in (3, 4, 5))
            if systems or not (same or left or lower):
                wrong.append(f"{module} (floor {FLOOR[room]}) imports {target} (floor {FLOOR[other]})")
    assert wrong == []


def test_extras_are_imported_inside_functions_where_they_may_be():
    wrong = []
    for module, tree in modules():
        top = set(ast.walk(tree)) - {
            inner
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for inner in ast.walk(node)
        }
        allowed = module in EXTRAS_ALLOWED or FLOOR.get(module.split("/")[0]) == 8
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = {node.module.split(".")[0]}
            else:
                continue
            if names & (EXTRAS - WRAPPERS.get(module, set())) and (node in top or not allowed):
                wrong.append(f"{module}:{node.lineno} imports {', '.join(names & EXTRAS)}")
    assert wrong == []


def test_nothing_imports_a_wrapper_of_an_extra_when_it_is_imported_itself():
    for module, tree in modules():
        outer = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        found = imported(module, ast.Module(outer, []))
        assert module in WRAPPERS or not found & WRAPPERS.keys(), module
