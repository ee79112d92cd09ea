"""The packages with the oldest torch that they promise, as far as its names go: imported and called
in a process of their own where later names do not exist."""

import re

from processes import ROOT, run_python

CALLS = """
import importlib, pkgutil, sys
sys.path.insert(0, "tests/support")
import older_torch
older_torch.install()

import txl, txl_kernels
optional = ("triton", "tensorboard", "matplotlib")
for package in (txl_kernels, txl):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.endswith("__main__") or module.name.startswith("txl.hf"):  # transformers asks for a torch itself
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert str(error.name).split(".")[0] in optional, error

import torch
from torch.func import grad, vmap
from txl_kernels import LearnedRelativeAttention, RelAttention, intervals, rel_attention, rel_attention_weights

for backend in (None, "reference"):
    q, k, v = (torch.randn(2, 2, 5, 8, requires_grad=True) for _ in range(3))
    r = torch.randn(2, 9, 8, requires_grad=True)
    out, lse = rel_attention(q, k, v, r, dropout_p=0.1, return_lse=True, backend=backend)
    out.sum().backward(retain_graph=True)
    rel_attention(q, k, v, r.expand(2, -1, -1, -1), causal=False, zero_row=4, prefix=1, backend=backend).sum().backward()
    with torch.autocast("cpu"):
        rel_attention(q, k, v, r, backend=backend)
rel_attention_weights(q, k, r)
intervals(torch.ones(2, 5, dtype=torch.bool), visible=True)
start = torch.zeros(2, 1, dtype=torch.int32)
vmap(lambda q: rel_attention(q, q, q, r.detach()))(torch.randn(3, 1, 2, 5, 8))
grad(lambda q: rel_attention(q, k.detach(), v.detach(), r.detach()).sum())(q.detach())
for layer in (RelAttention(16, 2).eval(), LearnedRelativeAttention(16, 2, extent=4, qk_norm=True, sink=True).eval()):
    x = torch.randn(2, 6, 16)
    layer(x, x).sum().backward()
    with torch.no_grad():
        for given in ({}, {"start": torch.full((2, 1), 5, dtype=torch.int32)}):
            cache = layer.new_cache(2, 5, 6, **given)
            layer(x, cache=cache)
            layer(x, cache=cache)

from txl import Engine
from txl.evaluation.generate import Sampling, generate
from txl.model.config import ModelConfig
from txl.model.transformer import TransformerXL

model = TransformerXL(ModelConfig(vocab_size=31, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=4))
tokens = torch.randint(31, (2, 6))
scores, memory = model(tokens)
model.softmax.nll(model.read(tokens, memory).hidden, tokens).sum().backward()
list(generate(Engine(model, 1, 5, 4), tokens[:1], 4, Sampling()))
print("called")
"""


def test_no_name_is_newer_than_the_oldest_torch() -> None:
    assert run_python(CALLS) == "called"


NEWER = """
import sys; sys.path.insert(0, "tests/support")
import older_torch; older_torch.install()
for code in ("import torch; torch.compiler.is_exporting", "from torch.compiler import is_exporting"):
    exec(code, {"__name__": "other"})
    try:
        exec(code, {"__name__": "txl_kernels.new"})
    except (AttributeError, ImportError) as error:
        print(type(error).__name__)
"""


def test_newer_name_is_an_error_in_this_project_alone() -> None:
    """torch.compiler.is_exporting came with torch 2.7."""
    assert run_python(NEWER).split() == ["AttributeError", "ImportError"]


def test_record_is_of_the_oldest_supported_torch() -> None:
    promised = re.search(r'"torch>=([0-9.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    record = (ROOT / "tests" / "support" / "names_of_torch.json").read_text(encoding="utf-8")
    assert promised is not None
    assert f'"oldest": "{promised[1]}"' in record
