"""The losses of one model of `txl recl`: those that are kept, the rest measured now and kept."""

import time
from contextlib import nullcontext
from pathlib import Path

from txl.commands.console import EvaluationProgress
from txl.commands.interrupt import stop_on_sigterm
from txl.commands.options import console, say
from txl.distributed.world import World
from txl.recl import store
from txl.recl.losses import Losses, measure
from txl.recl.networks import NetworkLosses
from txl.recl.positions import Plan
from txl.text.vocabulary import Tokens

SAVE_EVERY_S = 20.0


def losses_of(name: str, predict: NetworkLosses, tokens: Tokens, plan: Plan, folder: Path, world: World) -> Losses:
    """All losses, in every process; the first keeps them in `folder`.

    Raises:
        SharedError: they cannot be kept, and there are several processes.
    """
    model = predict.language_model
    mark = store.fingerprint(
        model.digest, tokens, plan, attn_len=predict.attn_len, clamp_len=predict.clamp_len, limit=predict.limit
    )
    kept = folder / "losses" / f"{store.file_name(name)}.npz"
    cost = plan.cost(predict.limit)
    begun = world.first_does(lambda: store.load(kept, mark, (plan.contexts, len(plan.positions()))))
    limited = "" if predict.limit is None else f"; longer contexts than its {predict.limit} are that one"
    told = f", {begun.tokens:,} of them done" if begun else ""
    say(f"{name}: {cost:,} tokens to read{told}{limited}")
    done, saved = begun, time.perf_counter()
    steps = measure(predict, tokens, plan, limit=predict.limit, device=model.model.device, begun=begun, world=world)
    keeps_always = stop_on_sigterm() if world.first and world.size > 1 else nullcontext()
    # That the first cannot write the others learn where they meet next, inside of `measure`.
    with world.together(), keeps_always, EvaluationProgress(console, name, cost) as progress:
        try:
            for done in steps:
                progress.update(done.tokens)
                if world.first and time.perf_counter() - saved > SAVE_EVERY_S:
                    store.save(kept, done, mark)
                    saved = time.perf_counter()
        finally:
            if world.first and done is not None and done is not begun:
                store.save(kept, done, mark)
    assert done is not None  # a plan has at least one run
    return done
