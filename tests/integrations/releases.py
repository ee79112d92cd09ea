"""Other releases of libraries' layers: their sources with a change, under the same names."""

import copy
import functools
import inspect
import itertools
import sys
import textwrap
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from txl_kernels.integrations.registry import find, path_of
from txl_kernels.integrations.source import parts, tree_of

_numbers = itertools.count()
_bases: dict[tuple[type, type], types.ModuleType] = {}

# (old, new) in the source of each family's class, for the same formula with one fault.
_SCALE = ("scaling=self.scaling,", "scaling=1.1 * self.scaling,")
_PADDED = ("_padded[:, :, 1:]", "_padded[:, :, :-1]")
_ESPNET = {
    "scale": ("(matrix_ac + matrix_bd) /", "1.1 * (matrix_ac + matrix_bd) /"),
    "shift": _PADDED,
    "mask": ("mask.unsqueeze(1).eq(0)", "mask.unsqueeze(1).ne(0)"),
    "content bias": ("q + self.pos_bias_u", "q + 0 * self.pos_bias_u"),
    "position bias": ("q + self.pos_bias_v", "q + 0 * self.pos_bias_v"),
    "order": ("self.linear_pos(pos_emb)", "self.linear_pos(pos_emb.flip(1))"),
}
_BUCKETS = {
    "shift": ("memory_position - context_position", "memory_position - context_position + 1"),
    "order": ("memory_position - context_position", "context_position - memory_position"),
    "clip": ("relative_position = memory_position - context_position",
             "relative_position = (memory_position - context_position).clamp(-15, 15)"),
}  # fmt: skip
_T5 = _BUCKETS | {
    "scale": _SCALE,
    "mask": (
        "            mask,\n            dropout",
        "            mask if mask is None else mask == 0,\n            dropout",
    ),
    "table": ("            position_bias=position_bias,", "            position_bias=0 * position_bias,"),
}
# Granite and Gemma have no mask of pairs or no bias; DI-engine's biases are arguments.
FAULTS: dict[str, dict[str, tuple[str, str]]] = {
    "wav2vec2-conformer": {
        "scale": _SCALE,
        "shift": ("relative_attention_scores[..., 1:, :]", "relative_attention_scores[..., :-1, :]"),
        "mask": ("            attention_mask,\n", "            None if attention_mask is None else ~attention_mask,\n"),
        "content bias": ("query + module.pos_bias_u", "query + 0 * module.pos_bias_u"),
        "position bias": ("query + module.pos_bias_v", "query + 0 * module.pos_bias_v"),
    },
    "w2v-bert relative_key": {
        "scale": _SCALE,
        "shift": ("position_ids_r - position_ids_l", "position_ids_r - position_ids_l + 1"),
        "mask": ("            attention_mask,\n", "            None if attention_mask is None else ~attention_mask,\n"),
        "table": ("relative_position_attn_weights * module", "0 * relative_position_attn_weights * module"),
        "clip": ("torch.clamp(distance, -module.left_max_position_embeddings", "torch.clamp(distance, -15"),
    },
    "parakeet": {
        "shift": ("attention_scores[:, :, 1:]", "attention_scores[:, :, :-1]"),
        "mask": ("attention_mask.logical_not()", "attention_mask"),
        "content bias": ("query_states + self.bias_u", "query_states + 0 * self.bias_u"),
        "position bias": ("query_states + self.bias_v", "query_states + 0 * self.bias_v"),
    },
    "fastspeech2": {
        "shift": _PADDED,
        "mask": ("attention_mask.unsqueeze(1).eq(0)", "attention_mask.unsqueeze(1).ne(0)"),
        "content bias": ("query_states + self.pos_bias_u", "query_states + 0 * self.pos_bias_u"),
        "position bias": ("query_states + self.pos_bias_v", "query_states + 0 * self.pos_bias_v"),
    },
    "nemo": _ESPNET | {
        "shift": ("x[:, :, 1:].view", "x[:, :, :-1].view"),
        "mask": ("mask = mask.unsqueeze(1)  # (batch, 1, time1, time2)", "mask = ~mask.unsqueeze(1)"),
    },
    "nemo local": {
        "shift": ("torch.matmul(q_with_bias_v, p.transpose(-2, -1))", "torch.matmul(q_with_bias_v, p.mT).roll(1, -1)"),
        "mask": ("F.pad(pad_mask", "F.pad(~pad_mask"),
        "content bias": ("q + self.pos_bias_u.unsqueeze", "q + 0 * self.pos_bias_u.unsqueeze"),
        "position bias": ("q + self.pos_bias_v.unsqueeze", "q + 0 * self.pos_bias_v.unsqueeze"),
    },
    "granite": {
        "shift": ("self.rel_pos_emb(attention_dists)", "self.rel_pos_emb(attention_dists + 1)"),
        "mask": ("masked_fill_(mask, mask_value)", "masked_fill_(~mask, mask_value)"),
        "table": ("query_states, rel_pos_emb) *", "query_states, 0 * rel_pos_emb) *"),
    },
    "granite 5": {
        "scale": _SCALE,
        "shift": ("self.rel_pos_emb(position_embeddings)", "self.rel_pos_emb(position_embeddings + 1)"),
        "mask": ("~key_mask[", "key_mask["),
        "table": ("queries @ relative", "0 * queries @ relative"),
    },
    "gemma": {
        "shift": (": query_block_size * key_context_size]", "1 : 1 + query_block_size * key_context_size]"),
        "mask": ("original_valid_mask = ~mask", "original_valid_mask = mask"),
        "table": ("term_ac + term_bd_shifted", "term_ac + 0 * term_bd_shifted"),
    },
    "gemma 4": {
        "shift": ("x[..., : block_size * context_size]", "x[..., 1 : 1 + block_size * context_size]"),
        "mask": ("attention_mask != 0", "attention_mask == 0"),
        "table": ("matrix_ac + matrix_bd", "matrix_ac + 0 * matrix_bd"),
    },
    "t5": _T5,
    "t5 decoder": _T5,
    "mpnet": {
        "mask": ("attention_scores + attention_mask", "attention_scores - 1e30 * (attention_mask == 0)"),
        "table": ("attention_scores += position_bias", "attention_scores += 0 * position_bias"),
    },
    "mpnet's encoder": _BUCKETS,
    "wavlm": _BUCKETS | {
        "mask": ("attention_mask.ne(1)", "attention_mask.eq(1)"),
        "table": ("attn_mask=gated", "attn_mask=0 * gated"),
    },
    "enformer": {
        "shift": ("x[:, :, 1:, :]", "x[:, :, :-1, :]"),
        "content bias": ("q + self.rel_content_bias", "q + 0 * self.rel_content_bias"),
        "position bias": ("q + self.rel_pos_bias", "q + 0 * self.rel_pos_bias"),
    },
    "cosyvoice": _ESPNET,
    "fireredasr": _ESPNET | {
        "scale": ("attn_scores.mul_(self.scale)", "attn_scores.mul_(1.1 * self.scale)"),
        "mask": ("mask = mask.eq(0)", "mask = mask.ne(0)"),
    },
    "espnet": _ESPNET,
    "espnet legacy": _ESPNET,
    "espnet transducer": {
        "scale": _ESPNET["scale"],
        "shift": ("n_stride * (time1 - 1)", "n_stride * time1"),
        "mask": ("scores = scores.masked_fill", "mask = ~mask\n        scores = scores.masked_fill"),
        "content bias": ("query + self.pos_bias_u", "query + 0 * self.pos_bias_u"),
        "position bias": ("query + self.pos_bias_v", "query + 0 * self.pos_bias_v"),
    },
    "speechbrain": {
        "shift": ("x[:, :, 1:].view", "x[:, :, :-1].view"),
        "mask": ("key_padding_mask.view(", "(~key_padding_mask).view("),
        "content bias": ("query + self.pos_bias_u", "query + 0 * self.pos_bias_u"),
        "position bias": ("query + self.pos_bias_v", "query + 0 * self.pos_bias_v"),
    },
    "ding": {
        "shift": _PADDED,
        "mask": ("attn.masked_fill(mask", "attn.masked_fill(~mask"),
        "content bias": ("query + u", "query + 0 * u"),
        "position bias": ("query + v", "query + 0 * v"),
    },
    "rllib": {
        "shift": ("x[:, 1:, :, :]", "x[:, :-1, :, :]"),
        "mask": ("score * mask + 1e30 * (mask.float() - 1.0)", "score * (1 - mask) - 1e30 * mask"),
        "content bias": ("queries + self._uvar", "queries + 0 * self._uvar"),
        "position bias": ("queries + self._vvar", "queries + 0 * self._vvar"),
    },
    "xlnet": {
        "shift": ("x[:, :, 1:, :]", "x[:, :, :-1, :]"),
        "mask": ('1e30 * torch.einsum("ijbn->bnij", attn_mask)', '1e30 * torch.einsum("ijbn->bnij", 1 - attn_mask)'),
        "content bias": ("q_head + self.r_w_bias", "q_head + 0 * self.r_w_bias"),
        "position bias": ("q_head + self.r_r_bias", "q_head + 0 * self.r_r_bias"),
    },
}  # fmt: skip


