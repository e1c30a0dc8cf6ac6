"""The demo's model: a small GPT in plain flax.nnx. It knows nothing of devices, placements or stages.

Pre-norm decoder blocks after GPT-2 (Radford et al. 2019), with a head of its own. ``loss`` and ``sample`` are what one
writes for one device; `oneflax.demo` hands them to a plan as they stand.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx

SMALL = nnx.initializers.normal(0.02)
"""How layers start that write into the stream or the logits: near zero, so that a token first speaks for itself."""


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a `Gpt`; ``context`` is the longest text it sees, in tokens."""

    vocab: int
    blocks: int = 4
    width: int = 96
    heads: int = 4
    context: int = 64


class Attention(nnx.Module):
    """Causal self-attention, ``(batch, time, width)`` to the same."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs) -> None:
        self.heads = size.heads
        self.q, self.k, self.v = (nnx.Linear(size.width, size.width, rngs=rngs) for _ in range(3))
        self.o = nnx.Linear(size.width, size.width, kernel_init=SMALL, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Mixes every position with the ones before it."""
        q, k, v = (self._by_head(linear(x)) for linear in (self.q, self.k, self.v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.reshape(x.shape))

    def _by_head(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.heads, -1)  # (batch, time, heads, width / heads)


class Mlp(nnx.Module):
    """Four times wider, GELU, and back."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(size.width, 4 * size.width, rngs=rngs)
        self.down = nnx.Linear(4 * size.width, size.width, kernel_init=SMALL, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Works on every position alone."""
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """Attention and MLP, each added to what it reads."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs) -> None:
        self.attn_norm = nnx.LayerNorm(size.width, rngs=rngs)
        self.attn = Attention(size, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(size.width, rngs=rngs)
        self.mlp = Mlp(size, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """One layer, ``(batch, time, width)`` to the same."""
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nnx.Module):
    """Tokens ``(batch, time)`` to logits ``(batch, time, vocab)`` of the token after each."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(size.vocab, size.width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.position = nnx.Embed(size.context, size.width, embedding_init=nnx.initializers.normal(0.1), rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs=rngs) for _ in range(size.blocks)])
        self.norm = nnx.LayerNorm(size.width, rngs=rngs)
        self.head = nnx.Linear(size.width, size.vocab, use_bias=False, kernel_init=SMALL, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits for every position, from the positions up to it."""
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: Gpt, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of each token of ``(batch, time + 1)`` after the first."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit(static_argnames=("length",))
def sample(model: Gpt, first: jax.Array, key: jax.Array, length: int, temperature: float = 0.8) -> jax.Array:
    """Lets the model write ``length`` tokens after the one token ``first``.

    Every token runs the whole window anew: one program of fixed shapes, and nothing to keep between tokens.

    Args:
        model: The model.
        first: A scalar token; it starts the result.
        key: Of the draws.
        length: Number of tokens to write.
        temperature: Divides the logits; below 1 the likelier tokens win more often.

    Returns:
        ``(1 + length,)`` tokens.
    """
    window = model.position.num_embeddings

    def write(at: jax.Array, tokens: jax.Array) -> jax.Array:
        start = jnp.maximum(0, at - window)
        seen = jax.lax.dynamic_slice_in_dim(tokens, start, window)  # what lies after `at` is not looked at
        logits = model(seen[None])[0, at - 1 - start]
        return tokens.at[at].set(jax.random.categorical(jax.random.fold_in(key, at), logits / temperature))

    tokens = jnp.zeros(max(1 + length, window), jnp.int32).at[0].set(first)
    return jax.lax.fori_loop(1, 1 + length, write, tokens)[: 1 + length]
