"""Wrappers of the linear layers and embeddings of a module (adapters, hooks, parametrizations,
quantization, offload, sharding) act on accelerated layers as on the originals, and on our own
layers' segment as on their memory."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_helpers import EACH_ADAPTER, NO_GRADIENTS, both, case_of, check, compare
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from txl_kernels import RelAttention
from txl_kernels.integrations import Accelerated, accelerate, restore

pytestmark = [
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks for it
]


def parts(module: nn.Module) -> list[str]:
    """Return the names of linear layers and embeddings, without those of T5's feed-forward part,
    whose weights the original reads."""
    kinds = (nn.Linear, nn.Embedding)
    return [n for n, m in module.named_modules() if isinstance(m, kinds) and "DenseReluDense" not in n]


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def lora(module: nn.Module) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    if names := parts(module):
        inject_adapter_in_model(LoraConfig(r=4, target_modules=names, init_lora_weights=False), module)


def hooks(module: nn.Module) -> None:
    for name in parts(module):
        module.get_submodule(name).register_forward_hook(lambda m, given, out: out * 1.5)


def parametrizations(module: nn.Module) -> None:
    """Five kinds in turns, with parameters that no longer give the weight as it was."""
    for n, name in enumerate(parts(module)):
        layer: Any = module.get_submodule(name)
        if n % 5 == 0:
            parametrize.register_parametrization(layer, "weight", Halved())
        elif n % 5 == 1:
            torch.nn.utils.parametrizations.weight_norm(layer)
            layer.parametrizations.weight.original0.data.mul_(1.5)
        elif n % 5 == 2:
            torch.nn.utils.weight_norm(layer)
            layer.weight_g.data.mul_(1.5)
        elif n % 5 == 3:
            prune.l1_unstructured(layer, "weight", 0.4)
        else:
            torch.nn.utils.parametrizations.spectral_norm(layer)


def int8_weights(module: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(module, Int8WeightOnlyConfig())


def dynamic(module: nn.Module) -> None:
    torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, inplace=True)


def sharded(module: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    for name in parts(module):
        fully_shard(module.get_submodule(name))


def int8(module: nn.Module) -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(module, Int8DynamicActivationInt8WeightConfig())


def float8(module: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(module, config=Float8LinearConfig(emulate=True))


WRAPPERS: dict[str, Callable[[nn.Module], None]] = {
    f.__name__: f for f in (lora, hooks, parametrizations, int8_weights, dynamic, sharded)
}


def to_cpu(module: nn.Module, folder: Path) -> None:
    from accelerate import cpu_offload

    cpu_offload(module, execution_device=torch.device("cpu"), offload_buffers=True)


def to_disk(module: nn.Module, folder: Path) -> None:
    from accelerate import dispatch_model

    holder = nn.ModuleDict({"attention": module, "other": nn.Linear(2, 2)})
    devices = {"attention": "disk", "other": "cpu"}
    dispatch_model(holder, devices, main_device="cpu", offload_dir=folder, force_hooks=True)


OFFLOADS = {f.__name__: f for f in (to_cpu, to_disk)}


# Adapters that read a weight show it with the other wrappers; these two are seen by common code.
COMMON, SHOWING = ("hooks", "int8_weights"), ("espnet", "nemo local", "gemma 4", "t5")


@pytest.mark.parametrize(
    ("name", "wrapper"), [(n, w) for n in EACH_ADAPTER for w in WRAPPERS if w not in COMMON or n in SHOWING]
)
def test_wrapped_parts(name: str, wrapper: str) -> None:
    """The original wrapped, and accelerated before or after it was wrapped, give the same."""
    if (name, wrapper) == ("enformer", "dynamic"):
        pytest.skip("the original reads its layer's weight")
    tolerance = 1e-2 if wrapper == "dynamic" else 2e-4  # it rounds its input to bytes
    gradients = name not in NO_GRADIENTS and wrapper != "dynamic"
    theirs, after, before = (case_of(name) for _ in range(3))
    accelerate(before.module, strict=True, weights="none")
    plain = both(before, gradients=False)["out"]
    for case in (theirs, after, before):
        torch.manual_seed(3)
        WRAPPERS[wrapper](case.module)
    report = accelerate(after.module, strict=True, weights="none")
    want = both(theirs, gradients=gradients, random=False)
    assert wrapper == "sharded" or not torch.allclose(plain, want["out"], rtol=1e-2)
    compare(both(after, gradients=gradients, random=False), want, tolerance)
    compare(both(before, gradients=False), {"out": want["out"]}, tolerance)
    assert not report.fallbacks, str(report)
    assert restore(after.module) > 0
    compare(both(after, gradients=False), {"out": want["out"]}, tolerance)


@pytest.mark.parametrize(("offload", "removed"), [("to_disk", False), ("to_cpu", True)],
                         ids=["offloaded", "offload removed"])  # fmt: skip
@pytest.mark.parametrize("name", [*EACH_ADAPTER, "xlnet"])
def test_offload(name: str, offload: str, removed: bool, tmp_path: Path) -> None:
    """Parameters are on "meta" until their module is called. accelerate's hooks hold the bound
    forward that they found, and leave it on the instance when they are removed."""
    if name == "speechbrain beats":
        pytest.skip("the original reads the device of its table's weight")
    from accelerate.hooks import remove_hook_from_module

    first, last = case_of(name), case_of(name)
    want = both(first, gradients=False)
    reports = [accelerate(first.module, strict=True, weights="none")]
    for case in (first, last):
        OFFLOADS[offload](case.module, tmp_path / str(case is first))
        if removed:
            remove_hook_from_module(case.module, recurse=True)
    compare(both(first, gradients=False), want)
    reports.append(accelerate(last.module, strict=True, weights="none"))
    compare(both(last, gradients=False), want)
    assert not any(report.fallbacks for report in reports)
    for case in (first, last):
        accelerated = [m for m in case.module.modules() if isinstance(m, Accelerated)]
        assert restore(case.module) == len(accelerated) > 0
        assert not removed or not any("forward" in vars(m) for m in accelerated)
        compare(both(case, gradients=False), want)


def test_hooks_of_fsdp_do_not_read_weights() -> None:
    """The original of a class that stores its weights need not answer."""
    from torch.distributed.fsdp import fully_shard

    case = case_of("espnet")
    check(case.module, lambda: both(case, gradients=False), change=fully_shard)


M, L, WIDTH = 16, 16, 32
OWN: dict[str, tuple[Callable[..., None], float]] = {
    "lora": (lambda it, folder: lora(it), 1e-5),
    **{f.__name__: (lambda it, folder, f=f: f(it), 0.02) for f in (int8_weights, int8, float8)},
    **{name: (offload, 1e-5) for name, offload in OFFLOADS.items()},
}


def our_own_layer() -> tuple[RelAttention, Tensor]:
    it = RelAttention(WIDTH, 4).eval()
    for bias in (it.content_bias, it.position_bias):
        nn.init.normal_(bias)
    return it, torch.randn(2, M + L, WIDTH)


@pytest.mark.parametrize("wrapper", OWN)
def test_memory_of_our_own_layer(wrapper: str, tmp_path: Path) -> None:
    """A segment with memory, or a cache, gives what the whole sequence does; gradients, too."""
    (wrap, tolerance), (it, x) = OWN[wrapper], our_own_layer()
    with torch.no_grad():
        exact, positions = it(x), it.positions(L, M)
        wrap(it, tmp_path)
        whole = it(x)[:, M:]
        assert torch.equal(whole, exact[:, M:]) == (wrapper in OFFLOADS)
        assert wrapper == "lora" or (whole - exact[:, M:]).abs().max() < 0.2
        assert any(p.is_meta for p in it.parameters()) == (wrapper in OFFLOADS)
        cache = it.new_cache(2, M, L, like=x)
        it.fill_cache(cache, x[:, :M])
        for found in (it(x[:, M:], x[:, :M]), it(x[:, M:], x[:, :M], positions=positions), it(x[:, M:], cache=cache)):
            torch.testing.assert_close(found, whole, atol=tolerance, rtol=0)
    if wrapper in ("lora", "float8"):
        parameters = [p for p in it.parameters() if p.requires_grad]
        outputs = it(x[:, M:], x[:, :M]), it(x)[:, M:]
        for gradient, want in zip(
            *(torch.autograd.grad(out.square().sum(), parameters) for out in outputs), strict=True
        ):
            torch.testing.assert_close(gradient, want, atol=5 * tolerance * float(want.abs().max()), rtol=0)


def test_lora_of_a_transformers_model(hf: Any) -> None:
    from peft import LoraConfig, get_peft_model

    model = hf.TransfoXLLMHeadModel.from_pretrained(Path(__file__).parent / "transfo_xl" / "plain").eval()
    adapted = get_peft_model(model, LoraConfig(target_modules=["qkv", "out"], init_lora_weights=False)).eval()
    tokens = torch.randint(model.config.vocab_size, (2, 10))

    def scores(it: Any) -> Tensor:
        with torch.no_grad():
            mems = it(tokens[:, :4]).mems
            result: Tensor = it(tokens[:, 4:], mems=mems).prediction_scores
        return result

    torch.testing.assert_close(scores(adapted), scores(adapted.merge_and_unload()), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_code_of_the_page_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "lora-int8-onnx.md"
    blocks = re.findall(r"```py\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 3
    session: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), session)
