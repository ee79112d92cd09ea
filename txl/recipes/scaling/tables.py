"""The tables of docs/scaling.md."""

from collections.abc import Iterator
from dataclasses import replace

from txl import recipes
from txl.model.config import ModelConfig
from txl.recipes.scaling.hardware import H200
from txl.recipes.scaling.memory import device_memory
from txl.recipes.scaling.search import best, largest_world, longest_memory, rows_for
from txl.recipes.scaling.setup import Setup, table_count
from txl.recipes.scaling.step_time import step_time
from txl.recipes.scaling.traffic import sent

WORLDS = (8, 64, 1024)
LARGE = ("wt103-large", "enwik8-large", "lm1b-large", "lm1b-large-tf")
ALL = (
    "wt103-base",
    "wt103-large",
    "enwik8-base",
    "enwik8-18l",
    "enwik8-large",
    "text8-large",
    "lm1b-base",
    "lm1b-large",
)
BUSY = 0.8


def tables() -> dict[str, str]:
    """Name to Markdown."""
    return {
        "rows": _table("recipe | batch | tokens a row | rows at 8 | at 64 | at 1,024 | most processes", _rows()),
        "memory": _table(
            "recipe | GPUs | rows each | states | replicated | with recompute | sharded | sharded, recompute", _memory()
        ),
        "bytes": _table(
            "recipe | parameters, 10^6 | tables, % | replicated, at 8 | 64 | 1,024 | sharded, at 8 | 64 | 1,024 | padding "
            "at 1,024, %",
            _bytes(),
        ),
        "time": _table(
            "recipe | GPUs | rows each | products | launches | Adam | waiting | update, replicated | sharded | efficiency | "
            "launches free | longest",
            _time(),
        ),
        "busy": _table("recipe | 8 GPUs | 64 | 1,024", _busy()),
        "memory length": _table("flags | longest, 1 row | update | longest, 8 rows | update", _memory_length()),
    }


def setup(name: str, processes: int = 1, rows: int | None = None) -> Setup:
    """A recipe's; rows: a process, None for the batch as published, a row each where it is less."""
    recipe = recipes.load(name)
    model, train = recipe.model_config(), recipe.train_config()
    assert isinstance(model, ModelConfig)
    if rows is None:
        rows = max(train.batch // processes, 1)
    return Setup(model, replace(train, batch=rows * processes), processes)


def _rows() -> Iterator[list[object]]:
    for name in ALL:
        train = recipes.load(name).train_config()
        rows = [train.batch / world for world in WORLDS]
        told = [f"{each:g}" if each.is_integer() else "-" for each in rows]
        most = [str(largest_world(train.batch, world)) for world in WORLDS]
        yield [name, train.batch, train.scored, *told, ", ".join(most)]


def _memory() -> Iterator[list[object]]:
    for name in LARGE:
        for world in (1, *WORLDS):
            one = setup(name, world)
            found = []
            for shard in (False, True):
                for again in (False, True):
                    each = replace(one, shard=shard, train=replace(one.train, recompute=again))
                    found.append("-" if shard and world == 1 else _gb(device_memory(each).total))
            yield [name, f"{world:,}", one.rows, _gb(device_memory(one).states), *found]


def _bytes() -> Iterator[list[object]]:
    for name in ("wt103-base", *LARGE):
        one = setup(name)
        count = one.parameters.count
        share = f"{100 * table_count(one.model) / count:.0f}"
        moved = [[sent(replace(setup(name, world), shard=shard)) for world in WORLDS] for shard in (False, True)]
        filled = 100 * (one.parameters.padded(WORLDS[-1]) / count - 1)
        yield [name, f"{count / 1e6:.0f}", share, *(_gb(x) for kind in moved for x in kind), f"{filled:.1f}"]


def _time() -> Iterator[list[object]]:
    for name in LARGE:
        for world in (1, *WORLDS):
            one = setup(name, world)
            kinds = [step_time(replace(one, shard=shard), H200) for shard in (False, True)]
            _, found = best(one, H200)
            free = best(one, replace(H200, launch=0.0))[1]
            times = [found.products, found.launches, found.optimizer, found.waited, *(kind.total for kind in kinds)]
            told = [f"{1e3 * x:.1f}" for x in times]
            if world == 1:
                told[-1] = "-"
            yield [
                name, f"{world:,}", one.rows, *told, f"{100 * found.efficiency:.0f}%", f"{100 * free.efficiency:.0f}%",
                found.bound,
            ]  # fmt: skip


def _busy() -> Iterator[list[object]]:
    for name in LARGE:
        published = recipes.load(name).train_config().batch
        cells = []
        for world in WORLDS:
            rows = rows_for(setup(name, world), H200, BUSY)
            cells.append("-" if rows is None else f"{rows * world:,}, {rows * world / published:.3g} times")
        yield [name, *cells]


def _memory_length() -> Iterator[list[object]]:
    for again in (False, True):
        for shard in (False, True):
            named = {"--recompute": again, "--shard": shard}
            cells = [" ".join(name for name, given in named.items() if given) or "none"]
            for rows in (1, 8):
                one = setup("enwik8-large", 8, rows)
                one = replace(one, shard=shard, train=replace(one.train, recompute=again))
                length = longest_memory(one, H200)
                full = replace(one, model=replace(one.model, mem_len=length))
                cells += [f"{length:,}", f"{step_time(full, H200).total:.1f} s"]
            yield list(cells)


def _gb(number: float) -> str:
    return f"{number / 1e9:.1f}"


def _table(heads: str, rows: Iterator[list[object]]) -> str:
    lines = [f"| {heads} |", "|" + "---|" * (heads.count(" | ") + 1)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)
