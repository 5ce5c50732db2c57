"""`hpcdecode bench gpu`: what a GPU does as S-rank, as R-rank and as both, against what it allows.

A random Llama checkpoint is made once and kept in the work folder. Attention is verified against float64 first.
attention: GB/s of attn_cuda against copying on the device. latents, states: the same over latents, and of what torch's
operations do for int8 latents and recurrent states. slices: a step's slices and logits of B sequences against their
bare GEMMs, operator by operator and by torch's compiler. transfers: the seconds that the copies of a step add to its
slices, against what they take alone. jobs: tokens/s of whole jobs by where S and R are, against one process on the GPU;
and of transformers' continuous batching. --gpu-memory bounds what a rank takes of a GPU, as a smaller card would. The
S-rank idles for what its slices, measured alone at a lane's batch, leave of the decode time.

--first-day runs a list of checks and figures in order: is the GPU there, are the kernels right, do they keep to their
memory, do tokens agree, does nothing wait that should not, and how fast is it. It stops at the first failed check or
figure out of its expected range, and writes first_day.json and first_day.md to the work folder. Each part runs in a
process of its own, with a time limit.
"""

from __future__ import annotations

from hpcdecode.bench.gpu.command import add_arguments, run

__all__ = ["add_arguments", "run"]
