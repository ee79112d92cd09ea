"""A fingerprint of what a class computes: a hash of its source that does not change when the class
is moved, renamed or reformatted, but changes with its code."""

import ast
import hashlib
import inspect
import sys
import textwrap
import types
import weakref
from collections.abc import Mapping
from typing import Any

_EXCLUDED_PACKAGES = ("torch", "abc", "builtins", "typing")
# Bases of all models of a library, which load, save and distribute: each release changes them.
_COMMON_MODEL_MODULES = tuple(
    f"transformers.{name}." for name in ("modeling_utils", "utils", "integrations", "distributed")
)
# Fields that do not change what is computed; `ctx` follows from the place in the tree.
_IGNORED_FIELDS = ("annotation", "returns", "type_comment", "type_params", "type_ignores", "kind", "ctx")

_trees: "weakref.WeakKeyDictionary[Any, tuple[ast.stmt, int]]" = weakref.WeakKeyDictionary()
_texts: "weakref.WeakKeyDictionary[Any, tuple[tuple[tuple[str, str], ...], str]]" = weakref.WeakKeyDictionary()


class ReplacedCode(TypeError):
    """The error of a class or function whose code was replaced, so that its source does not say
    what it computes."""


def source_hash(original: type) -> str:
    """Return sixteen hexadecimal digits of the sha256 of a class' code, with that of its bases
    outside torch (but for those of all models of transformers), and of the functions, classes and
    constants of their modules that their methods name.

    Comments, docstrings, annotations and layout do not count, nor do the names of these classes and
    functions: a copy in another package has the same hash. Objects that a module imports from
    another count only by name.

    Raises:
        OSError, TypeError: the source cannot be found, or is not that of the present code.
    """
    found = parts(original)
    for part in found:
        if part in original.__mro__ or inspect.isfunction(part):  # the others are called
            check_code(part)
    names = {part.__name__: f"#{n}" for n, part in enumerate(found)}
    trees = ", ".join(_text_of(part, names) for part in found)
    constants: dict[str, Any] = {}
    for part in found:
        beside = vars(module_of(part))
        constants |= {n: beside[n] for n in names_in(part) if type(beside.get(n)) in (int, float, str, bool)}
    return hashlib.sha256(f"([{trees}], {sorted(constants.items())!r})".encode()).hexdigest()[:16]


def _text_of(part: Any, names: dict[str, str]) -> str:
    """Return `canonical` as text, which is kept, because each layer of a model has the same."""
    key = tuple(names.items())
    kept = _texts.get(part)
    if kept is None or kept[0] != key:
        kept = _texts[part] = key, repr(canonical(part, names))
    return kept[1]


def parts(original: type) -> list[Any]:
    """Return the class, its bases, and what their methods name in their own modules, in order of
    discovery."""
    found: dict[str, Any] = {}
    for kind in original.__mro__:
        of_all = f"{kind.__module__}.".startswith(_COMMON_MODEL_MODULES)
        if kind.__module__.partition(".")[0] not in _EXCLUDED_PACKAGES and not of_all:
            _collect(kind, found)
    return list(found.values())


def _collect(part: Any, found: dict[str, Any]) -> None:
    name = f"{part.__module__}.{part.__qualname__}"
    if name in found:
        return
    found[name] = part
    beside = vars(module_of(part))
    for used in names_in(part):
        other = beside.get(used)
        if (inspect.isfunction(other) or inspect.isclass(other)) and other.__module__ == part.__module__:
            _collect(other, found)


def module_of(part: Any) -> Any:
    """Return the module of a class or function, or its global names as attributes, if it is not in
    sys.modules: code that torch.package or cloudpickle has loaded, for example."""
    module = sys.modules.get(part.__module__, types.SimpleNamespace())
    for function in _functions(part):
        names = function.__globals__
        if names.get("__name__") == part.__module__:
            return module if vars(module) is names else types.SimpleNamespace(**names)
    return module


def _functions(part: Any) -> list[Any]:
    """Return a function, or the functions of a class, without their wrappers."""
    members = vars(part).values() if inspect.isclass(part) else [part]
    plain = [getattr(x, "__func__", getattr(x, "fget", x)) for x in members]
    return [_written(x) for x in plain if inspect.isfunction(x)]


