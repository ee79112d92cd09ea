"""The conditions in a class' source: integers that a length may be compared with, dtypes, devices,
and random numbers, on which the result of a call may depend. A trial (trial.py) cannot show that a
class computes the same at lengths, dtypes and devices that it does not try, so the source must say.

The answers err on the side of dependence: every integer of the code counts, but for those that are
a size of a tensor and nothing else.
"""

import ast
import inspect
import math
import random
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from txl_kernels.integrations.source import has_own_source, module_of, names_in, parts, tree_of


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# Functions and methods of tensors whose plain integer arguments are sizes, axes or fill values.
_SIZES = words("""
    view reshape expand repeat unflatten flatten permute transpose movedim unsqueeze squeeze size stride zeros ones
    empty new_zeros new_ones new_empty full softmax log_softmax sum mean cat stack sqrt rsqrt dropout masked_fill
    masked_fill_ full_like new_full layer_norm any all einsum rearrange repeat_kv contiguous matmul linear
    multi_head_attention_forward
""")
# Functions that compare, whose real arguments may be lengths, too.
_COMPARING = words("""
    clamp clamp_ clip clip_ min max minimum maximum lt le gt ge eq ne less greater bucketize fmod remainder arange tril
    triu tril_ triu_ narrow isclose
""")
# Names that ask for a dtype, a device or the environment, but for CUDA's autocast
# (`torch.is_autocast_enabled()`), which a trial varies.
_KINDS = words("""
    dtype device is_cuda is_cpu is_floating_point itemsize get_device is_autocast_cpu_enabled get_autocast_dtype
    get_autocast_gpu_dtype is_inference is_inference_mode_enabled
    get_default_dtype get_default_device is_available float16 bfloat16 float32 float64 half double
    finfo element_size nbytes HalfTensor BFloat16Tensor FloatTensor DoubleTensor environ getenv
""")
_LOOKUPS = ("get", "isinstance")  # functions whose arguments decide, as a condition does
# Functions of lengths that grow so slowly that what they are compared with is no length.
_SLOW = words("log log2 log10 log1p bit_length")
_OTHER_DEVICE = re.compile(r"[\w.]+\.device\.type [!=]= '(?!cuda|cpu)\w+'")  # of a kind without kernels
_PLAIN = (ast.Constant, ast.Name, ast.Attribute, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List, ast.Starred,
          ast.operator, ast.unaryop, ast.expr_context)  # fmt: skip
LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number")


@dataclass(frozen=True)
class Conditions:
    """The conditions on which the result of a class' code may depend.

    Attributes:
        largest: the largest integer that a length or a distance may be compared with.
        named: where it stands in the code.
        kinds: None, or the place of a branch by dtype, device or environment.
        draws: None, or the place that draws random numbers of Python or NumPy.
        by_layer: whether the number of the layer in its model decides anything.
    """

    largest: int
    named: str
    kinds: str | None
    draws: str | None
    by_layer: bool


def conditions_of(kind: type, module: nn.Module, read_past: tuple[nn.Module, ...] = ()) -> Conditions:
    """Return the conditions of a class' code, with the functions that it calls.

    Args:
        kind: the class.
        module: a module of it, whose attributes the code may read.
        read_past: submodules whose code the adapter does not call.

    Raises:
        OSError, TypeError: the source of a part cannot be found.
    """
    reader = _Reader(_values([module, *module.children(), *read_past]))
    for owner in (kind, *(type(part) for part in read_past)):
        for part in _reached(owner):
            reader.read(part)
    return Conditions(reader.largest, reader.named, reader.kinds, reader.draws, reader.by_layer)


def _reached(kind: type) -> Iterator[Any]:
    """Yield the classes and functions of a class' code, with those that it imports, outside torch
    and Python's own library."""
    todo = [part for part in parts(kind) if has_own_source(part)]
    seen = {id(part) for part in todo}
    while todo:
        part = todo.pop()
        yield part
        names = names_in(part)
        beside = vars(module_of(part))
        found = [beside.get(name) for name in names]
        modules = [x for x in found if isinstance(x, types.ModuleType) and has_own_source(x)]
        found += [getattr(x, name, None) for x in modules for name in names]
        for other in found:
            is_code = inspect.isfunction(other) or inspect.isclass(other)
            if is_code and id(other) not in seen and has_own_source(other):
                seen.add(id(other))
                todo.append(other)


