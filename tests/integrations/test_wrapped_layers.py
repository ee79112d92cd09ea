"""Our own layers under what other libraries put around modules: peft's LoRA, accelerate's offload,
torchao's quantization, FSDP2 units inside the layer."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import small_model
from torch import Tensor, nn

from txl_kernels import RelAttention

pytestmark = pytest.mark.peers
M, L, WIDTH = 6, 8, 32
PROJECTIONS = ["qkv", "r", "out"]


def layer() -> RelAttention:
    it = RelAttention(WIDTH, 4)
    nn.init.normal_(it.content_bias)
    nn.init.normal_(it.position_bias)
    return it.eval()


def in_two(f: Any, x: Tensor) -> Tensor:
    """The second part of a text, with the first as its memory."""
    result: Tensor = f(x[:, M:], x[:, :M])
    return result


@pytest.mark.parametrize("encoding", ["relative", "shaw", "shaw-released"])
def test_lora_of_a_model(encoding: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = small_model(encoding=encoding, table_len=None if encoding == "relative" else 40, mem_len=30)
    adapted = get_peft_model(model, LoraConfig(target_modules=["qkv", "out"], init_lora_weights=False)).eval()
    tokens = torch.randint(31, (2, 14))
    whole, _ = adapted(tokens)
    _, memory = adapted(tokens[:, :6])
    torch.testing.assert_close(adapted(tokens[:, 6:], memory)[0], whole[:, 6:], rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_lora_of_a_transformers_model() -> None:
    from peft import LoraConfig, get_peft_model

    import txl.hf

    model = txl.hf.TransfoXLLMHeadModel.from_pretrained(Path(__file__).parent / "transfo_xl" / "plain").eval()
    adapted = get_peft_model(model, LoraConfig(target_modules=["qkv", "out"], init_lora_weights=False)).eval()
    tokens = torch.randint(model.config.vocab_size, (2, 10))

    def scores(it: Any) -> Tensor:
        with torch.no_grad():
            mems = it(tokens[:, :4]).mems
            result: Tensor = it(tokens[:, 4:], mems=mems).prediction_scores
        return result

    torch.testing.assert_close(scores(adapted), scores(adapted.merge_and_unload()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offload(where: str, tmp_path: Path) -> None:
    """Parameters are on "meta" but for the time of their module's call."""
    from accelerate import cpu_offload, disk_offload

    it, x = layer(), torch.randn(2, M + L, WIDTH)
    with torch.no_grad():
        expected, positions = in_two(it, x), it.positions(L, M)
        if where == "cpu":
            cpu_offload(it, execution_device=torch.device("cpu"))
        else:
            disk_offload(it, str(tmp_path), execution_device=torch.device("cpu"))
        assert it.qkv.weight.is_meta
        torch.testing.assert_close(in_two(it, x), expected)
        torch.testing.assert_close(it(x[:, M:], x[:, :M], positions=positions), expected)
        cache = it.new_cache(2, M, L, like=x)
        it.fill_cache(cache, x[:, :M])
        torch.testing.assert_close(it(x[:, M:], cache=cache), expected)


@pytest.mark.parametrize("kind", ["int8 weights", "int8 both"])
def test_torchao(kind: str) -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    it, x = layer(), torch.randn(2, M + L, WIDTH)
    with torch.no_grad():
        exact = in_two(it, x)
        quantize_(it, Int8WeightOnlyConfig() if kind == "int8 weights" else Int8DynamicActivationInt8WeightConfig())
        found = in_two(it, x)
        assert 0 < (found - exact).abs().max() < 0.05
        torch.testing.assert_close(found, it(x)[:, M:], atol=0.02, rtol=0)
        cache = it.new_cache(2, M, L)
        it.fill_cache(cache, x[:, :M])
        torch.testing.assert_close(it(x[:, M:], cache=cache), found, atol=0.02, rtol=0)


def test_torchao_in_training() -> None:
    """Float8 training acts on the memory's projection too."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    it, x = layer(), torch.randn(2, 32, WIDTH)
    exact = it(x[:, 16:], x[:, :16])
    convert_to_float8_training(it, config=Float8LinearConfig(emulate=True))
    found = it(x[:, 16:], x[:, :16])
    assert 0 < (found - exact).abs().max() < 0.2
    torch.testing.assert_close(found, it(x)[:, 16:], atol=0.02, rtol=0)
    found.sum().backward()
    assert it.qkv.weight.grad is not None


def test_fsdp_units_inside_the_layer(one_process: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    it, x = layer(), torch.randn(2, M + L, WIDTH)
    in_two(it, x).square().sum().backward()
    expected = [p.grad.clone() for p in it.parameters() if p.grad is not None]
    it.zero_grad()
    mesh = init_device_mesh("cpu", (1,))
    for name in PROJECTIONS:
        fully_shard(getattr(it, name), mesh=mesh)
    fully_shard(it, mesh=mesh)
    in_two(it, x).square().sum().backward()
    found = [p.grad.full_tensor() for p in it.parameters() if p.grad is not None]
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.filterwarnings("ignore")
def test_the_page_runs_as_printed() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "lora-int8-onnx.md"
    blocks = re.findall(r"```py\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 3
    session: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), session)