def release(
    kind: type, folder: Path, patch: pytest.MonkeyPatch, changes: Iterable[tuple[str, str]] = (), before: str = "",
    after: str = "", extra: str = "", around: type | None = None,
) -> Any:  # fmt: skip
    """Return the class of another release of its library, which replaces its module in sys.modules.

    Args:
        changes: texts (old, new); each old one must occur in the source of the class, its bases,
            or what they name in its module.
        before, after: statements before and after the method that an adapter replaces; `x` is its
            first argument, `out` the first part of its result, and they can change both.
        extra: another parameter of the method.
        around: the class of the method, one that the source of `kind` names; `kind` if None.
    """
    around = around or kind
    name, source, beside = around.__name__, _source(kind), vars(sys.modules[kind.__module__])
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    if before or after or extra:
        if (kind, around) not in _bases:  # the class without them, which many have
            renamed = source.replace(f"class {name}(", f"class {name}Before(") + f"\n\n{name} = {name}Before\n"
            base = _bases[kind, around] = _loaded(renamed, kind.__module__, beside, folder, patch)
            for part in parts(getattr(base, kind.__name__)):
                tree_of(part)  # which is kept
        source, beside = _around(around, before or "pass", after or "pass", extra), vars(_bases[kind, around])
    return getattr(_loaded(source, kind.__module__, beside, folder, patch), name)