def _values(modules: list[Any]) -> dict[str, list[Any]]:
    """Return the values of attributes by name, of modules and of their configurations."""
    found: dict[str, list[Any]] = {}
    for module in modules:
        own = {**vars(module), **module._parameters, **module._buffers}
        described = [
            x for x in vars(module).values() if hasattr(x, "__dict__") and not isinstance(x, (nn.Module, type))
        ]
        of_class = {name: x for base in type(module).__mro__ for name, x in vars(base).items()}
        for names in (own, of_class, *map(vars, described)):
            for name, value in names.items():
                found.setdefault(name, []).append(value)
    return found


class _Reader:
    """A reader of syntax trees, with what it found so far (see `Conditions`)."""

    def __init__(self, values: Mapping[str, list[Any]]) -> None:
        self.values = values
        self.beside: Mapping[str, Any] = {}
        self.largest, self.named = 0, ""
        self.kinds: str | None = None
        self.draws: str | None = None
        self.by_layer = False
        self.aliases: set[str] = set()

    def read(self, part: Any) -> None:
        """Read a class or a function; a class' __init__ computes nothing in a call."""
        self.beside = vars(module_of(part))
        self.place = part.__qualname__
        tree = tree_of(part)
        nodes = tree.body if isinstance(tree, ast.ClassDef) else [tree]
        for node in nodes:
            if not (isinstance(node, ast.FunctionDef) and node.name == "__init__"):
                self._walk(node)

    def _walk(self, node: ast.AST) -> None:
        if isinstance(node, ast.arg):  # an annotation
            return
        if isinstance(node, ast.expr):
            self._expression(node, False)
            return
        if isinstance(node, ast.Assign):
            for target in node.targets:
                both = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    both = list(zip(target.elts, node.value.elts, strict=False))
                self.aliases |= {
                    x.id for x, value in both
                    if isinstance(x, ast.Name) and isinstance(value, ast.Attribute) and value.attr in _KINDS
                }  # fmt: skip
        tests = [getattr(node, name, None) for name in ("test", "subject")]
        for test in tests:
            if test is not None:
                self._condition(test)
        annotations = [getattr(node, name, None) for name in ("annotation", "returns")]
        for child in ast.iter_child_nodes(node):
            if child not in annotations:
                self._walk(child)

    def _expression(self, node: ast.AST, compares: bool) -> None:
        """Note the integers of an expression, and of those in it. compares: whether it is compared,
        so that real numbers count, too."""
        if isinstance(node, ast.Compare):
            compares = True
            self._condition(node)
            if any(isinstance(x, ast.Call) and _name(x) in _SLOW for x in ast.walk(node)):
                self.largest, self.named = sys.maxsize, f"{ast.unparse(node)} in {self.place}"
        elif isinstance(node, ast.IfExp):
            self._condition(node.test)
        elif isinstance(node, ast.Subscript) and not _is_cache(node.value):
            self._condition(node.slice)
        elif isinstance(node, ast.BinOp):
            self._condition(node, dtypes=False)
        elif isinstance(node, ast.Name):
            value = self.beside.get(node.id)
            if value is random or getattr(value, "__module__", None) == "random":  # or one of its functions
                self.draws = self.draws or f"{node.id} in {self.place}"
        elif isinstance(node, ast.Attribute) and node.attr == "random":
            self.draws = self.draws or f"random in {self.place}"
        if isinstance(node, ast.Call):
            name = _name(node)
            if name in _LOOKUPS and not _is_cache(getattr(node.func, "value", node)):
                self._condition(node)
            given = [*node.args, *(word.value for word in node.keywords)]
            if name in _SIZES:
                given = [x for x in given if not all(isinstance(y, _PLAIN) for y in ast.walk(x))]
            for number, argument in enumerate((node.func, *given)):
                self._expression(argument, name in _COMPARING or (name == "where" and number == 1))
            return
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and not compares:
            sides = (node.left, node.right)
            if any(isinstance(x, ast.Constant) for x in sides) and any(isinstance(x, ast.Call) for x in sides):
                # A number times a tensor: a scale, or what a mask adds.
                self._expression(next(x for x in sides if isinstance(x, ast.Call)), False)
                return
        compares = compares or isinstance(node, ast.Subscript)
        value = self._bound(node, compares)
        if value > self.largest:
            self.largest, self.named = value, f"{ast.unparse(node)} in {self.place}"
        for child in ast.iter_child_nodes(node):
            self._expression(child, compares)

    def _condition(self, node: ast.AST, dtypes: bool = True) -> None:
        """Note a condition on dtypes or devices, but for those of masks, whose dtype each call has
        as in the trial, and a use of the layer's number."""
        if isinstance(node, ast.Compare) and all(
            isinstance(x, ast.Constant) and x.value is None for x in node.comparators
        ):
            return  # a comparison with None
        in_caches = {id(x.slice) for x in ast.walk(node) if isinstance(x, ast.Subscript) and _is_cache(x.value)}
        for x in _without_conversions(node):
            word = getattr(x, "attr", getattr(x, "id", None))
            if word in LAYER_NUMBERS and id(x) not in in_caches:
                self.by_layer = True
            asks = isinstance(x, ast.Call) and _name(x) == "type" and not (x.args or x.keywords)
            kind = isinstance(word, str) and (word in self.aliases | _KINDS or "dtype" in word or "device" in word)
            if dtypes and (asks or kind):
                text = ast.unparse(node)
                if "mask" not in text and "finfo" not in text and not _OTHER_DEVICE.fullmatch(text):
                    self.kinds = self.kinds or f"{text} in {self.place}"

    def _bound(self, node: ast.AST, compares: bool) -> int:
        """Return the largest integer that an expression of numbers may be; 0 if none is known."""
        if isinstance(node, ast.Constant):
            named = [node.value, *(self.values.get(node.value, []) if isinstance(node.value, str) else [])]
            return max(_largest(x, compares) for x in named)
        if isinstance(node, ast.Name):
            return _largest(self.beside.get(node.id), compares)
        if isinstance(node, ast.Attribute):
            if node.attr in ("shape", "size"):
                owner = getattr(node.value, "attr", "")
                return max([0, *(n for x in self.values.get(owner, []) if isinstance(x, Tensor) for n in x.shape)])
            return max([0, *(_largest(x, compares) for x in self.values.get(node.attr, []))])
        if isinstance(node, ast.UnaryOp):
            return self._bound(node.operand, compares)
        if isinstance(node, ast.BinOp):
            left, right = self._bound(node.left, compares), self._bound(node.right, compares)
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, (ast.Add, ast.Sub)):
                return left + right
            if isinstance(node.op, (ast.Pow, ast.LShift)) and 0 < right < 64:
                return int(left**right if isinstance(node.op, ast.Pow) else left << right)
        return 0


def _largest(value: Any, compares: bool) -> int:
    """Return the largest absolute value of the integers in a plain value; of its real numbers, too,
    if it is compared."""
    if isinstance(value, bool):
        return 0
    if isinstance(value, int) or (compares and isinstance(value, float) and math.isfinite(value)):
        return int(abs(value))
    if isinstance(value, Mapping):
        value = list(value.values())
    return max([0, *(_largest(x, compares) for x in value)]) if isinstance(value, (list, tuple, set)) else 0


def _name(call: ast.Call) -> str:
    """Return the name of the function or method that is called."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _without_conversions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of an expression, but for dtypes and devices that functions are given."""
    yield node
    converts = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("to", "type", "type_as")
    for child in [node.func] if converts else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        if not (isinstance(child, ast.keyword) and child.arg in ("dtype", "device")):
            yield from _without_conversions(child)


def _is_cache(node: ast.AST) -> bool:
    """Whether an expression is a cache's list of layers, or of their keys or values."""
    return getattr(node, "attr", getattr(node, "id", None)) in ("layers", "key_cache", "value_cache", "is_updated")
