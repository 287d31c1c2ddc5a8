"""The TPU kernels behind the platform that a program is compiled for: asked for by name, or by default."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ..platforms import on_tpu, refuse
from . import chunked, pallas_tpu
from .logits import Logits
from .pallas_tpu_tiles import takes
from .streamed import Passes

Array = jax.Array
Pass = Callable[..., Any]

CHUNKED = Passes(chunked.forward, chunked.backward)
KERNELS = Passes(pallas_tpu.forward, pallas_tpu.backward)


def kernels_for_tpu(hidden: Array, head: Array) -> Passes | None:
    """The two passes that a program for TPU takes where no implementation is named, in the loss too; None: as everywhere else.

    They are the Pallas kernels wherever these take the arrays (bfloat16 or float32, a width that fits in vector memory).
    **An estimate, no TPU was at hand.** Each matmul takes the longer of its FLOPs at the published bfloat16 peak and its bytes
    at the published bandwidth of main memory (197 TFLOP/s and 819 GB/s on v5e, 459 and 2765 on v5p, 918 and 1640 on v6e):

    - one pass in XLA (:mod:`.fused`), three matmuls of ``2 n V D`` FLOPs. Logits are written once and read three times, d-logits
      written once and read twice (22 bytes a logit in bfloat16), and each chunk of tokens reads the head twice and reads and
      writes its float32 gradient (12 bytes per element of the head and *chunk*). Reading logits overlaps with no matmul.
    - two passes in kernels, four matmuls. No logit leaves vector memory; the head is read once per 1024 tokens, d-hidden
      read and written once per 512 to 2048 rows of the head, behind the matmuls.

    ::

        milliseconds, bfloat16, 8192 tokens     v5e            v5p            v6e
        V 151936, D 4096: one pass, chunks of
          128 tokens (the rule's, 64 MiB)       617            183            308
          1024 tokens (0.6 GiB of logits)       177             73             59
        two passes in kernels                   207             89             44
        V 37984 (a quarter of it), D 4096:
          one pass, chunks of 376 / kernels      65 / 52        23 / 22        29 / 11
        V 49152, D 576:
          one pass, chunks of 320 / kernels      22 / 9.4     6.6 / 4.0      11 / 2.0

    So one pass with chunks of 1024 tokens might be a fifth faster on v5e and v5p, for a gigabyte (float32 logits and d-logits);
    with the chunks that :func:`.blocks.chunk_size` makes the kernels are ahead on all three. Over a vocabulary that is sharded
    the kernels' sums meet once, those of the one pass once per chunk.
    """
    return KERNELS if takes(hidden, head) else None


def default_passes(hidden: Array, head: Array) -> Passes:
    """The passes of ``token_logprob`` where none are named: the kernels in a program for TPU, else chunks."""
    return CHUNKED if kernels_for_tpu(hidden, head) is None else _DEFAULT


def _either(kernel: Pass, otherwise: Pass) -> Pass:
    def run(how: Logits, *args: Any) -> Any:
        return on_tpu(functools.partial(kernel, how), functools.partial(otherwise, how))(*args)

    return run


def _refused(otherwise: Pass) -> Pass:
    """Raises at lowering; before that it has the shapes of ``otherwise``."""
    def run(how: Logits, hidden: Array, *args: Any) -> Any:
        return otherwise(how, refuse(hidden, "token_logprob 'pallas_tpu'", "'chunked'"), *args)

    return run


_DEFAULT = Passes(*(_either(kernel, otherwise) for kernel, otherwise in zip(KERNELS, CHUNKED)))

ONLY_ON_TPU = Passes(*(_either(kernel, _refused(otherwise)) for kernel, otherwise in zip(KERNELS, CHUNKED)))
"""The kernels; a program for anything else than a TPU raises ValueError when it is lowered."""
