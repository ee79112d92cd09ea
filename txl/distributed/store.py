"""A store of small values that processes share, beside the one they met by."""

import os
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from txl.distributed.world import World
from txl.errors import TxlError

_TIMEOUT = timedelta(minutes=1)  # to reach the first process


def shared_store(world: World) -> TCPStore:
    """A store in the first process, for as long as that keeps it, which all have reached.

    Raises:
        SharedError: one of them cannot reach it.
    """
    host = os.environ["MASTER_ADDR"]

    def made(port: int) -> TCPStore:
        try:
            return TCPStore(host, port, is_master=world.first, timeout=_TIMEOUT, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            raise TxlError(f"no store can be reached at {host}:{port}: {first_line(error)}") from error

    own: list[TCPStore] = []
    with world.together():
        if world.first:
            own.append(made(0))
        port = world.gather(own[0].port if own else 0)[0]
    with world.together():
        if not own:
            own.append(made(port))
    return own[0]


def first_line(error: BaseException) -> str:
    """What torch says, without the stack that may follow."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