def _written(function: Any) -> Any:
    """Return the function that a decorator wraps, or the `__init__` that a class' decorator keeps
    in the closure of another (transformers' use_kernelized_func)."""
    function = inspect.unwrap(function)
    kept = [cell.cell_contents for cell in function.__closure__ or () if function.__name__ == "new_init"]
    return next((x for x in kept if inspect.isfunction(x) and x.__name__ == "__init__"), function)


def names_in(part: Any) -> list[str]:
    """Return the global names in the code of a function, or of a class' methods."""
    todo = [function.__code__ for function in _functions(part)]
    names: dict[str, None] = {}
    while todo:
        code = todo.pop(0)
        names |= dict.fromkeys(code.co_names)
        todo += [x for x in code.co_consts if inspect.iscode(x)]
    return list(names)


def canonical(part: Any, names: dict[str, str]) -> Any:
    """Return the syntax tree of a class or function as nested tuples, the same in every Python.

    names: the replacement for each name of a class or function.
    """
    return _as_tuples(ast.Module([_tree(part)[0]], []), names)


def tree_of(part: Any) -> ast.stmt:
    """Return the syntax tree of a class or function.

    Raises:
        OSError: its source cannot be found.
    """
    return _tree(part)[0]


def has_own_source(part: Any) -> bool:
    """Whether a class, function or module is neither Python's, nor torch's, nor what transformers
    has for all models: caches, masks, attention functions."""
    name = part.__name__ if inspect.ismodule(part) else str(part.__module__)
    common = name.startswith("transformers.") and not f"{name}.".startswith("transformers.models.")
    package = name.partition(".")[0]
    return package not in (*_EXCLUDED_PACKAGES, "numpy") and package not in sys.stdlib_module_names and not common


def _tree(part: Any) -> tuple[ast.stmt, int]:
    """Return the syntax tree of a class or function, and the line before its first. They are kept,
    because inspect parses the whole file for each class, and each layer of a model has the same."""
    found = _trees.get(part)
    if found is None:
        try:
            lines, first = inspect.getsourcelines(part)
        except TypeError as error:
            raise OSError(f"the module {part.__module__} is not in sys.modules, or has no file") from error
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
        found = _trees[part] = tree, first - 1
    return found


def check_code(part: Any) -> None:
    """Check that a function, or each method of a class but `__init__`, is the one in its source.

    No call of a module reaches `__init__`, which decorators of classes replace: transformers'
    use_kernelized_func, for example.

    Raises:
        OSError, TypeError: it is not (`ReplacedCode`), or the source cannot be found.
    """
    tree, before = _tree(part)
    members: Mapping[str, Any] = {part.__name__: part}
    written, wrapped, inherited = [tree], False, set()
    if inspect.isclass(part):
        members, written, wrapped = vars(part), tree.body, bool(tree.decorator_list)  # type: ignore[attr-defined]
        assigned = {
            x.id for node in written if isinstance(node, ast.Assign) for x in node.targets if isinstance(x, ast.Name)
        }
        inherited = {name for name in dir(part.__base__) if not name.startswith("__")} - assigned
    nodes = {node.name: node for node in written if isinstance(node, ast.FunctionDef)}
    for name in {*nodes, *inherited} & {*members} - {"__init__"}:
        function = getattr(members[name], "__func__", members[name])
        if not inspect.isfunction(function):  # a property, for example
            continue
        node = nodes.get(name)
        if wrapped or (node is not None and node.decorator_list):
            function = inspect.unwrap(function)
        first = () if node is None else [before + n for n in (node.lineno, *(x.lineno for x in node.decorator_list))]
        if function.__code__.co_firstlineno not in first:
            raise ReplacedCode(f"{part.__qualname__}.{name} is not that of its source: it was replaced")


def _as_tuples(node: Any, names: dict[str, str]) -> Any:
    if isinstance(node, list):
        return tuple(_as_tuples(x, names) for x in node if not _is_string_statement(x))
    if not isinstance(node, ast.AST):
        return node
    fields = []
    for name, value in ast.iter_fields(node):
        if name in _IGNORED_FIELDS or value is None or value == []:
            continue
        if name in ("id", "name") and isinstance(value, str):
            value = names.get(value, value)
        fields.append((name, _as_tuples(value, names)))
    return (type(node).__name__, *fields)


def _is_string_statement(node: Any) -> bool:
    """Whether a node is a docstring, or another string that is a statement."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
