"""The Python of README.md and of the documentation's pages runs as printed, the blocks of a page
one after the other; commands exist, and figures that stand twice agree."""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from txl.commands.cli import COMMANDS
from txl_kernels import LearnedRelativeAttention, RelAttention, intervals, rel_attention

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [x for x in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if "```python\n" in x.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_runs_as_printed(page: Path) -> None:
    torch.manual_seed(0)
    session: dict[str, object] = {}
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(r"```python\n(.*?)```", text, flags=re.DOTALL):
        line = text.count("\n", 0, block.start()) + 1
        exec(compile("\n" * line + block[1], str(page), "exec"), session)  # errors show the page's line


@pytest.mark.parametrize("it", [rel_attention, RelAttention, LearnedRelativeAttention, intervals])
def test_example_of_a_docstring(it: Any) -> None:
    """That of `accelerate` runs in tests/integrations."""
    (example,) = doctest.DocTestFinder(recurse=False).find(it, globs={"torch": torch, it.__name__: it})
    found = doctest.DocTestRunner().run(example)
    assert found.attempted > 1
    assert found.failed == 0


class IcefallAttention(nn.Module):
    """The parameters of the attention in icefall's Conformers, of the kind with scales or of the
    other."""

    dropout = 0.0

    def __init__(self, width: int, heads: int, scaled: bool) -> None:
        super().__init__()
        self.num_heads = heads
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.linear_pos = nn.Linear(width, width, bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.randn(heads, width // heads)) for _ in "uv")
        if scaled:
            self.pos_bias_u_scale, self.pos_bias_v_scale = (nn.Parameter(torch.tensor(x)) for x in (0.3, -0.2))

    def _pos_bias_u(self) -> Tensor:
        return self.pos_bias_u * self.pos_bias_u_scale.exp()

    def _pos_bias_v(self) -> Tensor:
        return self.pos_bias_v * self.pos_bias_v_scale.exp()

    def forward(self, x: Tensor, pos_emb: Tensor, hidden: Tensor) -> Tensor:
        """Return the attention by its definition. hidden: bool [B, T], True for padding."""
        frames, heads, scaled = len(x), self.num_heads, hasattr(self, "pos_bias_u_scale")
        q, k, v = self.in_proj(x).unflatten(-1, (3, heads, -1)).unbind(2)  # [T, B, H, D]
        u, w = (self._pos_bias_u(), self._pos_bias_v()) if scaled else (self.pos_bias_u, self.pos_bias_v)
        scale = q.size(-1) ** -0.5
        q = q * scale if scaled else q
        row = frames - 1 - torch.arange(frames)[:, None] + torch.arange(frames)  # of distance i - j
        p = self.linear_pos(pos_emb[0]).unflatten(-1, (heads, -1))[row]  # [T, T, H, D]
        scores = torch.einsum("ibhd,jbhd->bhij", q + u, k) + torch.einsum("ibhd,ijhd->bhij", q + w, p)
        scores = (scores if scaled else scores * scale).masked_fill(hidden[:, None, None], -torch.inf)
        out = torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), v)
        return self.out_proj(out.flatten(2))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:txl_kernels uses the slow reference backend")
@pytest.mark.parametrize("scaled", [False, True])
def test_attention_of_icefalls_conformers(scaled: bool) -> None:
    text = (DOCS / "how-to" / "conformer.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(.*?)```", text[text.index("## icefall's Conformers") :], flags=re.DOTALL)
    assert block is not None
    page: dict[str, Any] = {}
    exec(block[1], page)
    torch.manual_seed(0)
    module = IcefallAttention(24, 3, scaled).double()
    x, pos_emb = torch.randn(11, 2, 24).double().requires_grad_(), torch.randn(1, 21, 24).double()
    hidden = torch.arange(11) >= torch.tensor([[11], [7]])
    found = []
    for out in (
        page["attend"](module, x, pos_emb, *page["intervals"](hidden, visible=False)),
        module(x, pos_emb, hidden),
    ):
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    torch.testing.assert_close(*found)


def test_commands_exist() -> None:
    for page in DOCS.rglob("*.md"):
        assert set(re.findall(r"`txl (\w+)", page.read_text(encoding="utf-8"))) <= set(COMMANDS), page
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{target}:" in makefile for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE))


def test_speed_up_of_evaluation_agrees_on_all_pages() -> None:
    """On the first screens of README and docs, beside the paper's, and on the page on speed."""
    speed = (DOCS / "speed.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([\d,]+x) \| ([\d,]+x) \| (1,874x) \|", README, flags=re.MULTILINE)
    assert len(rows) == 2  # a CPU and a GPU
    front = README[: README.index("<!-- figures")], (DOCS / "index.md").read_text(encoding="utf-8")
    for device, *found in rows:
        section = speed[speed.index(f"\n## {device}\n") :]
        row = re.search(r"^\| 3,800 \|.*$", section, flags=re.MULTILINE)
        assert row is not None
        assert all(x in row[0] for x in found)
        assert all(found[1].rstrip("x") in text and "1,874" in text for text in front)


def test_figures_of_libraries_agree_with_the_page_that_the_report_writes() -> None:
    """README's table of models repeats multiples of docs/how-to/accelerate.md."""
    table = README[README.index("## Models and libraries") :].split("\n## ")[0]
    rows = re.findall(r"\| ([\d.]+x) \| ([\d.]+x)? ?\|$", table, flags=re.MULTILINE)
    assert len(rows) >= 4
    page = (DOCS / "how-to" / "accelerate.md").read_text(encoding="utf-8")
    figures = page[page.index("<!-- figures") : page.index("<!-- end of figures")]
    for time, memory in rows:
        assert re.search(rf"\| {re.escape(time)} \| {re.escape(memory)}", figures), (time, memory)