def _loaded(
    source: str, name: str, beside: dict[str, Any], folder: Path, patch: pytest.MonkeyPatch
) -> types.ModuleType:
    """Return a module of a source, with another's global names, in its place in sys.modules."""
    path = folder / f"release_{next(_numbers)}.py"
    path.write_text(source)
    module = types.ModuleType(name)
    vars(module).update(beside, __file__=str(path))
    exec(compile(source, str(path), "exec"), vars(module))
    patch.setitem(sys.modules, name, module)
    return module


@functools.cache
def _source(kind: type) -> str:
    """Return the source of a class, its bases, and what they name in its module."""
    own = [part for part in parts(kind) if part.__module__ == kind.__module__]
    found = sorted((inspect.getsourcelines(part)[::-1] for part in own), key=lambda x: x[0])
    return "\n\n".join(textwrap.dedent("".join(lines)) for _, lines in found)


def _around(kind: type, before: str, after: str, extra: str) -> str:
    method = find(path_of(kind)).adapter.method
    parameters = list(inspect.signature(getattr(kind, method)).parameters.values())[1:]
    positional = [x for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    keywords = [f"**{x.name}" for x in parameters if x.kind is x.VAR_KEYWORD]
    defaults = [x.name for x in positional if x.default is not x.empty]
    given = [f"{x.name}=DEFAULTS[{defaults.index(x.name)}]" if x.name in defaults else x.name for x in positional]
    x, *others = [x.name for x in positional]
    return f"""

import inspect

DEFAULTS = inspect.unwrap({kind.__name__}Before.{method}).__defaults__


class {kind.__name__}({kind.__name__}Before):
    def {method}(self, {", ".join([*given, *[extra] * bool(extra), *keywords])}):
        x = {x}
        {before}
        result = super().{method}({", ".join(["x", *others, *keywords])})
        out = result[0] if isinstance(result, tuple) else result
        {after}
        return (out, *result[1:]) if isinstance(result, tuple) else out
"""


def released(module: nn.Module, kind: Any) -> Any:
    """Return a copy of a module in which the classes of kind's release replace those of the same
    names."""
    beside = vars(sys.modules[kind.__module__])
    module = copy.deepcopy(module)
    for part in module.modules():
        newer = beside.get(type(part).__name__)
        if type(part).__module__ == kind.__module__ and newer is not None and newer is not type(part):
            part.__class__ = newer
            for name, value in vars(part).items():
                if inspect.ismethod(value):
                    vars(part)[name] = getattr(part, value.__name__)
    return module
