"""The text of an optimized HLO module, parsed as far as counting needs it."""

import math
import re
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_ARRAY_WITH_LAYOUT = re.compile(_ARRAY.pattern + r"(?:\{[^}]*\})?")


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str
    root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments)


def arrays(shape: str) -> list[tuple[str, list[int]]]:
    """`(dtype, dimensions)` of every array in an HLO shape."""
    return [(dtype, [int(n) for n in dims.split(",") if n]) for dtype, dims in _ARRAY.findall(shape)]


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays of a shape, without the padding of its layout."""
    total = 0
    for dtype, dims in arrays(shape):
        bits = 8 if dtype == "pred" else int((re.findall(r"\d+", dtype) or ["0"])[0])
        total += math.prod(dims) * bits // 8
    return total


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text) - 1


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if not match:
        return None
    rest = line[match.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode = rest[: rest.index("(")]
    close = _closing(rest, len(opcode))
    return Instruction(match[2], shape, opcode, rest[len(opcode) + 1 : close], rest[close + 1 :], bool(match[1]))


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Computations of an HLO module as `{computation: {name: instruction}}`, and the name of the entry."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif current is not None and (instruction := _instruction(line)):
            current[instruction.name] = instruction
    return computations, entry


def integers(attributes: str, name: str) -> list[int]:
    found = re.search(name + r"=\{([\d,]*)\}", attributes)
    return [int(n) for n in found[1].split(",") if n] if found else []


def called(instruction: Instruction, name: str) -> list[str]:
    found = re.search(name + r"=\{?((?:%[\w.\-]+(?:, )?)+)\}?", instruction.attributes)
    return re.findall(r"%([\w.\-]+)", found[1]) if found else []


def root_of(computation: dict[str, Instruction]) -> Instruction:
    return next(i for i in computation.values() if i.root)


def array_texts(shape: str) -> list[str]:
    """Every array of a shape, with its layout."""
    return [found[0] for found in _ARRAY_WITH_LAYOUT.finditer(shape)]


def hbm_bytes(shape: str) -> int:
    """Bytes of the arrays that lie in main memory: on TPU, `S(1)` in a layout is on-chip memory."""
    return sum(shape_bytes(array) for array in array_texts(shape) if "S(1)" not in array)
