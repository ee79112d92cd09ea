"""Parser from PTX text to instructions with operands."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ptx.faults import NotModelled


class Register(NamedTuple):
    name: str
    slot: int
    bits: int  # 1 for a predicate


class Special(NamedTuple):
    name: str  # such as %tid.x


class Immediate(NamedTuple):
    value: int  # an integer, or the bits of a float


class Symbol(NamedTuple):
    name: str


class Address(NamedTuple):
    base: Register | Symbol | Immediate
    offset: int


class TensorAddress(NamedTuple):
    base: Register
    coordinates: "tuple[Operand, ...]"


class Vector(NamedTuple):
    items: "tuple[Operand | None, ...]"  # None for `_`


Operand = Register | Special | Immediate | Symbol | Address | TensorAddress | Vector


@dataclass
class Instruction:
    op: str  # such as ld.global.v4.b32
    parts: tuple[str, ...]
    operands: list[Operand | None]  # None for `_`
    guard: Register | None
    negated: bool
    text: str
    line: int  # line number in the PTX
    target: int = -1  # index of a branch's target


@dataclass
class Program:
    """A parsed kernel."""

    name: str
    params: list[tuple[str, int, int]]  # (name, bytes, alignment)
    code: list[Instruction] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    # names of the dynamic shared memory, which is a single block
    dynamic_shared: list[str] = field(default_factory=list)


class _Scope:
    """Names declared in a pair of braces."""

    def __init__(self, outer: "_Scope | None") -> None:
        self.outer = outer
        self.registers: dict[str, Register] = {}
        self.families: dict[str, int] = {}  # the prefix of `.reg .b32 %r<100>` and its bits
        self.labels: dict[str, int] = {}

    def chain(self) -> Iterator["_Scope"]:
        scope: _Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer


BITS = {"pred": 1} | {f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64, 128)}
_PARAM = re.compile(
    r"\.param (?:\.align (\d+) )?\.(\w+) (?:\.ptr )?(?:\.(?!align)\w+ )*(?:\.align \d+ )?([\w$]+)(?:\[(\d+)\])?$"
)
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?$")


def kernels(ptx: str) -> dict[str, str]:
    """Return the text of each entry function of a module, by name."""
    ptx = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), ptx, flags=re.DOTALL)
    ptx = re.sub(r"//[^\n]*", "", ptx)
    starts = [m.start() for m in re.finditer(r"^\s*(?:\.visible |\.weak )?\.entry\s", ptx, re.MULTILINE)]
    found = {}
    for a, b in zip(starts, [*starts[1:], len(ptx)], strict=True):
        text = ptx[a:b]
        name = re.search(r"\.entry\s+([\w$]+)", text)
        assert name is not None
        found[name[1]] = "\n" * ptx[:a].count("\n") + text
    return found


def parse(ptx: str, entry: str | None = None) -> Program:
    """Parse one kernel of a module.

    entry: its name; None if the module has only one.
    """
    texts = kernels(ptx)
    if entry is None:
        (entry,) = texts
    shared = re.findall(r"\.extern\s+\.shared[^;]*?([\w$]+)\[\]", ptx)
    return _Parser(entry, texts[entry], shared).program


def split(text: str) -> list[str]:
    """Split at commas outside braces and brackets."""
    parts, depth, last = [], 0, 0
    for at, c in enumerate(text):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            parts.append(text[last:at].strip())
            last = at + 1
    parts.append(text[last:].strip())
    return [x for x in parts if x]


class _Parser:
    def __init__(self, name: str, text: str, shared: list[str]) -> None:
        open_, close = text.index("("), text.index(")")
        self.program = Program(name, [_param(x) for x in split(text[open_ + 1 : close])], dynamic_shared=shared)
        self.scope = _Scope(None)
        self.pending: list[tuple[Instruction, str, _Scope]] = []  # branches whose targets are not yet known
        body = text.index("{", close)
        self._statements(text, body + 1)
        for instruction, label, scope in self.pending:
            found = [s.labels[label] for s in scope.chain() if label in s.labels]
            if not found:
                raise NotModelled(f"a branch to {label}, which is not in {name}")
            instruction.target = found[0]

    def _statements(self, text: str, at: int) -> None:
        """Parse statements up to the closing brace."""
        line = text.count("\n", 0, at) + 1
        while True:
            gap = re.compile(r"\s*").match(text, at)
            assert gap is not None
            line += text.count("\n", at, gap.end())
            at = gap.end()
            if text[at] == "{":
                self.scope, at = _Scope(self.scope), at + 1
            elif text[at] == "}":
                if self.scope.outer is None:
                    return
                self.scope, at = self.scope.outer, at + 1
            elif m := re.compile(r"([$\w]+):(?!:)").match(text, at):
                self.scope.labels[m[1]] = len(self.program.code)
                at = m.end()
            elif m := re.compile(r"\.(?:loc|file|pragma)[^\n]*").match(text, at):
                at = m.end()
            else:
                stop = text.index(";", at)
                self._statement(" ".join(text[at:stop].split()), line)
                line += text.count("\n", at, stop)
                at = stop + 1

    def _statement(self, text: str, line: int) -> None:
        if not text:
            return None
        if text.startswith(".reg"):
            return self._registers(text)
        m = re.match(r"(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", text)
        if m is None:
            raise NotModelled(f"line {line}: {text}")
        negated, guard, op, rest = m.groups()
        parts = tuple(op.replace("::", "_").split("."))
        found = self._register(guard) if guard else None
        instruction = Instruction(op, parts, [], found, bool(negated), text, line)
        if parts[0] == "bra":
            self.pending.append((instruction, rest.strip(), self.scope))
        else:
            instruction.operands = [self._operand(x) for x in split(rest)]
        self.program.code.append(instruction)
        return None

    def _registers(self, text: str) -> None:
        m = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text)
        if m is None or m[1] not in BITS:
            raise NotModelled(text)
        for name in split(m[2]):
            if family := re.match(r"(.*)<\d+>$", name):
                self.scope.families[family[1]] = BITS[m[1]]
            else:
                self.scope.registers[name] = self._new(name, BITS[m[1]])

    def _new(self, name: str, bits: int) -> Register:
        self.program.registers.append(Register(name, len(self.program.registers), bits))
        return self.program.registers[-1]

    def _register(self, name: str) -> Register:
        found = self._find(name)
        if found is None:
            raise NotModelled(f"{name} is not declared in {self.program.name}")
        return found

    def _find(self, name: str) -> Register | None:
        for scope in self.scope.chain():
            if name in scope.registers:
                return scope.registers[name]
            if (family := name.rstrip("0123456789")) != name and family in scope.families:
                scope.registers[name] = self._new(name, scope.families[family])
                return scope.registers[name]
        return None

    def _operand(self, text: str) -> Operand | None:
        if text == "_":
            return None
        if text.startswith("{"):
            return Vector(tuple(self._operand(x) for x in split(text[1:-1])))
        if "|" in text:
            return Vector(tuple(self._operand(x.strip()) for x in text.split("|")))
        if text.startswith("["):
            return self._address(split(text[1:-1]))
        if found := self._find(text):
            return found
        if text.startswith("%"):
            return Special(text)
        if m := re.match(r"0[fd]([0-9a-fA-F]{8}|[0-9a-fA-F]{16})$", text):
            return Immediate(int(m[1], 16))
        if _NUMBER.match(text):
            return Immediate(int(text.rstrip("U"), 0))
        return Symbol(text)

    def _address(self, inside: list[str]) -> Operand:
        if len(inside) == 2:
            base, coordinates = self._register(inside[0]), self._operand(inside[1])
            assert isinstance(coordinates, Vector)
            return TensorAddress(base, tuple(x for x in coordinates.items if x is not None))
        (text,) = inside
        m = re.match(r"([%$\w]+)\s*(?:\+\s*(-?\w+))?$", text)
        if m is None:
            raise NotModelled(f"address [{text}]")
        base = self._operand(m[1])
        assert isinstance(base, (Register, Symbol, Immediate))
        return Address(base, int(m[2], 0) if m[2] else 0)


def _param(text: str) -> tuple[str, int, int]:
    m = _PARAM.match(" ".join(text.split()))
    if m is None:
        raise NotModelled(f"parameter {text}")
    align, kind, name, count = m.groups()
    size = BITS[kind] // 8 * int(count or 1)
    return name, size, int(align or BITS[kind] // 8)
